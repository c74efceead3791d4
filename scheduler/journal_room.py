"""How much of the journal each tenant has, and may have."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.events import RequestKey


@dataclass(frozen=True, slots=True)
class JournalUsage:
    """`held`: bytes of each tenant that has any. `part`: what each has room for, whatever others hold."""

    held: Mapping[str, int]
    part: int


class JournalRoom:
    """Half of the room is divided equally among the tenants, the other half is for whoever comes first.

    So a tenant finds room within its part whatever the others hold. After a change of the tenants that is so
    again once those that hold more than the new parts have given it back.
    """

    def __init__(self, max_bytes: int) -> None:
        """For one tenant, until `keep` tells who they are."""
        self._max_bytes = max_bytes
        self._sizes: dict[RequestKey, int] = {}
        self._held: Counter[str] = Counter()
        self._unsettled: list[tuple[RequestKey, int]] = []
        self._divide(1)

    def _divide(self, num_tenants: int) -> None:
        self._part = self._max_bytes // 2 // num_tenants
        self._common = self._max_bytes - num_tenants * self._part
        self._taken = sum(map(self._beyond, self._held.values()))

    def _beyond(self, held: int) -> int:
        """How much of a tenant's bytes is of the common half."""
        return max(0, held - self._part)

    @property
    def usage(self) -> JournalUsage:
        return JournalUsage(dict(self._held), self._part)

    def size_of(self, key: RequestKey) -> int:
        """Bytes that a request holds; 0 where there is none."""
        return self._sizes.get(key, 0)

    def put(self, key: RequestKey, num_bytes: int) -> None:
        """Let a request hold `num_bytes` in place of what it held. Raises JournalError: there is no room."""
        before = self._held[key.tenant]
        held = before + num_bytes - self.size_of(key)
        more = self._beyond(held) - self._beyond(before)
        if more > 0 and self._taken + more > self._common:
            text = f"tenant {key.tenant!r} would hold {held} bytes of the journal; its part is {self._part}"
            raise JournalError("journal_full", f"{text}, and what is for all is taken")
        self.set(key, num_bytes)

    def set(self, key: RequestKey, num_bytes: int) -> None:
        """As `put`, whether there is room or not; 0 forgets the request."""
        size, before = self.size_of(key), self._held[key.tenant]
        held = before + num_bytes - size
        self._taken += self._beyond(held) - self._beyond(before)
        self._held[key.tenant] = held
        if not held:
            del self._held[key.tenant]
        self._sizes[key] = num_bytes
        if not num_bytes:
            del self._sizes[key]
        self._unsettled.append((key, size))

    def keep(self, tenants: Collection[str]) -> tuple[str, ...]:
        """Divide among these tenants; what others hold is forgotten. Returns those of them that held any."""
        gone = tuple(tenant for tenant in self._held if tenant not in tenants)
        for key in [key for key in self._sizes if key.tenant in gone]:
            self.set(key, 0)
        self._divide(len(tenants))
        return gone

    def settle(self) -> None:
        """What was changed since the last call stays."""
        self._unsettled.clear()

    def undo(self) -> None:
        """Take back what requests hold since then; the division stays."""
        for key, size in reversed(self._unsettled[:]):
            self.set(key, size)
        self._unsettled.clear()
