"""From submissions to steps, and from their results to events. Pure: it is told the time."""

import math
from collections import deque
from collections.abc import Sequence

from mlxd.batching.plan import RowResult, StepPlan, StepResult
from mlxd.batching.runner import RunnerInfo
from mlxd.caches.disk_tier import DiskTier
from mlxd.metrics.recorder import NullRecorder, Recorder
from mlxd.metrics.stats import StepStats
from mlxd.scheduler.admission import Admission
from mlxd.scheduler.batch import Batch
from mlxd.scheduler.config import Config, TenantLimits
from mlxd.scheduler.events import Accepted, Event, Rejected, RequestKey, Submission, Tokens
from mlxd.scheduler.fairness import FairnessMeter
from mlxd.scheduler.kv_space import KvSpace
from mlxd.scheduler.open_requests import OpenRequests
from mlxd.scheduler.paused import Paused
from mlxd.scheduler.policy import make_policy
from mlxd.scheduler.preemption import Preemption
from mlxd.scheduler.request import Request, RequestState, derive_seed
from mlxd.scheduler.step import Step, Tally
from mlxd.scheduler.tenants import TenantBook


class Scheduler:
    """Every open request, from its acceptance to its one Finished.

    `schedule` may run once more before the result of the step before is read; results are read in step
    order. A token that was drawn for a request after its end is dropped.

    Attributes:
        space, book, batch, fairness: KV memory, tenants, rows, and how they are shared; others only read.
        paused: requests that wait for their clients.
        is_draining: refuse what is submitted from now on.
    """

    def __init__(
        self,
        config: Config,
        info: RunnerInfo,
        *,
        seed: int = 0,
        secret: bytes = b"",
        disk: DiskTier | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """
        Args:
            secret: at most 64 random bytes that the keys of cached prefixes depend on.
            disk: where cached prefixes outlive the process.
        """
        policy = self._policy = make_policy(config.scheduler)
        self.space = KvSpace(
            info.memory,
            config.scheduler.overcommit,
            reuse=config.cache.prefix,
            identity=f"{info.fingerprint or info.model}:{info.notes.get('signature', '')}",
            secret=secret,
            disk=disk,
        )
        self.book = TenantBook(config.tenants, config.scheduler, self.space, policy)
        self.is_draining = False
        preemption = Preemption(config.scheduler, self.space, self.book, policy)
        self._admission = Admission(
            config.scheduler, info, space=self.space, book=self.book, policy=policy, preemption=preemption
        )
        self.batch = Batch(
            config.scheduler,
            info,
            space=self.space,
            book=self.book,
            policy=policy,
            admission=self._admission,
            preemption=preemption,
        )
        self.fairness = FairnessMeter(self.book, policy, self.batch.waits)
        self._eos = info.eos_token_ids
        self._seed = seed
        self._recorder = recorder or NullRecorder()
        self._open = OpenRequests(
            self.book, self.batch, policy=policy, admission=self._admission, recorder=self._recorder
        )
        self.paused = Paused(self._open, batch=self.batch, book=self.book, admission=self._admission)
        self._next_step = Step(step_id=1)
        self._launched: deque[Step] = deque()
        self._tally = Tally()
        self._num_accepted = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        return len(self._open) - len(self.batch) - len(self.paused)

    @property
    def num_steps(self) -> int:
        """Steps planned."""
        return self._next_step.step_id - 1

    def submit(self, submission: Submission) -> Event:
        """Queue a checked request of a configured tenant, or say why not."""
        key = submission.key
        request = self._make_request(submission)
        refusal = self._refuse(request)
        if refusal is not None:
            self._recorder.rejected(key.tenant, refusal.reason)
            return refusal
        self._num_accepted += 1
        self._open.add(request)
        self._admission.queue(request, submission.arrived_at)
        self._recorder.accepted(key.tenant)
        return Accepted(key)

    def _make_request(self, submission: Submission) -> Request:
        sampling, number = submission.sampling, self._num_accepted
        priority = max(submission.priority, self.book[submission.key.tenant].max_priority)
        eos: frozenset[int] = frozenset() if sampling.ignore_eos else self._eos
        return Request(
            number=number,
            key=submission.key,
            prompt=submission.prompt,
            sampling=sampling,
            seed=derive_seed(self._seed, number) if sampling.seed is None else sampling.seed,
            stop_ids=eos.union(sampling.stop_token_ids),
            worst_case=self.space.worst_case(len(submission.prompt), sampling.max_tokens),
            arrived_at=submission.arrived_at,
            priority=priority,
            level=priority,
            deadline=submission.deadline,
        )

    def _refuse(self, request: Request) -> Rejected | None:
        key = request.key
        if key in self._open:
            return Rejected(
                key, "id_conflict", f"request {key.request_id!r} is open already", retryable=False
            )
        if self.is_draining:
            return Rejected(key, "draining", "the daemon is draining", retryable=True)
        return self._admission.refuse(request, self.book[key.tenant], self.num_waiting)

    def cancel(self, key: RequestKey, outcome: str, now: float) -> list[Event]:
        """End an open request with `outcome`; an unknown key is nothing."""
        request = self._open.get(key)
        if request is None:
            return []
        if outcome == "revoked":
            return [self._open.revoke(request, now)]
        return [self._open.finish(request, outcome, now)]

    def set_tenants(self, tenants: Sequence[TenantLimits], now: float) -> list[Event]:
        """Take new settings; requests whose tenant is gone, or that could not enter any more, end.

        Those that go on keep their class.
        """
        names = {tenant.name for tenant in tenants}
        gone = [request for request in self._open.values() if request.tenant not in names]
        events: list[Event] = [self._open.revoke(request, now) for request in gone]
        self.fairness.keep(names)
        self.book.update(tenants, self._open.values(), now)
        for request in list(self._open.values()):
            tenant = self.book[request.tenant]
            why = self._admission.never_fits(request, tenant) or self._admission.above_quota(request, tenant)
            if why:
                events.append(self._open.revoke(request, now, why))
        return events

    def abandon(self, error_code: str, error: str, now: float) -> list[Event]:
        """Tell the end of every open request and touch nothing else: the rest of the state may be broken."""
        return self._open.abandon(error_code, error, now)

    def start_over(self, error_code: str, error: str, now: float, events: list[Event]) -> Request | None:
        """Give up launched steps and all that pages hold. The next plan is for a runner as new.

        The row that entered last ends as "failed"; the others wait, to be computed again with the same draws.

        Returns:
            The request that ended; None where there was no row.
        """
        while self._launched:
            self._lose(self._launched.popleft())
        self.space.forget_all()
        ended = self.batch.youngest
        if ended is not None:
            events.append(self._open.finish(ended, "failed", now, error_code, error))
        self._next_step.preempted += ["memory"] * self.batch.send_all_back(now)
        self.space.check_empty()
        return ended

    def _lose(self, step: Step) -> None:
        """Its tokens will not be read; what it was to compute was charged, and will not be again."""
        for request in step.decoding:
            request.num_inflight -= 1
            if request.state is not RequestState.FINISHED:
                self.book.lose_token(request)
        self._next_step.inherit(step)

    def end_all(self, outcome: str, error_code: str, error: str, now: float) -> list[Event]:
        """End every open request, in order of arrival."""
        return self._open.finish_all(outcome, error_code, error, now)

    def schedule(self, now: float, events: list[Event]) -> StepPlan | None:
        """The next step; None where nothing can be computed now.

        Then a launched step has to be read first, or time has to pass, see `wakes_at`.

        Args:
            events: appended to: the ends of requests whose deadline passed or cannot be met any more.
        """
        for end in self._open.expire(now):
            events.append(end)
            self.fairness.missed["expired"] += 1
        self.book.age(now)
        step = self._next_step
        step.planned_at = now
        step.preempted += self.paused.settle(now)
        self.batch.plan(step, now)
        while step.hopeless:
            events.append(self._open.give_up(step.hopeless.pop(), now))
            self.fairness.missed["hopeless"] += 1
        if step.is_empty:
            return None
        if step.preempted:
            self.fairness.preemptions.update(step.preempted)
        self._next_step = Step(step.step_id + 1)
        self._launched.append(step)
        scrub, (copies, restored) = self.space.take_scrub(), self.space.take_fills()
        return step.plan(scrub, self.batch.take_left(), restored, copies)

    def wakes_at(self, now: float) -> float | None:
        """When, with no step launched, time alone lets a step be planned or ends a request.

        Infinite where all open requests are paused, which is no fault; None: never.
        """
        times = [self._admission.ready_at(now), self._open.next_deadline]
        if self._open and len(self.paused) == len(self._open):
            times.append(math.inf)
        return min((time for time in times if time is not None), default=None)

    def postprocess(self, plan: StepPlan, result: StepResult, now: float, events: list[Event]) -> StepStats:
        """Take a step's tokens and faults.

        Args:
            events: appended to as things happen, so that no request's end is lost if this raises.
        Returns:
            The step's facts, without host times (join_s and leave_s are 0).
        """
        step = self._launched.popleft()
        assert step.step_id == plan.step_id, f"step {plan.step_id} read before step {step.step_id}"
        self._take_tokens(step, result.rows, now, events)
        for request, chunk in zip(step.prefilling, step.chunks, strict=True):
            fault = result.prefill_faults.get(chunk.row.row_id)
            if fault is not None and request.state is not RequestState.FINISHED:
                events.append(self._fail(request, fault, now))
        for name, num_tokens in self._tally.generated.items():
            tenant = self.book[name]
            self._policy.charge(tenant, 0, num_tokens)
            self.book.use(tenant, num_tokens, now)
        self.batch.budget.observe(step.chunks, result.prefill_s)
        self.batch.pace.observe(0.0 if result.traced else result.decode_s)
        tally, self._tally = self._tally, Tally()
        tally.left = self._open.take_num_left()
        return tally.stats(step, result, now)

    def _take_tokens(self, step: Step, rows: Sequence[RowResult], now: float, events: list[Event]) -> None:
        """One function for all rows of a step: a call for each would be a good part of what they take."""
        gaps_s, generated, finished = self._tally.gaps_s, self._tally.generated, RequestState.FINISHED
        for request, entry, drawn in zip(step.decoding, step.decode, rows, strict=True):
            row = entry.row
            assert drawn.row_id == row.row_id, f"result of row {drawn.row_id} in place of {row.row_id}"
            request.num_inflight -= 1
            if request.state is finished:
                continue
            if drawn.fault is not None:
                self.book.lose_token(request)
                events.append(self._fail(request, drawn.fault, now))
                continue
            key, token, output = request.key, drawn.token, request.output
            output.append(token)
            if request.first_token_at is None:
                request.first_token_at = now
            elif request.last_token_at is not None:
                gaps_s.append(now - request.last_token_at)
            request.last_token_at = now
            generated[key.tenant] += 1
            events.append(Tokens(key, (token,), () if drawn.logprobs is None else (drawn.logprobs,)))
            if token in request.stop_ids:
                events.append(self._open.finish(request, "stop", now))
            elif len(output) >= request.sampling.max_tokens:
                events.append(self._open.finish(request, "length", now))
            elif entry.token is not None and request.row is row:
                self.space.share(request)

    def _fail(self, request: Request, code: str, now: float) -> Event:
        self.space.forget(request)
        return self._open.fail(request, code, now)
