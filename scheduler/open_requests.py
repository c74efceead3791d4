"""Open requests, and how each of them ends."""

from collections.abc import Iterator, Mapping

from mlxd.metrics.recorder import Recorder
from mlxd.metrics.stats import RequestStats
from mlxd.scheduler.admission import Admission
from mlxd.scheduler.batch import Batch
from mlxd.scheduler.deadlines import Deadlines
from mlxd.scheduler.errors import RevokedError
from mlxd.scheduler.events import Event, Finished, RequestKey
from mlxd.scheduler.policy import Policy
from mlxd.scheduler.request import Request, RequestState
from mlxd.scheduler.tenants import TenantBook


class OpenRequests(Mapping[RequestKey, Request]):
    """Every open request in order of arrival, from its acceptance to its one Finished.

    What ends gives back its row and pages. Tokens that launched steps draw for it still are charged: nobody
    will read them, but else whoever cancels in time would be served for nothing.
    """

    def __init__(
        self, book: TenantBook, batch: Batch, *, policy: Policy, admission: Admission, recorder: Recorder
    ) -> None:
        self._requests: dict[RequestKey, Request] = {}
        self._book = book
        self._batch = batch
        self._policy = policy
        self._admission = admission
        self._recorder = recorder
        self._deadlines = Deadlines()
        self._num_left = 0

    def __getitem__(self, key: RequestKey) -> Request:
        return self._requests[key]

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.key] = request
        self._deadlines.add(request)

    def take_num_left(self) -> int:
        """Rows that left with their requests' end since the last call."""
        num_left, self._num_left = self._num_left, 0
        return num_left

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines.next

    def finish(
        self, request: Request, outcome: str, now: float, error_code: str = "", error: str = ""
    ) -> Finished:
        has_row = request.row is not None
        if has_row:
            self._batch.remove(request)
        else:
            self._book.drop(request)
        if request.num_inflight:
            tenant = self._book[request.tenant]
            self._policy.charge(tenant, 0, request.num_inflight)
            self._book.use(tenant, request.num_inflight, now)
        request.transition(RequestState.FINISHED)
        del self._requests[request.key]
        self._deadlines.discard(request)
        if has_row:
            self._admission.row_left(now, len(self))
            self._num_left += 1
        self._recorder.request(_stats(request, outcome, now))
        return Finished(request.key, outcome, request.usage, error_code, error)

    def fail(self, request: Request, code: str, now: float) -> Finished:
        """Its own computation failed."""
        return self.finish(request, "failed", now, code, f"this request's own computation failed: {code}")

    def revoke(self, request: Request, now: float, why: str = "") -> Finished:
        """Its tenant, or what its tenant may do, is gone."""
        error = RevokedError()
        return self.finish(request, "revoked", now, error.code, why or str(error))

    def expire(self, now: float) -> Iterator[Finished]:
        """End those whose deadline passed."""
        for request in self._deadlines.passed(now):
            message = f"the deadline passed after {now - request.arrived_at:.3f} s"
            yield self.finish(request, "expired", now, "expired", message)

    def give_up(self, request: Request, now: float) -> Finished:
        """It cannot meet its deadline any more."""
        assert request.deadline is not None
        needed_s, left_s = self._batch.least_s(request), request.deadline - now
        message = f"it takes {needed_s:.3f} s at least; its deadline is in {left_s:.3f} s"
        return self.finish(request, "hopeless", now, "hopeless", message)

    def finish_all(self, outcome: str, error_code: str, error: str, now: float) -> list[Event]:
        requests = list(self._requests.values())
        return [self.finish(request, outcome, now, error_code, error) for request in requests]

    def abandon(self, error_code: str, error: str, now: float) -> list[Event]:
        """Tell the end of all and touch nothing else: the rest of the state may be broken."""
        requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            self._recorder.request(_stats(request, "failed", now))
        return [Finished(request.key, "failed", request.usage, error_code, error) for request in requests]


def _stats(request: Request, outcome: str, now: float) -> RequestStats:
    arrived_at = request.arrived_at
    return RequestStats(
        tenant=request.tenant,
        outcome=outcome,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.num_cached,
        generated_tokens=len(request.output),
        queue_s=None if request.entered_at is None else request.entered_at - arrived_at,
        first_token_s=None if request.first_token_at is None else request.first_token_at - arrived_at,
        duration_s=now - arrived_at,
    )
