"""Models of mlx-lm whose norms add: how many of them do, and that all compute the same."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from daemon_process import write_tiny_model
from loading import load
from model_bench import PROMPTS, Bench, are_same
from plain_norm import PlainNorm, use_plain_norm
from tiny_zoo import MODELS, zoo_model

from mlxd.batching.driver import Driver
from mlxd.batching.own_forward import own_forward
from mlxd.batching.residual import fuse_norms
from mlxd.batching.selftest import oracle_logprobs
from mlxd.caches.kinds import REFUSED, inspect_layers


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> PlainNorm:
    return use_plain_norm(monkeypatch)


def test_status_says_what_was_fused_and_the_model_then_serves(tmp_path: Path, plain: PlainNorm) -> None:
    write_tiny_model(tmp_path)
    runner = load(tmp_path)
    num_layers = len(runner.model.layers)
    assert runner.info.notes["fused"] == f"add+norm of {2 * num_layers} modules"
    driver = Driver(runner, runner.info.memory)
    driver.join([3, 1, 2])
    driver.prefill()
    plain.rows.clear()
    assert driver.decode()[0].fault is None
    assert plain.rows == [1] * (2 * num_layers)


NEED_METAL = set() if mx.metal.is_available() else {"bitnet", "muse_spark"}
EXPECTED = {
    "llama": 8,
    "qwen3_moe": 8,
    "granite": 8,
    "deepseek_v3": 8,
    "gpt_oss": 8,
    "iquestloopcoder": 9,
    "qwen3_next": 8,
    "mamba2": 4,
    "gemma4_text": 4,
    "olmo2": 1,
    "gemma3_text": 0,
    "cohere": 0,
    "gptj": 0,
}


def fused_zoo_model(name: str) -> tuple[nn.Module, str]:
    """A tiny model, which computes what it did apart, and what was fused in it."""
    apart = zoo_model(name)
    model = deepcopy(apart)
    note = fuse_norms(model, mx.float32)
    tokens = mx.array([[5, 3, 1, 7]])
    with own_forward():
        assert mx.allclose(model(tokens), apart(tokens), rtol=1e-4, atol=1e-4), name
    return model, note


@pytest.mark.parametrize("name", EXPECTED)
def test_models_of_mlx_lm_add_where_they_norm(name: str) -> None:
    number = EXPECTED[name]
    expected = f"add+norm of {number} modules" if number else "nothing: no norm that it knows is of a sum"
    assert fused_zoo_model(name)[1] == expected


@pytest.mark.parametrize("name", [name for name, number in EXPECTED.items() if number > 1])
def test_rows_of_a_fused_model_are_those_of_mlx_lm_eager_and_compiled(name: str, plain: PlainNorm) -> None:
    model, _ = fused_zoo_model(name)
    bench = Bench(model, inspect_layers(model))
    bench.oracle = [oracle_logprobs(zoo_model(name), prompt) for prompt in PROMPTS]
    bench.runner.set_attention("gathered")
    plain.rows.clear()
    for rows in ([0, 1, 2], [3]):
        assert bench.fault(rows) is None
    assert plain.rows
    eager, compiled = bench.generate(PROMPTS), bench.compiled(PROMPTS)
    assert compiled is not None
    assert are_same(compiled, eager, bench.limits)


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(EXPECTED) - NEED_METAL - set(REFUSED)))
def test_every_model_of_mlx_lm_computes_the_same_when_it_is_fused(name: str) -> None:
    fused_zoo_model(name)
