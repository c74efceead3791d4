"""The rows: who enters, what a step computes of them, who gives pages back."""

from collections import Counter

from mlxd.batching.runner import RunnerInfo
from mlxd.scheduler.admission import Admission
from mlxd.scheduler.config import SchedulerConfig
from mlxd.scheduler.kv_space import KvSpace
from mlxd.scheduler.pace import Pace
from mlxd.scheduler.policy import Policy
from mlxd.scheduler.preemption import Preemption
from mlxd.scheduler.prefill import PrefillBudget, PrefillTurns
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.request import Request, RequestState
from mlxd.scheduler.step import Step
from mlxd.scheduler.tenant import Tenant
from mlxd.scheduler.tenants import TenantBook


class Batch:
    """Running requests in the order in which they entered.

    A step holds every row that can draw a token, then as many prefill chunks as the budget holds, at least
    one.

    Where overcommitted pages run out, the row that entered last gives its own back, be it the one that
    asked: so the first row always goes on, and in time each one is first. Rows also make way for whoever
    would be next and finds no room, by the rules of `Preemption`.

    Attributes:
        budget, pace: prefill a step holds, and the speed; told what was measured by whoever reads results.
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
        preemption: Preemption,
    ) -> None:
        self.budget = PrefillBudget(config.prefill_ms / 1000, info.memory.chunk)
        self.pace = Pace(self.budget)
        self._space = space
        self._book = book
        self._policy = policy
        self._admission = admission
        self._preemption = preemption
        self._chunk = info.memory.chunk
        self._max_rows = min(config.max_rows, info.memory.max_rows, info.max_batch)
        self._turns = PrefillTurns(policy, book)
        self._running: dict[int, Request] = {}
        self._prefilling: dict[int, Request] = {}
        self._num_of_class = [0] * len(Priority)
        self._left: list[int] = []
        self.num_entered = 0
        self._is_short_of_pages = False

    def __len__(self) -> int:
        return len(self._running)

    def prefill_backlog(self) -> tuple[int, int]:
        """Rows in prefill, and the positions they still have to compute."""
        return len(self._prefilling), sum(request.prefill_left for request in self._prefilling.values())

    def waits(self, now: float) -> dict[str, int]:
        """Queued requests, by what their tenant's next one waits for: "rows", "pages" or a setting."""
        has_row, room = len(self._running) < self._max_rows, self._prefill_room()
        found: Counter[str] = Counter()
        for tenant in self._book.queued.values():
            found[self._admission.why_waiting(tenant, room, now, has_row=has_row)] += len(tenant.queue)
        return dict(found)

    def plan(self, step: Step, now: float) -> None:
        """Fill `step`; it stays empty where nothing can be computed before a launched step is read."""
        was_short, self._is_short_of_pages = self._is_short_of_pages, False
        if not was_short:
            self._make_way(step, now)
        for request in list(self._running.values()):
            if request.can_decode and request.row is not None:
                self._plan_decode(step, request)
        # Pages that a row lacks are not for newcomers.
        may_enter = not (was_short or self._is_short_of_pages) or not self._running
        entered = self._enter_waiting(step, now) if may_enter else []
        step.num_joined += len(entered)
        ready = [request for request in entered if request.prefill_left == 0]
        self._plan_prefill(step)
        for request in ready:
            self._plan_decode(step, request, may_preempt=False)
        if step.is_empty:
            self._plan_oldest(step)

    def least_s(self, request: Request) -> float:
        """Seconds a queued request takes at least, see Pace; what is kept of its tokens takes none."""
        return self.pace.least_s(request, self._space.num_kept(request))

    def _is_hopeless(self, request: Request, now: float) -> bool:
        # To look up what is kept takes time, and is seldom worth it.
        is_hopeless = self.pace.is_hopeless
        return is_hopeless(request, now) and is_hopeless(request, now, self._space.num_kept(request))

    def take_left(self) -> tuple[int, ...]:
        """Ids of rows that were planned and left since the last call."""
        left, self._left = tuple(self._left), []
        return left

    def remove(self, request: Request) -> None:
        """Take the request's row, pages and promise back. A launched step may still compute the row."""
        row = request.row
        assert row is not None
        self._book.leave(request)
        self._space.leave(request)
        del self._running[row.row_id]
        self._prefilling.pop(row.row_id, None)
        self._num_of_class[request.level] -= 1
        if request.num_computed > row.num_reused:
            self._left.append(row.row_id)
        request.row = None
        request.prefill_end = request.num_computed = 0

    @property
    def youngest(self) -> Request | None:
        """The row that entered last."""
        return next(reversed(self._running.values()), None)

    def send_all_back(self, now: float) -> int:
        """Have every row wait again, at its old place, and no runner know of any; how many these were.

        Nobody gained by it: it is no preemption that counts, and no tenant begins to compete anew.
        """
        rows = list(self._running.values())
        for request in rows:
            request.transition(RequestState.PREEMPTED)
            request.pays_again = False
            self.remove(request)
            self._book.enqueue(request, now)
        self._left.clear()
        return len(rows)

    def _plan_decode(self, step: Step, request: Request, *, may_preempt: bool = True) -> None:
        end = request.num_computed + 1
        if not self._space.grow(request, end):
            self._is_short_of_pages = True
            if not (may_preempt and self._make_room(step, request, end)):
                return
        prompt_tokens = step.add_decode(request)
        if prompt_tokens:
            self._charge(step, self._book[request.tenant], prompt_tokens)

    def _plan_prefill(self, step: Step) -> None:
        """Chunks by turns. None of them may preempt: the row it would hit can be in the step already."""
        first, ahead = self._turns.split(list(self._prefilling.values()))
        while rows := first or ahead:
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

    def _add_chunk(self, step: Step, request: Request, end: int) -> None:
        tenant = self._book[request.tenant]
        num_tokens = end - request.num_computed
        prompt_tokens = step.add_chunk(request, end)
        tenant.prefilled(request, num_tokens)
        if request.prefill_left == 0:
            del self._prefilling[step.chunks[-1].row.row_id]
        again = num_tokens - prompt_tokens if request.pays_again else 0
        if prompt_tokens or again:
            self._charge(step, tenant, prompt_tokens, again)

    def _charge(self, step: Step, tenant: Tenant, prompt_tokens: int, again: int = 0) -> None:
        """`again`: positions computed again; of the tenant's minute they were used before."""
        self._policy.charge(tenant, prompt_tokens + again, 0)
        self._book.use(tenant, prompt_tokens, step.planned_at)

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
            youngest = self.youngest
            assert youngest is not None
            self._preempt(step, youngest, "pages")
        return False

    def _preempt(self, step: Step, request: Request, reason: str) -> None:
        request.transition(RequestState.PREEMPTED)
        request.num_preemptions += 1
        request.pays_again = False
        self.remove(request)
        self._admission.queue(request, step.planned_at)
        step.preempted.append(reason)

    def _make_way(self, step: Step, now: float) -> None:
        """Preempt for the next request in line where it finds no room; before any row is in the step."""
        is_full = len(self._running) >= self._max_rows
        if not self._book.queued or not self._running or not (is_full or self._admission.reserving):
            return
        worst = next(level for level in reversed(Priority) if self._num_of_class[level])
        if not self._preemption.is_due(self._running.values(), step.step_id, worst):
            return
        request = self._admission.first(self._prefill_room(), now)
        if request is None or self._is_hopeless(request, now):
            return
        if not is_full and not self._admission.is_short_of_pages(request):
            return
        victims, reason = self._preemption.victims(request, self._running.values())
        for victim in victims:
            self._preempt(step, victim, reason)

    def _prefill_room(self) -> int:
        """Tokens of chunks that this step's budget holds beside those of rows in prefill."""
        prefilling = self._prefilling.values()
        taken = sum(request.chunk_end(self._chunk) - request.num_computed for request in prefilling)
        return max(0, self.budget.tokens - taken)

    def _enter_waiting(self, step: Step, now: float) -> list[Request]:
        """Give rows to queued requests as far as rows, pages, caps and the prefill budget go.

        One that cannot meet its deadline any more is taken out of the queue instead.
        """
        if not self._book.queued:
            self._admission.reserving = None
            return []
        if len(self._running) >= self._max_rows:
            return []
        entered: list[Request] = []
        room = self._prefill_room()
        while self._book.queued and len(self._running) < self._max_rows:
            request = self._admission.pick(self._running.values(), max(0, room), now)
            if request is None:
                break
            if self._is_hopeless(request, now):
                self._book.dequeue(request)
                step.hopeless.append(request)
                continue
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
        self._book.enter(request, now)
        request.blocked_since = None
        if not request.pays_again:
            request.entered_at = now
        request.entered_step, request.entered_output = step.step_id, len(request.output)
        self._running[request.row.row_id] = request
        if request.prefill_left > 0:
            self._prefilling[request.row.row_id] = request
        self._num_of_class[request.level] += 1
        cached_tokens = step.add_reused(request)
        charged = request.row.num_reused if request.pays_again else cached_tokens
        tenant = self._book[request.tenant]
        self._policy.entered(tenant)
        if charged:
            self._policy.charge(tenant, 0, 0, charged)
            self._book.use(tenant, cached_tokens, now)
