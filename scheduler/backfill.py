"""Who may enter before a request that was picked first and waits for pages."""

from collections.abc import Iterable

from mlxd.scheduler.kv_space import KvSpace
from mlxd.scheduler.request import Request
from mlxd.scheduler.reserves import Reserves


class Backfill:
    """The pages that `waiting` will enter on: when it can at the latest, and what is left beside it then.

    Steps are counted as if every row drew all its tokens, a step each, and no chunk waited for another's.
    So whoever ends within `steps`, or fits beside it, does not put it off. Source: the EASY scheduler
    (Lifka 1995, The ANL/IBM SP scheduling system).

    Attributes:
        waiting: that request.
        steps: until enough rows have ended; None: even with no row at all it lacks pages.
    """

    def __init__(
        self, waiting: Request, running: Iterable[Request], space: KvSpace, reserves: Reserves, chunk: int
    ) -> None:
        lacking = space.lacking(waiting, reserves.kept_from(waiting.tenant))
        self.waiting = waiting
        self.steps: int | None = None
        self._chunk = chunk
        for request in sorted(running, key=lambda request: request.steps_left(chunk)):
            lacking = [n - pages for n, pages in zip(lacking, space.promised_to(request), strict=True)]
            if max(lacking) <= 0:
                self.steps = request.steps_left(chunk)
                break
        self._left = [-n for n in lacking]

    def allows(self, request: Request) -> bool:
        """Whether `request` may enter now, with no effect on when `waiting` can."""
        if self.steps is None:
            return False
        if request.steps_left(self._chunk) <= self.steps:
            return True
        return all(n <= left for n, left in zip(request.worst_case.pages, self._left, strict=True))
