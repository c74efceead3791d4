"""MLX finds no memory in the middle of a step: rows with every kind of state go on as if nothing had been."""

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from cpu_kernel import use_numpy_kernels
from kind_runners import LATE, runner_of
from scheduling import make_config, make_tenant, submission
from starving import Play, play
from tiny_models import make_rig, prompt_of

from mlxd.batching.errors import OutOfMemoryError
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.plan import StepPlan
from mlxd.caches.quantization import Quantization
from mlxd.scheduler.inbox import Command

REASON = "[malloc_async] Unable to allocate 4096 bytes."
PACKED = Quantization(bits=8, group_size=32, start=0)
RIGS: dict[str, dict[str, Any]] = {
    "llama": {"attention": "in_place", "compiled": True},
    "mistral": {"attention": "gathered"},
    "llama/64": {"attention": "in_place", "quantization": PACKED},
    "gemma3_text/64": {"attention": "in_place", "quantization": LATE},
    "gpt_oss/64": {"attention": "kernel", "page_size": 16},
}
KINDS = (*RIGS, "qwen3_next", "mamba2", "jamba", "gemma3n")
SHARES = (0.1, 0.35, 0.6, 0.85)
"""Of the run's calls of MLX, the one that fails."""


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_kernels(monkeypatch)


@cache
def subject(kind: str) -> MlxRunner:
    return make_rig(kind, **RIGS[kind]).runner if kind in RIGS else runner_of(kind)


class Shortage:
    """Counts the calls in which MLX allocates, and lets one of them fail: before its work, or after.

    Then nothing is left in any page that anybody may want.
    """

    def __init__(self, runner: MlxRunner, fails_at: int | None) -> None:
        self._runner = runner
        self._fails_at = fails_at
        self.num_calls = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            number, self.num_calls = self.num_calls, self.num_calls + 1
            is_last = number == self._fails_at
            result = None if is_last and number % 2 else call(*args, **options)
            if is_last:
                self._spoil()
                raise RuntimeError(REASON)
            return result

        return counted

    def _spoil(self) -> None:
        storages = [storage for cache in self._runner._caches for storage in cache.storages]
        for array in (array for storage in storages for array in storage.state()):
            is_float = mx.issubdtype(array.dtype, mx.floating)
            array[:] = mx.full(array.shape, math.nan if is_float else 255, array.dtype)


@contextmanager
def shortage(runner: MlxRunner, fails_at: int | None) -> Iterator[Shortage]:
    """Calls that fail: evaluations, and those when half the caches have adopted what a step writes."""
    short = Shortage(runner, fails_at)
    middle = runner._caches[len(runner._caches) // 2]
    calls = [(mx, "eval"), (mx, "async_eval"), (middle, "commit_decode_step"), (middle, "prefill")]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in calls:
            patch.setattr(owner, name, short.wrap(getattr(owner, name)))
        yield short


def serve(kind: str, fails_at: int | None = None) -> tuple[Play, int]:
    """Three rows, one of which comes later, and one when all is over; and how often MLX was called."""
    runner = subject(kind)
    runner.reset()
    config = make_config(*(make_tenant(name) for name in ("acme", "beta")), max_rows=4)
    turns: list[list[Command]] = [[], []]
    for at, name, tenant, num_prompt, sampling in (
        (0, "greedy", "acme", 21, {"temperature": 0.0}),
        (0, "drawn", "beta", 38, {"temperature": 0.7, "presence_penalty": 0.5}),
        (5, "young", "acme", 33, {"temperature": 0.7, "top_k": 9}),
        (40, "late", "beta", 21, {"temperature": 0.0}),
    ):
        turns += [[] for _ in range(at + 1 - len(turns))]
        turns[at].append(submission(name, prompt_of(num_prompt), tenant=tenant, max_tokens=14, **sampling))
    with shortage(runner, fails_at) as short:
        played = play(config, runner, turns)
    return played, short.num_calls


@cache
def undisturbed(kind: str) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and the calls that they took."""
    played, num_calls = serve(kind)
    assert [end.outcome for end in played.ends] == ["length"] * 4
    return {end.key.request_id: played.tokens(end.key) for end in played.ends}, num_calls


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_go_on_with_the_tokens_of_an_undisturbed_run(kind: str, share: float) -> None:
    expected, num_calls = undisturbed(kind)
    played, _ = serve(kind, int(share * num_calls))
    outcomes = Counter(end.outcome for end in played.ends)
    assert played.snapshots[-1].out_of_memory == 1
    assert outcomes["length"] >= 3
    assert outcomes.total() == 4
    for end in played.ends:
        tokens = played.tokens(end.key)
        assert tokens == expected[end.key.request_id][: len(tokens)]
        assert end.outcome == "failed" or len(tokens) == 14


def test_the_memory_of_a_step_that_failed_is_given_back() -> None:
    _, num_calls = undisturbed("llama")
    gc.collect()
    before = mx.get_active_memory()
    for share in SHARES:
        serve("llama", int(share * num_calls))
    gc.collect()
    assert mx.get_active_memory() <= before + 2**16


@pytest.mark.parametrize("text", ["[eval] Attempting to eval an array without a primitive.", "out of luck"])
def test_other_errors_of_a_step_end_the_engine_as_ever(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def fail(*arrays: mx.array) -> None:
        raise RuntimeError(text)

    runner = subject("mistral")
    runner.reset()
    monkeypatch.setattr(mx, "async_eval", fail)
    with pytest.raises(RuntimeError, match=text.split("]")[-1].strip()) as raised:
        play(make_config(), runner, [[submission("x")]])
    assert not isinstance(raised.value, OutOfMemoryError)


def test_no_graph_is_retired_because_memory_ran_out_as_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_rig("llama", "in_place", compiled=True).runner
    calls = iter([True])

    def short(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = mx_compile(function)

        def call(*arrays: mx.array) -> Any:
            if next(calls, False):
                raise RuntimeError(REASON)
            return compiled(*arrays)

        return call

    mx_compile = mx.compile
    monkeypatch.setattr(mx, "compile", short)
    played = play(make_config(), runner, [[submission("first")], *([[]] * 4), [submission("next")]])
    assert {end.key.request_id: end.outcome for end in played.ends} == {"first": "failed", "next": "length"}
    assert runner.counters().graph_failures == 0
    assert runner.counters().eager_steps == 0


def test_calls_outside_of_steps_say_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_rig("llama", "in_place").runner
    evaluate = mx.eval

    def fail(*arrays: object) -> None:
        raise RuntimeError(REASON)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fail)
        with pytest.raises(OutOfMemoryError, match="Unable to allocate 4096 bytes"):
            runner.export_pages([(0, 1)])
        with pytest.raises(OutOfMemoryError):
            runner.reset()
    assert mx.eval is evaluate
    runner.reset()
    assert runner.launch(StepPlan(1)).wait().rows == ()
