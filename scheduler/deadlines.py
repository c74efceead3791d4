"""Which open requests ran out of time."""

from mlxd.scheduler.lane import Lane
from mlxd.scheduler.request import Request


class Deadlines:
    """Open requests that have a deadline."""

    def __init__(self) -> None:
        self._lane = Lane()

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            self._lane.add(request)

    def discard(self, request: Request) -> None:
        self._lane.discard(request)

    @property
    def next(self) -> float | None:
        """The earliest one."""
        first = self._lane.first
        return None if first is None else first.deadline

    def passed(self, now: float) -> list[Request]:
        """Requests whose deadline passed; they are forgotten."""
        found: list[Request] = []
        while (
            (first := self._lane.first) is not None and first.deadline is not None and first.deadline <= now
        ):
            self._lane.discard(first)
            found.append(first)
        return found
