"""Facts and tables as the command line prints them."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 1000


def show(renderable: RenderableType) -> None:
    """Print tables to stdout. Off a terminal nothing is wrapped, and no line ends in spaces."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    with console.capture() as shown:
        console.print(renderable, soft_wrap=True)
    for line in shown.get().splitlines():
        print(line.rstrip())


def show_counts(counts: Mapping[str, int]) -> str:
    """{"stop": 2, "failed": 0} -> "2 stop"."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "none"


def facts(*pairs: tuple[str, str]) -> Text:
    """A name and a value a line."""
    width = max(len(name) for name, _ in pairs)
    return Text("\n".join(f"{name:<{width}}  {value}" for name, value in pairs))


class _Table(Table):
    """Its columns stand closer together where the console is too narrow for it."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(width=_PIPE_WIDTH)
        if self.__rich_measure__(console, unbounded).maximum > options.max_width:
            self.padding = 0
        return super().__rich_console__(console, options)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Numbers on the right of every column but the first."""
    made = _Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    made.add_column(columns[0])
    for column in columns[1:]:
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def page(*parts: RenderableType) -> Group:
    """Parts with a blank line between them."""
    blank = Text("")
    return Group(*[line for part in parts for line in (part, blank)][:-1])
