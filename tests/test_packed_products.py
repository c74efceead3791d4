"""Products with packed weights: all rows at once in our own forwards, where MLX would take one by one."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from model_bench import PROMPTS, Bench, are_same
from tiny_zoo import zoo_model

from mlxd.batching import packed_products
from mlxd.batching.joined import join_projections
from mlxd.batching.own_forward import own_forward
from mlxd.batching.packed_products import multiply_packed_together
from mlxd.batching.products import rewrite_products
from mlxd.batching.selftest import oracle_logprobs
from mlxd.caches.kinds import inspect_layers

GROUP = 32


def packed(name: str) -> nn.Module:
    """A model of the zoo whose layers are packed where their widths allow it."""
    mx.random.seed(0)
    model = zoo_model(name)
    nn.quantize(
        model,
        group_size=GROUP,
        bits=8,
        class_predicate=lambda _, layer: (
            isinstance(layer, nn.Linear | nn.Embedding) and layer.weight.shape[-1] % GROUP == 0
        ),
    )
    mx.eval(model.parameters())
    return model


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "unpacks_by_batch", lambda: True)


@contextmanager
def shapes_multiplied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    shapes: list[tuple[int, ...]] = []
    original = mx.quantized_matmul

    def noted(x: mx.array, *arguments: Any, **options: Any) -> mx.array:
        shapes.append(tuple(x.shape))
        result: mx.array = original(x, *arguments, **options)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(mx, "quantized_matmul", noted)
        yield shapes


@pytest.mark.parametrize(
    ("shape", "seen"), [((3, 1), [3]), ((2, 5), [10]), ((1, 1), [1])], ids=["decode", "cohort", "one row"]
)
def test_all_rows_are_multiplied_at_once_in_our_own_forwards_alone(
    shape: tuple[int, int], seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = packed("llama")
    model = deepcopy(apart)
    note = multiply_packed_together(model, mx.float32)
    num_layers = sum(
        isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding) for module in apart.modules()
    )
    assert note == f"all rows at once in {num_layers} packed layers"
    tokens = mx.arange(shape[0] * shape[1]).reshape(shape)
    expected = apart(tokens)
    with shapes_multiplied(monkeypatch) as shapes:
        outside = model(tokens)
        assert {x[:-1] for x in shapes} == {shape}
        shapes.clear()
        with own_forward():
            inside = model(tokens)
        assert {x[:-1] for x in shapes} == {tuple(seen)}
    assert mx.array_equal(outside, expected)
    assert mx.allclose(inside, expected, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "mamba2"])
def test_rows_of_a_packed_model_are_those_of_mlx_lm_eager_and_compiled(name: str) -> None:
    model = packed(name)
    join_projections(model, mx.float32)
    assert "all rows at once" in rewrite_products(model, mx.float32)
    bench = Bench(model, inspect_layers(model))
    bench.oracle = [oracle_logprobs(packed(name), prompt) for prompt in PROMPTS]
    assert bench.fault([0, 1, 2]) is None
    eager, compiled = bench.generate(PROMPTS), bench.compiled(PROMPTS)
    assert compiled is not None
    assert are_same(compiled, eager, bench.limits)


def test_a_model_that_would_be_wrong_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = packed("llama")
    monkeypatch.setattr(packed_products, "_together", lambda x: x.reshape(-1, x.shape[-1])[::-1])
    with caplog.at_level(logging.WARNING):
        note = multiply_packed_together(model, mx.float32)
    assert note.startswith("packed ones a row at a time: the model differs by")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert [type(module) for module in model.modules()] == [
        type(module) for module in packed("llama").modules()
    ]


@pytest.mark.parametrize("is_cuda", [True, False])
def test_other_models_and_devices_have_nothing_to_tell(
    is_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_products, "unpacks_by_batch", lambda: is_cuda)
    model = zoo_model("llama") if is_cuda else packed("llama")
    assert multiply_packed_together(model, mx.float32) == ""
