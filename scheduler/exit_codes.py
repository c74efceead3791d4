"""What the command `mlxd` ends with."""

EXIT_OK = 0
EXIT_FAILED = 1
"""The operation or the engine failed."""
EXIT_BAD_INPUT = 2
"""Arguments or configuration are wrong, which no restart mends."""
EXIT_HUNG = 3
"""A thread of the daemon hung or was dead."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""
