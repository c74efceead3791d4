"""The code of docs/adding-a-cache.md runs, passes the suite, and serves a model."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import RunnerInfo
from mlxd.batching.selftest import fault_in, oracle_logprobs, prompts
from mlxd.caches import kinds
from mlxd.caches.sizing import plan_memory

DOCUMENT = Path(__file__).parents[1] / "docs" / "adding-a-cache.md"
VOCAB = 32


def code_of_the_document() -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "adding_a_cache"}
    exec(compile("\n".join(blocks), str(DOCUMENT), "exec"), names)
    return names


NAMES = code_of_the_document()
TestMeanRows = NAMES["TestMeanRows"]


class MeanModel(nn.Module):
    """Two layers; each adds a projection of the mean of its inputs so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = [nn.Linear(16, 16), nn.Linear(16, 16)]

    def make_cache(self) -> list[Any]:
        return [NAMES["RunningMean"]() for _ in self.layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = self.embedding(tokens)
        for layer, mean in zip(self.layers, cache, strict=True):
            x = x + mx.tanh(layer(mean.add(x)))
        logits: mx.array = 4 * self.embedding.as_linear(x)
        return logits


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_file_and_one_line_serve_the_model(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, NAMES["MEAN"]))
    mx.random.seed(0)
    model = MeanModel()
    layers = kinds.inspect_layers(model)
    memory = plan_memory(
        kinds.group_specs(layers, 8),
        budget_bytes=2**20,
        weights_bytes=0,
        max_rows=4,
        max_model_len=64,
        chunk=16,
    )
    runner = MlxRunner(model, layers, memory, RunnerInfo("mean", VOCAB, memory, 4, frozenset(), "cpu", True))
    runner.step.enabled = compiled
    ragged = prompts(memory, VOCAB)
    oracle = [oracle_logprobs(model, prompt) for prompt in ragged]
    assert runner.signature == "mean*2"
    assert fault_in(runner, memory, oracle, ragged) is None
    assert runner.counters().graph_failures == 0


def test_without_the_line_the_model_is_refused_by_name() -> None:
    with pytest.raises(kinds.UnsupportedCacheError, match="layer 0 needs RunningMean"):
        kinds.inspect_layers(MeanModel())
