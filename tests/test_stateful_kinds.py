"""Random operations on rows that keep every kind of state: nothing leaks, and each row is as if alone."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduling import World, make_config, make_tenant, submission
from tiny_zoo import VOCAB, zoo_model

from mlxd.batching.fake_runner import FakeRunner, fake_completion
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import Runner, RunnerInfo
from mlxd.caches.kinds import group_specs, inspect_layers, packed_layers
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import GroupPlan, GroupSpec, MemoryPlan, plan_memory
from mlxd.scheduler.events import Accepted, Finished, Rejected, RequestKey, Tokens

PAGE, CHUNK, MAX_ROWS, MAX_LEN = 4, 16, 4, 64
MAX_TOKENS = 12
OVERCOMMIT = 4.0
_CROWDED = 0.3
"""Part of the pages that all rows of full length would need."""
TENANTS = ("acme", "beta")
POISON = VOCAB - 1
"""The token whose row is not finite."""

Answer = tuple[list[int], str]
"""Tokens and outcome."""


@dataclass(frozen=True)
class Subject:
    """What is operated on.

    Attributes:
        runner: gives a runner as new, over pools too small for all rows.
        alone: prompt -> what MAX_TOKENS of it give with nobody else there.
        seen: how often what happened, over all examples.
    """

    runner: Callable[[], Runner]
    alone: Callable[[tuple[int, ...]], Answer]
    seen: Counter[str] = field(default_factory=Counter)


def memory_for(specs: Sequence[GroupSpec], share: float) -> MemoryPlan:
    """Pools for `share` of all rows at full length; recurrent state for every row."""
    whole = plan_memory(
        tuple(specs),
        budget_bytes=2**24,
        weights_bytes=0,
        max_rows=MAX_ROWS,
        max_model_len=MAX_LEN,
        chunk=CHUNK,
    )
    return replace(whole, groups=tuple(_cut(group, share) for group in whole.groups))


def _cut(group: GroupPlan, share: float) -> GroupPlan:
    if group.spec.state_bytes:
        return group
    one_row = group.spec.pages_for(MAX_LEN, CHUNK)
    return replace(group, num_pages=max(one_row, int(group.num_pages * share)))


def mlx_subject(name: str, quantization: Quantization | None) -> Subject:
    """A tiny model that gives NaN from POISON on, in pools for less than two full rows."""
    model = zoo_model(name)
    embedding = next(module for _, module in model.named_modules() if isinstance(module, nn.Embedding))
    embedding.weight[POISON] = mx.array(float("nan"))
    layers = inspect_layers(model)
    if quantization is not None:
        layers = packed_layers(layers, quantization)

    def runner(share: float) -> MlxRunner:
        memory = memory_for(group_specs(layers, PAGE, CHUNK), share)
        info = RunnerInfo(name, VOCAB, memory, MAX_ROWS, frozenset(), "cpu", False)
        made = MlxRunner(model, layers, memory, info)
        made.set_attention("gathered" if quantization is None else "in_place")
        made.step.enabled = False
        return made

    crowded, quiet = runner(_CROWDED), runner(1.0)

    @cache
    def alone(prompt: tuple[int, ...]) -> Answer:
        quiet.reset()
        world = World(make_config(), quiet)
        world.submit(submission("alone", prompt, max_tokens=MAX_TOKENS, temperature=0.0))
        world.run()
        tokens = [token for e in world.events if isinstance(e, Tokens) for token in e.token_ids]
        return tokens, next(e.outcome for e in world.events if isinstance(e, Finished))

    def as_new() -> Runner:
        crowded.reset()
        return crowded

    return Subject(as_new, alone)


def fake_subject(window: int | None) -> Subject:
    specs = [GroupSpec("full", (0,), None, PAGE, 64)]
    if window is not None:
        specs.append(GroupSpec("sliding", (1,), window, PAGE, 64))

    def as_new() -> Runner:
        return FakeRunner(
            memory_for(specs, _CROWDED),
            vocab_size=VOCAB,
            decode_fault=lambda entry: "numeric" if POISON in entry.row.prompt else None,
        )

    def alone(prompt: tuple[int, ...]) -> Answer:
        if POISON in prompt:
            return [], "failed"
        return fake_completion(prompt, 7, MAX_TOKENS, VOCAB), "length"

    return Subject(as_new, alone)


def prompt_of(document: int, num_shared: int, tail: int, is_poisoned: bool) -> tuple[int, ...]:
    """The beginning of a document and a tail of its own."""
    shared = tuple((document * 5 + 7 * p + p // 3) % POISON for p in range(num_shared))
    return (
        *shared,
        *([POISON] if is_poisoned else []),
        *((tail * (p + 2)) % POISON for p in range(1 + tail)),
    )


class Machine(RuleBasedStateMachine):
    """Requests of two tenants, some of which begin alike, over pools for half of what they promise."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject
        config = make_config(*map(make_tenant, TENANTS), max_rows=MAX_ROWS, overcommit=OVERCOMMIT)
        self.world = World(config, subject.runner())
        self.prompts: dict[RequestKey, tuple[tuple[int, ...], int]] = {}

    def submit_request(self, tenant: str, prompt: tuple[int, ...], max_tokens: int) -> Accepted | Rejected:
        request_id = str(len(self.prompts))
        item = submission(
            request_id, prompt, tenant=tenant, at=self.world.now, max_tokens=max_tokens, temperature=0.0
        )
        self.prompts[item.key] = prompt, max_tokens
        event = self.world.submit(item)
        assert isinstance(event, Accepted | Rejected)
        return event

    @rule(
        tenant=st.sampled_from(TENANTS),
        document=st.integers(0, 1),
        num_shared=st.sampled_from([0, PAGE, CHUNK, CHUNK + PAGE, 2 * CHUNK, 2 * CHUNK + 3]),
        tail=st.integers(0, 3),
        is_poisoned=st.sampled_from([False] * 7 + [True]),
        max_tokens=st.sampled_from([1, 5, MAX_TOKENS]),
    )
    def submit(
        self, tenant: str, document: int, num_shared: int, tail: int, is_poisoned: bool, max_tokens: int
    ) -> None:
        self.subject.seen["operations"] += 1
        self.submit_request(tenant, prompt_of(document, num_shared, tail, is_poisoned), max_tokens)

    @precondition(lambda self: not self.world.is_idle)
    @rule(num_turns=st.integers(1, 4))
    def step(self, num_turns: int) -> None:
        self.subject.seen["operations"] += 1
        for _ in range(num_turns):
            if not self.world.is_idle:
                self.world.turn()

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        """One of the latest, whatever became of it."""
        self.subject.seen["operations"] += 1
        self.world.cancel(list(self.prompts)[-1 - which % min(6, len(self.prompts))])

    @rule()
    def drain(self) -> None:
        """Nobody enters, all that are open end; then it serves again."""
        self.subject.seen["operations"] += 1
        self.world.scheduler.is_draining = True
        refused = self.submit_request("acme", (1, 2, 3), 1)
        assert isinstance(refused, Rejected)
        assert refused.reason == "draining"
        self.world.run()
        self.world.scheduler.is_draining = False

    @invariant()
    def every_page_and_promise_is_accounted_for(self) -> None:
        self.world.scheduler.space.check_integrity()

    def teardown(self) -> None:
        self.world.run()
        self.world.scheduler.space.check_empty()
        assert all(held == 0 for held, _ in self.world.scheduler.space.pages.values())
        self.check_answers()
        self.note()

    def check_answers(self) -> None:
        """Each that was accepted ends once, with the tokens it would have had alone."""
        accepted = [event.key for event in self.world.events if isinstance(event, Accepted)]
        ends = [event for event in self.world.events if isinstance(event, Finished)]
        assert sorted(event.key for event in ends) == sorted(accepted)
        tokens: dict[RequestKey, list[int]] = defaultdict(list)
        for event in self.world.events:
            if isinstance(event, Tokens):
                tokens[event.key] += event.token_ids
        for end in ends:
            prompt, max_tokens = self.prompts[end.key]
            expected, outcome = self.subject.alone(prompt)
            found = tokens[end.key]
            assert found == expected[: len(found)]
            if end.outcome == "failed":
                assert outcome == "failed"
                assert len(found) == len(expected)
            elif end.outcome != "cancelled":
                assert len(found) == max_tokens

    def note(self) -> None:
        steps, seen = self.world.tape.steps, self.subject.seen
        seen["preempted"] += sum(sum(step.preemptions.values()) for step in steps)
        seen["evicted"] += self.world.scheduler.space.num_evicted
        seen["reused"] += sum(sum(step.prefix_hit_tokens.values()) for step in steps)
        seen["worlds that reuse"] += self.world.scheduler.space.prefix_note == "on"
        seen.update(event.outcome for event in self.world.events if isinstance(event, Finished))


