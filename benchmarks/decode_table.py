"""What `decode.py` measured, as a table."""

from collections.abc import Sequence

from figures import Line
from rich.console import Console
from rich.table import Table


def print_table(lines: Sequence[Line]) -> None:
    """A row for each case, and where it was measured."""
    title = "tokens a second; milliseconds of our step, and its floor"
    names = "model", "rows", "context", "mlxd", "mlx-lm", "ratio", "ms", "floor"
    table = Table(*names, title=title, show_edge=False)
    sides: dict[str, Line] = {}
    for line in lines:
        if line["kind"] == "machine":
            facts = "device", "blas", "mlx", "mlx_lm", "read_gb_per_s"
            table.caption = ", ".join(f"{fact} {line[fact]}" for fact in facts)
        elif line["kind"] == "skipped":
            case = line["model"], str(line["rows"]), f"{line['context']} {line['lengths']}"
            table.add_row(*case, line["reason"])
        elif line["kind"] == "steady":
            sides[line["side"]] = line
        elif line["kind"] == "ratio":
            ours, theirs = sides["mlxd"], sides["mlx-lm"]
            case = line["model"], str(line["rows"]), f"{line['context']} {line['lengths']}"
            speeds = f"{ours['tokens_per_s']:.1f}", f"{theirs['tokens_per_s']:.1f}"
            times = f"{ours['ms_per_step']:.2f}", f"{ours['floor_ms']:.2f}"
            table.add_row(*case, *speeds, f"{line['mlxd_over_mlx_lm']:.2f}", *times)
    Console().print(table)
