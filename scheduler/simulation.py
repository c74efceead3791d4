"""The scheduler under a fake clock: the engine's loop with a cost model for a machine."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from mlxd.batching.fake_memory import fake_memory
from mlxd.batching.plan import StepPlan, StepResult
from mlxd.batching.runner import RunnerInfo
from mlxd.scheduler.config import CacheConfig, Config, TenantConfig
from mlxd.scheduler.events import Event, Finished, Rejected, RequestKey, Tokens
from mlxd.scheduler.scheduler import Scheduler
from mlxd.scheduler.tenant import Tenant
from mlxd.scheduler.trace import Act, Arrival, Machine, Trace

_NO_TOKEN = "0" * 64
_SAMPLE_S = 1.0
MAX_SAMPLES = 1_000_000
"""Of all tenants together: where there are as many, every second one goes, and others come half as often."""


@dataclass(slots=True)
class TenantRecord:
    """What became of a tenant's requests. Times in seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    first_tokens_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    generated: int = 0


@dataclass(slots=True)
class Record:
    """A simulation's outcome.

    Attributes:
        end_s: when the last request ended.
        largest_gap: between the counters of competing tenants, at any step.
        bound: what theory allows of it.
        samples: time, and each tenant's service received until then.
    """

    tenants: dict[str, TenantRecord]
    bound: float
    end_s: float = 0.0
    num_steps: int = 0
    largest_gap: float = 0.0
    preemptions: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)


class Simulation:
    """Runs a trace to its end; the same trace gives the same schedule.

    As in the engine, a step is launched before the one before it is read, and takes its turn on the machine.

    Attributes:
        scheduler, now: for those that watch.
        record: filled as it runs.
    """

    def __init__(
        self,
        trace: Trace,
        arrivals: Sequence[Arrival],
        watch: Callable[["Simulation", StepPlan | None], None] | None = None,
    ) -> None:
        """`watch`: called after each planning, with the plan."""
        config = Config(
            version=1,
            tenants=tuple(_as_config(index, trace) for index in range(len(trace.tenants))),
            scheduler=trace.scheduler,
            cache=CacheConfig(prefix=False),
        )
        self.scheduler = Scheduler(config, _info(trace.machine, trace.scheduler.max_rows))
        self.now = 0.0
        self.record = Record({t.name: TenantRecord() for t in trace.tenants}, _bound(trace, arrivals))
        self._cost = trace.cost
        self._watch = watch
        self._arrivals = deque(arrivals)
        self._acts: list[tuple[float, Act, RequestKey]] = []
        self._launched: deque[tuple[StepPlan, StepResult, float]] = deque()
        self._machine_free_at = 0.0
        self._sample_s = _SAMPLE_S
        self._arrived_at: dict[RequestKey, float] = {}
        self._last_token_at: dict[RequestKey, float] = {}

    def run(self) -> Record:
        while self._arrivals or self._launched or self.scheduler.num_open:
            self._turn()
        self.scheduler.space.check_empty()
        self.record.end_s = self.now
        self._take_sample()
        return self.record

    def _turn(self) -> None:
        events: list[Event] = []
        self._let_come(events)
        plan = self.scheduler.schedule(self.now, events)
        if self._watch is not None:
            self._watch(self, plan)
        if plan is not None:
            self._launch(plan)
        if self._launched and (plan is None or len(self._launched) > 1):
            done, result, ended_at = self._launched.popleft()
            self.now = max(self.now, ended_at)
            stats = self.scheduler.postprocess(done, result, self.now, events)
            self.record.preemptions.update(stats.preemptions)
            self._note_gap()
        elif plan is None:
            self._skip()
        for event in events:
            self._take(event)

    def _let_come(self, events: list[Event]) -> None:
        while self._arrivals and self._arrivals[0].submission.arrived_at <= self.now:
            arrival = self._arrivals.popleft()
            key = arrival.submission.key
            self._arrived_at[key] = arrival.submission.arrived_at
            events.append(self.scheduler.submit(arrival.submission))
            for at, act in arrival.acts():
                heappush(self._acts, (at, act, key))
        while self._acts and self._acts[0][0] <= self.now:
            _, act, key = heappop(self._acts)
            self._do(act, key, events)

    def _do(self, act: Act, key: RequestKey, events: list[Event]) -> None:
        match act:
            case Act.CANCEL:
                events += self.scheduler.cancel(key, "cancelled", self.now)
            case Act.PAUSE:
                self.scheduler.paused.pause(key)
            case Act.UNPAUSE:
                self.scheduler.paused.unpause(key)

    def _launch(self, plan: StepPlan) -> None:
        result = self._cost.run(plan)
        self._machine_free_at = max(self._machine_free_at, self.now) + result.decode_s + result.prefill_s
        self._launched.append((plan, result, self._machine_free_at))
        self.record.num_steps += 1

    def _skip(self) -> None:
        """Nothing can be computed: on to what happens next."""
        times = [arrival.submission.arrived_at for arrival in list(self._arrivals)[:1]]
        times += [at for at, _, _ in self._acts[:1]]
        wakes_at = self.scheduler.wakes_at(self.now) if self.scheduler.num_open else None
        times += [] if wakes_at is None else [wakes_at]
        assert times or not self.scheduler.num_open, "requests are open and nothing happens any more"
        self.now = max(self.now, min(times, default=self.now))

    def _take(self, event: Event) -> None:
        tenant = self.record.tenants[event.key.tenant]
        match event:
            case Tokens():
                tenant.generated += 1
                before = self._last_token_at.get(event.key)
                if before is None:
                    tenant.first_tokens_s.append(self.now - self._arrived_at[event.key])
                else:
                    tenant.gaps_s.append(self.now - before)
                self._last_token_at[event.key] = self.now
            case Finished():
                tenant.outcomes[event.outcome] += 1
                self._last_token_at.pop(event.key, None)
            case Rejected():
                tenant.rejected[event.reason] += 1

    def _note_gap(self) -> None:
        gap = self.scheduler.fairness.gap(self.competing())
        self.record.largest_gap = max(self.record.largest_gap, gap)
        samples = self.record.samples
        if not samples or self.now - samples[-1][0] >= self._sample_s:
            if len(samples) * len(self.record.tenants) >= MAX_SAMPLES:
                del samples[1::2]
                self._sample_s *= 2
            self._take_sample()

    def competing(self) -> list[Tenant]:
        """Tenants not held by a cap of theirs, whose next requests are of the highest class that waits."""
        free = [t for t in self.scheduler.book.queued.values() if not t.is_held]
        highest = min((tenant.head.level for tenant in free), default=0)
        return [tenant for tenant in free if tenant.head.level == highest]

    def _take_sample(self) -> None:
        received = {tenant.name: tenant.received for tenant in self.scheduler.book}
        self.record.samples.append((self.now, received))


