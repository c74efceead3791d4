"""Who is next among the tenants that wait, however many they are."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
from operator import attrgetter, itemgetter

from mlxd.scheduler.policy import Policy
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.tenant import Tenant

Place = tuple[int, tuple[float, ...], str]

_place_of = itemgetter(0)
_EARLY_S = 1e-3
"""Times are sums of floats: who is due so soon is looked at now."""
_SPARE = 16


class Line:
    """Tenants with a queue: by the class of their next request, then the policy's rank, then name.

    A tenant without rows keeps its place until it is noted. Those with rows are served in every step, but
    there are never more of them than rows: they are ranked when someone looks. A tenant that its minute
    holds, and that has no rows, stands aside until it is noted or its time comes. So a look costs what
    there are rows, and a change the logarithm of what there are tenants.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._noted: dict[str, Tenant] = {}
        self._served: dict[str, Tenant] = {}
        self._places: dict[str, Place] = {}
        self._order: list[tuple[Place, Tenant]] = []
        self._aside: dict[str, tuple[float, Tenant]] = {}
        self._alarms: list[tuple[float, str]] = []

    def note(self, tenant: Tenant) -> None:
        """Its queue, weight or bucket, whether it has rows, or without any its service, has changed."""
        self._noted[tenant.name] = tenant

    def __iter__(self) -> Iterator[Tenant]:
        """In order, but for those that stand aside. What is noted meanwhile counts from the next look on."""
        self._settle()
        served = [(self._place(tenant), tenant) for tenant in self._served.values()]
        served.sort(key=_place_of)
        return (tenant for _, tenant in merge(served, self._order, key=_place_of))

    def held(self, now: float) -> list[Tenant]:
        """Held tenants that may be free by now, in the order in which their queues began.

        Those without rows that are held still have to be told to `stand_aside` again.
        """
        self._settle()
        found = [tenant for tenant in self._served.values() if tenant.is_held]
        while self._alarms and self._alarms[0][0] <= now + _EARLY_S:
            due_at, name = heappop(self._alarms)
            if name in self._aside and self._aside[name][0] == due_at:
                found.append(self._aside.pop(name)[1])
        return sorted(found, key=attrgetter("queue_number"))

    def stand_aside(self, tenant: Tenant, until: float) -> None:
        """A tenant without rows is held until then, if it is not noted before."""
        if len(self._alarms) > 2 * len(self._aside) + _SPARE:  # most are of tenants noted since
            self._alarms = [(due_at, name) for name, (due_at, _) in self._aside.items()]
            heapify(self._alarms)
        self._aside[tenant.name] = (until, tenant)
        heappush(self._alarms, (until, tenant.name))

    def rivals(self, tenant: Tenant, level: int) -> list[Tenant]:
        """Of other tenants that no cap holds, whose next requests are of this class, or of any if none is.

        Under a policy that ranks by counters, the one with the lowest counter is among them.
        """
        self._settle()
        served = [other for other in self._served.values() if not other.is_held and other is not tenant]
        of_class = [other for other in served if other.head.level == level]
        of_class += self._foremost(tenant, level)
        return of_class or served + [t for each in Priority for t in self._foremost(tenant, each)]

    def _foremost(self, tenant: Tenant, level: int) -> list[Tenant]:
        """The first one without rows whose next request is of this class, if it is not `tenant`."""
        start = bisect_left(self._order, level, key=lambda item: item[0][0])
        first = self._order[start : start + 2]
        return [other for place, other in first if place[0] == level and other is not tenant][:1]

    def _place(self, tenant: Tenant) -> Place:
        return (tenant.head.level, self._policy.rank(tenant), tenant.name)

    def _settle(self) -> None:
        for name, tenant in self._noted.items():
            self._remove(name)
            if not tenant.queue:
                continue
            if tenant.num_running:
                self._served[name] = tenant
            elif tenant.is_held:
                self.stand_aside(tenant, -math.inf)
            else:
                place = self._places[name] = self._place(tenant)
                insort(self._order, (place, tenant), key=_place_of)
        self._noted.clear()

    def _remove(self, name: str) -> None:
        self._served.pop(name, None)
        self._aside.pop(name, None)
        place = self._places.pop(name, None)
        if place is not None:
            del self._order[bisect_left(self._order, place, key=_place_of)]
