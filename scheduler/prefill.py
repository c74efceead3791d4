"""How much prefill a step holds, and whose."""

import math
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from mlxd.scheduler.policy import Policy
from mlxd.scheduler.request import Request
from mlxd.scheduler.tenant import Tenant
from mlxd.scheduler.tenants import TenantBook

_DECAY = 0.8


class PrefillBudget:
    """Tokens of prefill that fit a time, from the speed seen lately.

    Seconds and tokens decay together, so that a step weighs as much as the tokens it computed.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def tokens(self) -> int:
        """0 until a speed was seen: then a step holds one chunk."""
        return int(self._limit_s * self._tokens / self._seconds) if self._seconds > 0 else 0

    @property
    def token_s(self) -> float:
        """Seconds a token of prefill takes; infinite until a speed was seen."""
        return self._seconds / self._tokens if self._seconds > 0 else math.inf

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` of prefill in `seconds`."""
        if num_tokens > 0 and seconds > 0:
            self._seconds = _DECAY * self._seconds + seconds
            self._tokens = _DECAY * self._tokens + num_tokens


class PrefillTurns:
    """Whose chunk is next: by turns the row of the highest class with the least left, and the oldest one.

    The first turn lets short prompts pass long ones, and urgent ones the others; the second gives the oldest
    row at least every second chunk, so that each row in time becomes the oldest and ends. Rows of tenants
    that were ahead of another one before these prompts, even if all of its own were done, come after the
    others: where prompts take all the time there is, chunks are what tenants share.
    """

    def __init__(self, policy: Policy, book: TenantBook) -> None:
        self._policy = policy
        self._book = book
        self._oldest_next = False

    def split(self, rows: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Rows that take their turns first, and those of tenants that are ahead; both in entering order."""
        least: dict[int, Tenant] = {}
        computed: Counter[str] = Counter()
        for row in rows:
            tenant = self._book[row.tenant]
            computed[row.tenant] += row.num_computed
            behind = least.setdefault(row.level, tenant)
            if self._policy.counter(tenant) < self._policy.counter(behind):
                least[row.level] = tenant
        first: list[Request] = []
        ahead: list[Request] = []
        for row in rows:
            tenant = self._book[row.tenant]
            is_ahead = self._policy.is_ahead(tenant, least[row.level], computed[row.tenant], 0)
            (ahead if is_ahead else first).append(row)
        return first, ahead

    def pick(self, rows: Sequence[Request]) -> Request:
        """`rows` in entering order, not empty. The turn passes on by `took`."""
        return rows[0] if self._oldest_next else min(rows, key=attrgetter("level", "prefill_left"))

    def took(self) -> None:
        self._oldest_next = not self._oldest_next
