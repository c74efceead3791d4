"""Long stages of the start shown to whoever waits: bars on a terminal, a few lines elsewhere."""

import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

_LINE_STEP = 0.25


class ProgressBars:
    """A Progress callback: called with a stage's name and its share done, from one thread at a time.

    Bars stay on the screen when their stages end, and logs are printed above those that run. What cannot be
    written is not shown, and stops nothing.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._live: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, float] = {}

    def __call__(self, stage: str, fraction: float) -> None:
        with suppress(OSError):
            if self._console.is_terminal:
                self._draw(stage, fraction)
            else:
                self._tell(stage, fraction)

    def close(self) -> None:
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None
            self._tasks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draw(self, stage: str, fraction: float) -> None:
        if self._live is None:
            self._live = Progress(
                TextColumn("{task.description:<24}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._live.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._live.add_task(stage, total=1.0)
        self._live.update(self._tasks[stage], completed=min(fraction, 1.0))
        if self._live.finished:
            self.close()

    def _tell(self, stage: str, fraction: float) -> None:
        last = self._told.get(stage)
        if last is None or fraction >= last + _LINE_STEP or (fraction >= 1.0 > last):
            self._told[stage] = fraction
            # Rich's own print ends the thread where the pipe is closed.
            print(f"mlxd: {stage} {fraction:.0%}", file=self._console.file, flush=True)
