"""A model of running means: test_adding_a_cache.py runs this in a copy of the package that has the kind."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from model_bench import PROMPTS, TOLERANCE, Bench, are_same
from tiny_zoo import VOCAB

from mlxd.caches.kinds import inspect_layers


class MeanModel(nn.Module):
    """Two layers; each adds a projection of the mean of its inputs so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = [nn.Linear(16, 16), nn.Linear(16, 16)]

    def make_cache(self) -> list[Any]:
        running_mean = import_module("running_mean")
        return [running_mean.RunningMean() for _ in self.layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = self.embedding(tokens)
        for layer, mean in zip(self.layers, cache, strict=True):
            x = x + mx.tanh(layer(mean.add(x)))
        logits: mx.array = 4 * self.embedding.as_linear(x)
        return logits


@pytest.fixture(scope="module")
def bench() -> Bench:
    mx.random.seed(0)
    model = MeanModel()
    return Bench(model, inspect_layers(model))


def test_rows_together_are_as_the_model_is_alone(bench: Bench) -> None:
    assert bench.runner.signature == "mean*2"
    assert bench.fault(range(len(PROMPTS))) is None


def test_rows_compiled_and_resumed_are_those_alone(bench: Bench) -> None:
    alone = [bench.generate([prompt])[0] for prompt in PROMPTS]
    exact = [TOLERANCE] * len(PROMPTS)
    compiled = bench.compiled(PROMPTS)
    assert compiled is not None
    assert are_same(compiled, alone, exact)
    assert are_same(bench.resumed(PROMPTS), alone, exact)
    assert bench.runner.counters().graph_failures == 0


def test_a_prompt_begins_where_an_equal_one_passed(bench: Bench) -> None:
    reuse = bench.reuse()
    assert reuse.is_same
    assert all(0 < found < total for found, total in reuse.found)
