"""Scheduler and MLX runner together: arrivals, cancels and preemptions change no row's tokens."""

import random
from collections import Counter

import pytest
from tiny_models import CHUNK, Rig, edge_lengths, make_rig, oracle, prompt_of

from mlxd.batching.plan import StepPlan
from mlxd.batching.runner import PendingStep
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config import Config, SchedulerConfig, TenantConfig
from mlxd.scheduler.events import Accepted, Event, Finished, RequestKey, Submission, Tokens
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.scheduler import Scheduler

MOST_TOKENS = 24


def config(**scheduler: object) -> Config:
    tenants = tuple(TenantConfig(name=name, token_sha256=name * 64) for name in "ab")
    return Config(version=1, tenants=tenants, scheduler=SchedulerConfig(**scheduler))  # type: ignore[arg-type]


class World:
    """An engine loop on a made-up clock: each step is launched before the one before it is read."""

    def __init__(self, rig: Rig, settings: Config) -> None:
        self.scheduler = Scheduler(settings, rig.runner.info)
        self.tokens: dict[RequestKey, list[int]] = {}
        self.outcomes: dict[RequestKey, str] = {}
        self.preemptions: Counter[str] = Counter()
        self._runner = rig.runner
        self._unread: tuple[StepPlan, PendingStep] | None = None
        self._now = 0.0

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> RequestKey:
        key = RequestKey("ab"[len(self.tokens) % 2], name)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        event = self.scheduler.submit(Submission(key, prompt, sampling, self._now))
        assert event == Accepted(key)
        self.tokens[key] = []
        return key

    def cancel(self, key: RequestKey) -> None:
        self._hear(self.scheduler.cancel(key, "cancelled", self._now))

    def turn(self) -> None:
        """Launch what there is, then read the step launched in the turn before."""
        self._now += 0.01
        plan = self.scheduler.schedule(self._now, [])
        launched = None if plan is None else (plan, self._runner.launch(plan))
        unread, self._unread = self._unread, launched
        if unread is not None:
            events: list[Event] = []
            stats = self.scheduler.postprocess(unread[0], unread[1].wait(), self._now, events)
            self.preemptions.update(stats.preemptions)
            self._hear(events)
        self.scheduler.space.check_integrity()

    def finish(self) -> None:
        while self.scheduler.num_open or self._unread is not None:
            self.turn()
        self.scheduler.space.check_empty()

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.tokens[event.key] += event.token_ids
            elif isinstance(event, Finished):
                assert event.key not in self.outcomes, "a second terminal event"
                self.outcomes[event.key] = event.outcome


def run_random_traffic(rig: Rig, settings: Config, seed: int) -> World:
    """24 requests at random times, every fourth cancelled at some later turn."""
    rng = random.Random(seed)
    lengths = edge_lengths(rig.family)
    world = World(rig, settings)
    wanted: dict[RequestKey, tuple[tuple[int, ...], int]] = {}
    doomed: list[RequestKey] = []
    for number in range(24):
        prompt, max_tokens = prompt_of(rng.choice(lengths)), rng.randint(1, MOST_TOKENS)
        key = world.submit(str(number), prompt, max_tokens)
        wanted[key] = prompt, max_tokens
        if number % 4 == 3:
            doomed.append(key)
        for _ in range(rng.choice((0, 0, 1, 4))):
            world.turn()
        if doomed and rng.random() < 0.3:
            world.cancel(doomed.pop(0))
    for key in doomed:
        world.cancel(key)
        world.turn()
    world.finish()
    for key, (prompt, max_tokens) in wanted.items():
        expected = oracle(rig.family, prompt, MOST_TOKENS).tokens[:max_tokens]
        got = tuple(world.tokens[key])
        assert world.outcomes[key] in ("length", "cancelled")
        assert got == expected if world.outcomes[key] == "length" else got == expected[: len(got)]
    return world


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("family", "attention"), [("gemma3_text", "gathered"), ("llama", "in_place")])
def test_random_arrivals_and_cancels_draw_what_rows_draw_alone(
    family: str, attention: str, seed: int
) -> None:
    rig = make_rig(family, attention, max_rows=6, max_model_len=64)
    world = run_random_traffic(rig, config(max_rows=6), seed)
    assert not world.preemptions


@pytest.mark.parametrize("seed", range(3))
def test_preempted_rows_draw_what_undisturbed_rows_draw(seed: int) -> None:
    rig = make_rig("llama", max_rows=6, max_model_len=48, budget_bytes=2 * 48 * 256)
    assert rig.memory.groups[0].num_pages == 2 * rig.memory.groups[0].spec.pages_for(48, CHUNK)

    world = run_random_traffic(rig, config(max_rows=6, overcommit=4.0), seed)

    assert world.preemptions["pages"] > 0


def draw_beside(rig: Rig, priority: Priority | None) -> tuple[World, list[list[int]]]:
    """Two sampled requests of one tenant; another tenant's come later, unless `priority` is None."""
    tenants = tuple(
        TenantConfig(name=name, token_sha256=name * 64, max_priority="interactive") for name in "ab"
    )
    scheduler = SchedulerConfig(max_rows=2, slice_tokens=4, max_preemptions=2)
    world = World(rig, Config(version=1, tenants=tenants, scheduler=scheduler))
    keys = [RequestKey("a", str(seed)) for seed in range(2)]
    for seed, key in enumerate(keys):
        sampling = SamplingParams(temperature=1.0, max_tokens=40, seed=seed)
        world.tokens[key] = []
        world.scheduler.submit(Submission(key, prompt_of(20 + seed), sampling, 0.0))
    for _ in range(8):
        world.turn()
    for number in range(0 if priority is None else 4):
        key = RequestKey("b", str(number))
        world.tokens[key] = []
        sampling = SamplingParams(temperature=1.0, max_tokens=12)
        world.scheduler.submit(Submission(key, prompt_of(9), sampling, 0.0, priority))
    world.finish()
    return world, [world.tokens[key] for key in keys]


@pytest.mark.parametrize(
    ("priority", "reason"), [(Priority.INTERACTIVE, "priority"), (Priority.NORMAL, "slice")]
)
def test_rows_that_made_way_draw_what_they_draw_undisturbed(priority: Priority, reason: str) -> None:
    rig = make_rig("llama", max_rows=2, max_model_len=64)
    _, undisturbed = draw_beside(rig, None)
    rig = make_rig("llama", max_rows=2, max_model_len=64)
    world, disturbed = draw_beside(rig, priority)
    assert world.preemptions[reason] > 0
    assert [len(tokens) for tokens in undisturbed] == [40, 40]
    assert disturbed == undisturbed
