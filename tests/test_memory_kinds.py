"""What MLX holds is what the plan says, for every kind of state: when pools are made, and while rows run."""

import gc
from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny_zoo import VOCAB, zoo_model

from mlxd.batching.driver import Driver
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import RunnerInfo
from mlxd.caches.kinds import KINDS, Layer, group_specs, inspect_layers, packed_layers
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import MemoryPlan, plan_memory

PAGE, CHUNK, MAX_ROWS = 16, 32, 1024
TOLERANCE = 0.05
BATCHES = ((3 * CHUNK + 5, 9, 1, CHUNK - 1), (CHUNK - 1,))
"""Prompt lengths: many chunks and less than one together; a row that may be packed while it decodes."""
NUM_STEPS = 6

NATIVE = {
    "full": "llama",
    "window and full": "gpt_oss",
    "state": "mamba2",
    "state and full": "qwen3_next",
    "state and full in each layer": "falcon_h1",
    "layers that share": "gemma3n",
    "latent": "deepseek_v3",
    "latent and its index in each layer": "deepseek_v32",
}
FORMS = {
    "8 bits": Quantization(bits=8, group_size=32),
    "4 bits": Quantization(bits=4, group_size=32),
    "8 bits on the way": Quantization(bits=8, group_size=32, start=CHUNK),
    "4 bits on the way": Quantization(bits=4, group_size=32, start=CHUNK),
}
PACKABLE = ("full", "window and full", "state and full", "state and full in each layer", "layers that share")
CASES = [(kind, None) for kind in NATIVE] + [(kind, form) for kind in PACKABLE for form in FORMS]
COPIED = "latent and its index in each layer"
"""MLX copies what this model ties to its index by `mx.depends`, an array at a time."""


@cache
def model_of(kind: str) -> nn.Module:
    return zoo_model(NATIVE[kind])


def layers_of(kind: str, form: str | None) -> tuple[Layer, ...]:
    layers = inspect_layers(model_of(kind))
    return layers if form is None else packed_layers(layers, FORMS[form])


def plan_of(layers: Sequence[Layer]) -> MemoryPlan:
    """Pools of some MiB, so that a copy of one stands out of what a step needs."""
    return plan_memory(
        group_specs(layers, PAGE, CHUNK),
        budget_bytes=2**24,
        weights_bytes=0,
        max_rows=MAX_ROWS,
        max_model_len=1024,
        chunk=CHUNK,
    )


def make_runner(kind: str, form: str | None) -> tuple[MlxRunner, int]:
    """A runner, and the bytes that MLX held before there were its pools."""
    model, layers = model_of(kind), layers_of(kind, form)
    memory = plan_of(layers)
    gc.collect()
    before = mx.get_active_memory()
    runner = MlxRunner(model, layers, memory, RunnerInfo(kind, VOCAB, memory, 4, frozenset(), "cpu", False))
    runner.set_attention("gathered" if form is None else "in_place")
    runner.step.enabled = False
    return runner, before


def planned_bytes(runner: MlxRunner) -> int:
    return sum(group.num_pages * group.spec.page_bytes for group in runner.info.memory.groups)


def run_rows(runner: MlxRunner, lengths: Sequence[int]) -> None:
    """Rows that come together, decode and leave."""
    driver = Driver(runner, runner.info.memory)
    for length in lengths:
        driver.join([(7 * i + 3) % VOCAB for i in range(length)])
    driver.prefill()
    for _ in range(NUM_STEPS):
        driver.decode()
    for row in list(driver.rows):
        driver.leave(row)
    driver.clean()


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_pages_times_bytes_are_what_mlx_holds(kind: str, form: str | None) -> None:
    runner, before = make_runner(kind, form)
    assert mx.get_active_memory() - before == pytest.approx(planned_bytes(runner), rel=TOLERANCE)


@pytest.mark.parametrize(("kind", "form"), [case for case in CASES if case[0] != COPIED])
def test_rows_take_no_more_than_the_pages(kind: str, form: str | None) -> None:
    """At no moment, and nothing stays."""
    runner, before = make_runner(kind, form)
    mx.reset_peak_memory()
    for lengths in BATCHES:
        run_rows(runner, lengths)
    assert mx.get_peak_memory() - before == pytest.approx(planned_bytes(runner), rel=TOLERANCE)
    mx.eval([array for layer in runner._caches for array in layer.state()])
    assert mx.get_active_memory() - before == pytest.approx(planned_bytes(runner), rel=TOLERANCE)


def test_every_kind_there_is_was_measured() -> None:
    measured = {layer.kind.native for kind in NATIVE for layer in layers_of(kind, None)}
    assert measured == {kind.native for kind in KINDS}
    packed = {layer.kind.native for kind in PACKABLE for layer in layers_of(kind, None)}
    assert packed >= {kind.native for kind in KINDS if kind.make_packed or kind.make_delayed}
