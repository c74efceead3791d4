"""Builders that the scheduling tests share."""

from collections.abc import Sequence

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.runner import Progress, Runner
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.disk_tier import DiskTier
from mlxd.metrics.recorder import NullRecorder
from mlxd.metrics.stats import EngineSnapshot, RequestStats, StepStats
from mlxd.scheduler.config import Config, SchedulerConfig, TenantConfig
from mlxd.scheduler.events import Event, Finished, RequestKey, Submission, Tokens
from mlxd.scheduler.scheduler import Scheduler

VOCAB = 1000
NO_TOKEN = "0" * 64
Answer = tuple[list[int], list[TokenLogprobs]]
"""Token ids, and the log-probabilities of each."""


def make_config(*tenants: TenantConfig, **scheduler: object) -> Config:
    settings: dict[str, object] = {"policy": "fair", "max_rows": 8} | scheduler
    return Config(
        version=1,
        tenants=tenants or (make_tenant("acme"),),
        scheduler=SchedulerConfig(**settings),  # type: ignore[arg-type]
    )


def make_tenant(name: str, **fields: object) -> TenantConfig:
    return TenantConfig(name=name, token_sha256=NO_TOKEN, **fields)  # type: ignore[arg-type]


def submission(
    request_id: str,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    tenant: str = "acme",
    at: float = 0.0,
    **sampling: object,
) -> Submission:
    params: dict[str, object] = {"max_tokens": 4, "seed": 7} | sampling
    return Submission(RequestKey(tenant, request_id), tuple(prompt), SamplingParams(**params), at)  # type: ignore[arg-type]


class Tape(NullRecorder):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.accepts: list[str] = []
        self.rejects: list[tuple[str, str]] = []
        self.requests: list[RequestStats] = []
        self.steps: list[StepStats] = []
        self.last = EngineSnapshot()

    def accepted(self, tenant: str) -> None:
        self.accepts.append(tenant)

    def rejected(self, tenant: str, reason: str) -> None:
        self.rejects.append((tenant, reason))

    def request(self, stats: RequestStats) -> None:
        self.requests.append(stats)

    def step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def snapshot(self, snapshot: EngineSnapshot) -> None:
        self.last = snapshot


class World:
    """A scheduler and a FakeRunner under a clock of one tick a turn, pipelined as the engine does it."""

    def __init__(
        self,
        config: Config,
        runner: Runner | None = None,
        *,
        seed: int = 0,
        disk: DiskTier | None = None,
        secret: bytes = b"",
    ) -> None:
        self.runner: Runner = runner or FakeRunner(
            fake_memory(max_rows=8, max_model_len=256), vocab_size=VOCAB
        )
        self.tape = Tape()
        self.scheduler = Scheduler(
            config, self.runner.info, seed=seed, recorder=self.tape, disk=disk, secret=secret
        )
        self.now = 0.0
        self.events: list[Event] = []
        self.plans: list[list[tuple[object, ...]]] = []
        self._launched = []  # type: ignore[var-annotated]

    @property
    def is_idle(self) -> bool:
        return not self._launched and self.scheduler.num_open == 0

    def submit(self, item: Submission) -> Event:
        event = self.scheduler.submit(item)
        self.events.append(event)
        return event

    def cancel(self, key: RequestKey, outcome: str = "cancelled") -> None:
        self.events += self.scheduler.cancel(key, outcome, self.now)

    def turn(self) -> None:
        """Plan and launch a step, then read the one before it; with nothing to launch, the one in flight."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now, self.events)
        if plan is not None:
            self._launched.append(self.runner.launch(plan))
            decoded = [("decode", e.row.row_id, e.position) for e in plan.decode]
            self.plans.append([*decoded, *(("chunk", c.row.row_id, c.start, c.end) for c in plan.prefill)])
        if self._launched and (plan is None or len(self._launched) > 1):
            step = self._launched.pop(0)
            stats = self.scheduler.postprocess(step.plan, step.wait(), self.now, self.events)
            self.tape.step(stats)
            self.scheduler.space.save(self.runner.export_pages, is_idle=False)
        else:
            waits = self.is_idle or self.scheduler.wakes_at(self.now) is not None
            assert plan is not None or waits, "requests are open and nothing moves"
        self.scheduler.space.check_integrity()

    def run(self, max_turns: int = 10_000) -> None:
        """Until nothing is open."""
        for _ in range(max_turns):
            if self.is_idle:
                self.scheduler.space.check_empty()
                while self.scheduler.space.save(self.runner.export_pages, is_idle=True):
                    pass
                return
            self.turn()
        raise AssertionError(f"{self.scheduler.num_open} requests still open after {max_turns} turns")


def running(world: World) -> list[str]:
    """Requests with a row, in entering order."""
    return [request.key.request_id for request in world.scheduler.batch._running.values()]


def answer_of(world: World, request_id: str) -> Answer:
    """What a request was told so far."""
    events = [e for e in world.events if isinstance(e, Tokens) and e.key.request_id == request_id]
    return [t for e in events for t in e.token_ids], [p for e in events for p in e.logprobs]


def serve(world: World, request_id: str, prompt: Sequence[int], max_tokens: int = 6) -> Answer:
    """Run a request to its end, greedily, with log-probabilities."""
    world.submit(submission(request_id, prompt, max_tokens=max_tokens, temperature=0.0, top_logprobs=20))
    world.run()
    return answer_of(world, request_id)


def cached(world: World, request_id: str) -> int:
    """Tokens that a request which ended had found in the prefix cache."""
    ends = {e.key.request_id: e for e in world.events if isinstance(e, Finished)}
    return ends[request_id].usage.cached_tokens


def fake_factory(config: Config, progress: Progress) -> Runner:
    return FakeRunner(fake_memory(max_rows=8, max_model_len=256), vocab_size=VOCAB)
