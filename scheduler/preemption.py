"""Whose rows make way for a request that would be next and finds no room."""

from collections.abc import Iterable
from itertools import takewhile

from mlxd.scheduler.config import SchedulerConfig
from mlxd.scheduler.kv_space import KvSpace
from mlxd.scheduler.policy import Policy
from mlxd.scheduler.request import Request
from mlxd.scheduler.tenants import TenantBook

_SLICE_STEPS = 8
LAST_TOKENS = 16
"""A row that has no more than these to draw is left alone."""


class Preemption:
    """Picks rows by two rules; changes nothing.

    "priority": rows of a lower class than the request's own, the lowest first. Ageing gives a request its
    turn and never another's row.
    "slice": rows that drew `slice_tokens` since they entered, of a tenant that is ahead of the request's by
    more than a slice and the row's recomputation cost.

    A row is preempted `max_preemptions` times at most, and not for its last tokens.
    """

    def __init__(self, config: SchedulerConfig, space: KvSpace, book: TenantBook, policy: Policy) -> None:
        self._slice_tokens = config.slice_tokens
        self._max_preemptions = config.max_preemptions
        self._space = space
        self._book = book
        self._policy = policy

    def is_due(self, running: Iterable[Request], step_id: int, worst_running: int) -> bool:
        """Whether `victims` may find any: cheap, and for slices only every eighth step.

        Args:
            running: rows in entering order.
            worst_running: lowest class of a row.
        """
        if self._book.best_waiting < worst_running:
            return True
        if self._slice_tokens is None or step_id % _SLICE_STEPS:
            return False
        entered_before = step_id - self._slice_tokens
        early = takewhile(lambda row: row.entered_step <= entered_before, running)
        return any(self._may_be_preempted(row) for row in early)

    def victims(self, request: Request, running: Iterable[Request]) -> tuple[list[Request], str]:
        """Rows without which `request` has room, and the rule they fall under; none if these do not suffice.

        At least one, as `request` has none without.
        """
        candidates = [row for row in running if self._may_be_preempted(row)]
        lower = [row for row in candidates if row.level > request.priority]
        lower.sort(key=lambda row: (-row.level, -row.entered_step))
        if chosen := self._enough(request, lower):
            return chosen, "priority"
        ahead = [row for row in candidates if self._had_its_slice(row, request)]
        ahead.sort(key=lambda row: (-self._book[row.tenant].service, row.num_known))
        return self._enough(request, ahead), "slice"

    def makes_way(self, row: Request, request: Request) -> bool:
        """Whether `row`, once it runs, can be preempted for the class of `request`."""
        return row.level > request.priority and self._may_be_preempted(row)

    def _may_be_preempted(self, row: Request) -> bool:
        return row.num_preemptions < self._max_preemptions and row.most_left > LAST_TOKENS

    def _had_its_slice(self, row: Request, request: Request) -> bool:
        if self._slice_tokens is None or row.num_drawn < self._slice_tokens or row.level < request.level:
            return False
        served, waiting = self._book[row.tenant], self._book[request.tenant]
        return self._policy.is_ahead(served, waiting, row.num_known, self._slice_tokens)

    def _enough(self, request: Request, rows: list[Request]) -> list[Request]:
        """The first of `rows` that make room together; none where all of them do not."""
        lacking = self._space.lacking(request, self._book.reserves.kept_from(request.tenant))
        for count, row in enumerate(rows, start=1):
            lacking = [n - pages for n, pages in zip(lacking, self._space.promised_to(row), strict=True)]
            if max(lacking) <= 0:
                return rows[:count]
        return []
