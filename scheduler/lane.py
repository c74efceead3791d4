"""Requests in the order in which they should run."""

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from mlxd.scheduler.priority import Priority
from mlxd.scheduler.request import Request

_SPARE = 16


class Lane:
    """Requests by deadline, then arrival; those without a deadline come last. Any may be taken out.

    What was taken out stays in the heap until it comes first, or until most of the heap is such.
    """

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._members: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """In no order."""
        return iter(self._members.values())

    @property
    def first(self) -> Request | None:
        heap, members = self._heap, self._members
        while heap:
            request = members.get(heap[0][1])
            if request is not None:
                return request
            heappop(heap)
        return None

    def add(self, request: Request) -> None:
        if len(self._heap) > 2 * len(self._members) + _SPARE:
            self._heap = [_key(member) for member in self._members.values()]
            heapify(self._heap)
        self._members[request.number] = request
        heappush(self._heap, _key(request))

    def __contains__(self, request: Request) -> bool:
        return request.number in self._members

    def discard(self, request: Request) -> None:
        self._members.pop(request.number, None)


def _key(request: Request) -> tuple[float, int]:
    return (math.inf if request.deadline is None else request.deadline, request.number)


class TenantQueue:
    """A tenant's requests outside the batch: a lane for each class, the highest one first.

    Attributes:
        lanes: one a class.
        head: the next request; None where there is none.
    """

    __slots__ = ("_num_of_class", "_num_risen", "head", "lanes")

    def __init__(self) -> None:
        self.lanes = tuple(Lane() for _ in Priority)
        self.head: Request | None = None
        self._num_of_class = [0] * len(Priority)
        self._num_risen = [0] * len(Priority)

    def __len__(self) -> int:
        return sum(self._num_of_class)

    def __contains__(self, request: Request) -> bool:
        return request in self.lanes[request.level]

    def add(self, request: Request) -> None:
        self.lanes[request.level].add(request)
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        self.lanes[request.level].discard(request)
        self._count(request, -1)

    def _count(self, request: Request, change: int) -> None:
        self._num_of_class[request.priority] += change
        self._num_risen[request.level] += change * (request.level < request.priority)
        firsts = (lane.first for lane in self.lanes)
        self.head = next((first for first in firsts if first is not None), None)

    def to_rise(self, level: int) -> Request | None:
        """The first request of a lane, if it may go to the class above: where no raised one is above it.

        One beside it, or behind it, is no reason: neither would ever rise where higher classes never end.
        """
        return None if any(self._num_risen[:level]) else self.lanes[level].first

    def competes(self, priority: Priority) -> bool:
        """Whether a request of this class or a higher one is in it, its own and not one it was raised to."""
        return any(self._num_of_class[: priority + 1])
