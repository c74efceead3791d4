"""Packed keys and values beside recurrent state, experts and shared layers: rows come and go as if alone."""

import random
from functools import cache

import pytest
import tiny_zoo
from come_and_go import come_and_go, tokens_alone
from tiny_zoo import VOCAB, zoo_model

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
    chance, runner = random.Random(name), runner_of(name, quantization)

    def prompt() -> list[int]:
        length = chance.choice((1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1, 40))
        return [chance.randrange(VOCAB) for _ in range(length)]

    for row in come_and_go(runner, chance, prompt):
        assert row.output == tokens_alone(runner, row.prompt, len(row.output))
