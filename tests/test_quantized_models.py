"""Packed keys and values beside recurrent state, experts and shared layers: rows come and go as if alone."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
import tiny_zoo
from tiny_zoo import VOCAB, zoo_model

from mlxd.batching.driver import Driver
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import RunnerInfo
from mlxd.batching.selftest import fault_in, oracle_logprobs
from mlxd.caches.kinds import group_specs, inspect_layers, packed_layers
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import plan_memory

PAGE = 8
AT_ONCE = Quantization(bits=8, group_size=32)
ON_THE_WAY = Quantization(bits=8, group_size=32, start=2 * PAGE)
MODELS = ("qwen3_next", "falcon_h1", "nemotron_h", "gemma3n", "qwen3_moe")
"""Their heads are as wide as `head_dim` says."""
PROMPTS = [[(7 * i + 3) % VOCAB for i in range(length)] for length in (37, 9, 1)]
_MOST_TOKENS = 8


@cache
def runner_of(name: str, quantization: Quantization) -> MlxRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_zoo._SIZES, "head_dim", 32)
        model = zoo_model(name)
    layers = packed_layers(inspect_layers(model), quantization)
    memory = plan_memory(
        group_specs(layers, PAGE, 2 * PAGE),
        budget_bytes=2**23,
        weights_bytes=0,
        max_rows=4,
        max_model_len=128,
        chunk=2 * PAGE,
    )
    runner = MlxRunner(model, layers, memory, RunnerInfo(name, VOCAB, memory, 4, frozenset(), "cpu", False))
    runner.set_attention("in_place")
    runner.step.enabled = False
    return runner


def tokens_alone(runner: MlxRunner, prompt: Sequence[int], count: int) -> list[int]:
    runner.reset()
    driver = Driver(runner, runner.info.memory)
    row = driver.join(prompt)
    driver.prefill()
    for _ in range(count):
        driver.decode()
    driver.leave(row)
    return row.output


@pytest.mark.parametrize("quantization", [AT_ONCE, ON_THE_WAY], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_ragged_rows_read_what_packing_leaves(name: str, quantization: Quantization) -> None:
    runner = runner_of(name, quantization)
    runner.reset()
    assert "quant:8:32" in runner.signature
    memory = runner.info.memory
    assert memory.boundary == quantization.start
    expected = [oracle_logprobs(runner.model, p, quantization, memory.boundary) for p in PROMPTS]
    assert fault_in(runner, memory, expected, PROMPTS, quantization=quantization) is None


@pytest.mark.parametrize("quantization", [AT_ONCE, ON_THE_WAY], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_come_and_go_are_as_if_alone(name: str, quantization: Quantization) -> None:
    chance = random.Random(name)
    runner = runner_of(name, quantization)
    runner.reset()
    driver = Driver(runner, runner.info.memory, pipelined=True)
    rows = []
    for _ in range(20):
        if not driver.rows or (len(driver.rows) < 4 and chance.random() < 0.4):
            length = chance.choice((1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1, 40))
            rows.append(driver.join([chance.randrange(VOCAB) for _ in range(length)]))
            driver.prefill()
        driver.decode()
        for row in list(driver.rows):
            if len(row.output) >= _MOST_TOKENS or chance.random() < 0.1:
                driver.flush()
                driver.leave(row)
    driver.flush()
    for row in list(driver.rows):
        driver.leave(row)
    for pool in driver.pools:
        pool.check_integrity()
        assert pool.num_held == 0
    for row in rows:
        assert row.output == tokens_alone(runner, row.prompt, len(row.output))