def run_machine(subject: Subject, *, num_examples: int, num_operations: int) -> Counter[str]:
    """What was seen. What fails is told as it was found: to shrink it may take longer than a test may."""
    run_state_machine_as_test(
        lambda: Machine(subject),
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_operations,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return subject.seen


KINDS = {
    "state, window and full": ("gear", None),
    "state, window and full, packed on the way": ("gear", Quantization(bits=8, group_size=32, start=CHUNK)),
    "full, packed to 4 bits": ("llama", Quantization(bits=4, group_size=32)),
    "latent": ("deepseek_v3", None),
}
MORE_KINDS = {
    "state and full in each layer": ("falcon_h1", None),
    "gated delta and full, packed": ("qwen3_next", Quantization(bits=8, group_size=32)),
    "window and full, packed on the way": ("gpt_oss", Quantization(bits=4, group_size=32, start=CHUNK)),
    "state, full and experts": ("nemotron_h", None),
}


def check_seen(seen: Counter[str], num_operations: int) -> None:
    """That enough happened, and of every sort."""
    expected = ["preempted", "failed", "cancelled", "length"]
    if seen["worlds that reuse"]:
        expected += ["reused", "evicted"]
    assert seen["operations"] >= num_operations
    assert all(seen[event] for event in expected), seen


@pytest.mark.parametrize("kinds", KINDS)
def test_rows_of_all_kinds_survive_anything_as_if_alone(kinds: str) -> None:
    seen = run_machine(mlx_subject(*KINDS[kinds]), num_examples=5, num_operations=50)
    check_seen(seen, 250)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS | MORE_KINDS)
def test_rows_of_all_kinds_survive_far_more(kinds: str) -> None:
    seen = run_machine(mlx_subject(*(KINDS | MORE_KINDS)[kinds]), num_examples=20, num_operations=100)
    check_seen(seen, 1_500)


@pytest.mark.parametrize("window", [None, 6])
def test_plans_hold_under_anything(window: int | None) -> None:
    """The same on a runner that checks every rule of a plan, and what each page holds."""
    check_seen(run_machine(fake_subject(window), num_examples=25, num_operations=60), 1_000)
