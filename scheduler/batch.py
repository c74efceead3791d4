"""The rows: who enters, what a step computes of them, who gives pages back."""

from mlxd.batching.runner import RunnerInfo
from mlxd.scheduler.admission import Admission
from mlxd.scheduler.config import SchedulerConfig
from mlxd.scheduler.kv_space import KvSpace
from mlxd.scheduler.policy import Policy
from mlxd.scheduler.prefill import PrefillBudget, PrefillTurns
from mlxd.scheduler.request import Request, RequestState
from mlxd.scheduler.step import Step
from mlxd.scheduler.tenants import Tenant, TenantBook


class Batch:
    """Running requests in the order in which they entered.

    A step holds every row that can draw a token, then as many prefill chunks as the budget holds, at least
    one.

    Where overcommitted pages run out, the row that entered last gives its own back, be it the one that
    asked: so the first row always goes on, and in time each one is first.

    Attributes:
        budget: prefill a step holds; told the measured speed by whoever reads results.
        num_entered: rows made since the start.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        info: RunnerInfo,
        *,
        space: KvSpace,
        book: TenantBook,
        policy: Policy,
        admission: Admission,
    ) -> None:
        self.budget = PrefillBudget(config.prefill_ms / 1000)
        self._space = space
        self._book = book
        self._policy = policy
        self._admission = admission
        self._chunk = info.memory.chunk
        self._max_rows = min(config.max_rows, info.memory.max_rows, info.max_batch)
        self._turns = PrefillTurns()
        self._running: dict[int, Request] = {}
        self._left: list[int] = []
        self.num_entered = 0
        self._is_short_of_pages = False

    def __len__(self) -> int:
        return len(self._running)

    def prefill_backlog(self) -> tuple[int, int]:
        """Rows in prefill, and the positions they still have to compute."""
        left = [request.prefill_left for request in self._running.values()]
        return sum(1 for n in left if n), sum(left)

    def plan(self, step: Step, now: float) -> None:
        """Fill `step`; it stays empty where nothing can be computed before a launched step is read."""
        was_short, self._is_short_of_pages = self._is_short_of_pages, False
        for request in list(self._running.values()):
            if request.row is not None and request.can_decode:
                self._plan_decode(step, request)
        # Pages that a row lacks are not for newcomers.
        may_enter = not (was_short or self._is_short_of_pages) or not self._running
        entered = self._enter_waiting(step, now) if may_enter else []
        step.num_joined += len(entered)
        ready = [request for request in entered if request.prefill_left == 0]
        self._plan_prefill(step)
        for request in ready:
            if self._has_room(request, request.num_computed + 1):
                self._add_decode(step, request)
        if step.is_empty:
            self._plan_oldest(step)

    def take_left(self) -> tuple[int, ...]:
        """Ids of rows that were planned and left since the last call."""
        left, self._left = tuple(self._left), []
        return left

    def remove(self, request: Request) -> None:
        """Take the request's row, pages and promise back. A launched step may still compute the row."""
        row = request.row
        assert row is not None
        self._book[request.tenant].leave(request, self._space.bytes_of(request.worst_case))
        self._book.touched.add(request.tenant)
        self._space.leave(request)
        del self._running[row.row_id]
        if request.num_computed > row.num_reused:
            self._left.append(row.row_id)
        request.row = None
        request.prefill_end = request.num_computed = 0

    def _plan_decode(self, step: Step, request: Request) -> None:
        if self._make_room(step, request, request.num_computed + 1):
            self._add_decode(step, request)

    def _plan_prefill(self, step: Step) -> None:
        """Chunks by turns. None of them may preempt: the row it would hit can be in the step already."""
        rows = [request for request in self._running.values() if request.prefill_left > 0]
        while rows:
            request = self._turns.pick(rows)
            rows.remove(request)
            end = request.chunk_end(self._chunk)
            num_tokens = end - request.num_computed
            if step.chunks and step.num_prefill_tokens + num_tokens > self.budget.tokens:
                break
            if self._has_room(request, end):
                self._add_chunk(step, request, end)
                self._turns.took()

    def _plan_oldest(self, step: Step) -> None:
        """Nothing found room: the first row that has work takes it from those that entered last."""
        for request in list(self._running.values()):
            if request.prefill_left > 0:
                end = request.chunk_end(self._chunk)
                if self._make_room(step, request, end):
                    self._add_chunk(step, request, end)
                return
            if request.can_decode:
                self._plan_decode(step, request)
                return

    def _add_decode(self, step: Step, request: Request) -> None:
        self._charge(self._book[request.tenant], step.add_decode(request))

    def _add_chunk(self, step: Step, request: Request, end: int) -> None:
        tenant = self._book[request.tenant]
        num_tokens = end - request.num_computed
        prompt_tokens = step.add_chunk(request, end)
        tenant.prefilled(request, num_tokens)
        self._charge(tenant, prompt_tokens)

    def _charge(self, tenant: Tenant, prompt_tokens: int) -> None:
        if prompt_tokens:
            self._policy.charge(tenant, prompt_tokens, 0)
            self._book.touched.add(tenant.name)

    def _has_room(self, request: Request, end: int) -> bool:
        fits = self._space.grow(request, end)
        self._is_short_of_pages |= not fits
        return fits

    def _make_room(self, step: Step, request: Request, end: int) -> bool:
        """As `_has_room`, preempting from the last row on; False: that was `request` itself.

        Rows after `request` must not be in the step yet.
        """
        while request.row is not None:
            if self._has_room(request, end):
                return True
            self._preempt(next(reversed(self._running.values())))
            step.num_preempted += 1
        return False

    def _preempt(self, request: Request) -> None:
        request.transition(RequestState.PREEMPTED)
        request.num_preemptions += 1
        self.remove(request)
        self._book.enqueue(request, first=True)

    def _enter_waiting(self, step: Step, now: float) -> list[Request]:
        """Give rows to queued requests as far as rows, pages, caps and the prefill budget go."""
        if not self._book.queued or len(self._running) >= self._max_rows:
            return []
        entered: list[Request] = []
        prefilling = (request for request in self._running.values() if request.prefill_left > 0)
        room = self.budget.tokens - sum(r.chunk_end(self._chunk) - r.num_computed for r in prefilling)
        while self._book.queued and len(self._running) < self._max_rows:
            request = self._admission.pick(self._book.queued.values(), max(0, room), self._chunk)
            if request is None:
                break
            self._enter(step, request, now)
            room -= request.chunk_end(self._chunk) - request.num_computed
            entered.append(request)
        return entered

    def _enter(self, step: Step, request: Request, now: float) -> None:
        request.transition(RequestState.RUNNING)
        self._book.dequeue(request)
        self.num_entered += 1
        request.row = self._space.enter(self.num_entered, request, self.budget.token_s)
        request.prefill_end = request.num_known - 1
        request.num_computed = request.row.num_reused
        request.entered_at = now
        self._running[request.row.row_id] = request
        tenant = self._book[request.tenant]
        tenant.enter(request, self._space.bytes_of(request.worst_case))
        cached_tokens = step.add_reused(request)
        if cached_tokens:
            self._policy.charge(tenant, 0, 0, cached_tokens)
