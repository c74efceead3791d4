"""Requests that wait for their own clients and not for a row."""

from collections.abc import Mapping

from mlxd.scheduler.admission import Admission
from mlxd.scheduler.batch import Batch
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.request import Request, RequestState
from mlxd.scheduler.tenants import TenantBook


class Paused:
    """Open requests that are kept out of the batch and out of every queue.

    A row that is paused does as a preempted one, but makes way for its own client: that counts as no
    preemption of it, and what it computes again is charged to its tenant.
    """

    def __init__(
        self,
        requests: Mapping[RequestKey, Request],
        *,
        batch: Batch,
        book: TenantBook,
        admission: Admission,
    ) -> None:
        """`requests`: all that are open."""
        self._requests = requests
        self._batch = batch
        self._book = book
        self._admission = admission
        self._returning: dict[int, Request] = {}
        self._num_rows_left = 0

    def __len__(self) -> int:
        return self._book.num_paused

    def pause(self, key: RequestKey) -> None:
        """It gives up its row, or its turn, until `unpause`; an unknown key is nothing."""
        request = self._requests.get(key)
        if request is None:
            return
        if request.state is RequestState.PAUSED:
            self._returning.pop(request.number, None)
            return
        has_row = request.row is not None
        request.transition(RequestState.PAUSED)
        if has_row:
            request.pays_again = True
            self._batch.remove(request)
            self._num_rows_left += 1
        else:
            self._book.dequeue(request)
        request.blocked_since = None
        self._book.pause(request)

    def unpause(self, key: RequestKey) -> None:
        """It waits for a row again, with the next `settle` after its tokens in flight were read.

        With one of them in flight it could not enter, and would hold up its tenant's others.
        """
        request = self._requests.get(key)
        if request is not None and request.state is RequestState.PAUSED:
            self._returning[request.number] = request

    def settle(self, now: float) -> list[str]:
        """Queue those that return, each at the place its arrival gives it.

        Returns:
            Why rows left since the last call, one each.
        """
        returning = [r for r in self._returning.values() if r.state is not RequestState.FINISHED]
        self._returning = {request.number: request for request in returning if request.num_inflight}
        for request in [request for request in returning if not request.num_inflight]:
            self._book.unpause(request)
            request.transition(RequestState.PREEMPTED)
            request.last_token_at = None  # the gap was its client's own
            self._admission.queue(request, now)
        reasons, self._num_rows_left = ["credit"] * self._num_rows_left, 0
        return reasons