def _as_config(index: int, trace: Trace) -> TenantConfig:
    limits = msgspec.structs.asdict(trace.tenants[index])
    return TenantConfig(token_sha256=_NO_TOKEN, **limits)


def _info(machine: Machine, max_rows: int) -> RunnerInfo:
    memory = fake_memory(
        max_rows=max_rows,
        max_model_len=machine.max_model_len,
        chunk=machine.chunk,
        page_size=machine.page_size,
        num_pages=max(1, machine.kv_tokens // machine.page_size),
    )
    return RunnerInfo("simulated", 2, memory, max_rows, frozenset(), "none", compiled=False)


def _bound(trace: Trace, arrivals: Sequence[Arrival]) -> float:
    """Of the gap between two competing tenants. Source: arXiv 2401.00588, theorem on backlogged clients."""
    most_drawn = max((arrival.submission.sampling.max_tokens for arrival in arrivals), default=0)
    prompt = max((_longest_prefill(arrival) for arrival in arrivals), default=0)
    outputs = most_drawn * trace.scheduler.max_rows
    cost = max(trace.scheduler.prompt_weight * prompt, trace.scheduler.output_weight * outputs)
    return 2 * cost / min(tenant.weight for tenant in trace.tenants)


def _longest_prefill(arrival: Arrival) -> int:
    """Positions that one row may be charged for; after a pause what it had drawn is among them."""
    drawn = arrival.submission.sampling.max_tokens if arrival.pauses else 0
    return len(arrival.submission.prompt) + drawn
