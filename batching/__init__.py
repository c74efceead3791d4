"""Rows, step plans and the runner that executes them on MLX."""
