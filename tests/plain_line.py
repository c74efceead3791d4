"""Who is next, found the plain way: what `Line` must agree with."""

from collections.abc import Iterator

from mlxd.scheduler.policy import Policy
from mlxd.scheduler.tenant import Tenant
from mlxd.scheduler.tenants import TenantBook


class PlainLine:
    """Remembers nothing, and looks at every tenant that waits each time it is asked."""

    def __init__(self, book: TenantBook, policy: Policy) -> None:
        self._book = book
        self._policy = policy

    def note(self, tenant: Tenant) -> None:
        pass

    def stand_aside(self, tenant: Tenant, until: float) -> None:
        pass

    def __iter__(self) -> Iterator[Tenant]:
        return iter(sorted(self._book.queued.values(), key=self._place))

    def _place(self, tenant: Tenant) -> tuple[int, tuple[float, ...], str]:
        return (tenant.head.level, self._policy.rank(tenant), tenant.name)

    def held(self, now: float) -> list[Tenant]:
        return [tenant for tenant in self._book.queued.values() if tenant.is_held]

    def rivals(self, tenant: Tenant, level: int) -> list[Tenant]:
        others = [other for other in self._book.queued.values() if other is not tenant and not other.is_held]
        return [other for other in others if other.head.level == level] or others
