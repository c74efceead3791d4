"""Layers whose products with few rows are our own, in decode steps alone."""

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from model_bench import PROMPTS, Bench, are_same
from plain_product import PlainProduct, use_plain_product
from tiny_zoo import zoo_model

from mlxd.batching import product_kernel
from mlxd.batching.few_rows import multiplies_few_rows, own_products
from mlxd.batching.few_rows_rewrite import multiply_few_rows
from mlxd.batching.joined import join_projections
from mlxd.batching.selftest import oracle_logprobs
from mlxd.caches.kinds import inspect_layers

DIM = 64
VOCAB = 32


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> PlainProduct:
    return use_plain_product(monkeypatch)


class Model(nn.Module):
    """An embedding, a layer with a bias and one without, one that the kernel does not know, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.first, self.second = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.odd = nn.Linear(DIM, DIM + 1)
        self.make_cache = list

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        x = self.second(mx.tanh(self.first(self.embed(tokens))))
        logits: mx.array = self.embed.as_linear(x + self.odd(x)[..., :DIM])
        return logits


def rewritten(make: Callable[[], nn.Module] = Model) -> tuple[nn.Module, nn.Module, str]:
    """A model with products of our own, the same one untouched, and what was rewritten."""
    mx.random.seed(0)
    apart = make()
    model = deepcopy(apart)
    return model, apart, multiply_few_rows(model, mx.float32)


def logits(model: nn.Module, rows: int, positions: int = 1) -> mx.array:
    result: mx.array = model(mx.arange(rows * positions).reshape(rows, positions) % VOCAB)
    mx.eval(result)
    return result


@pytest.mark.parametrize(("rows", "served"), [(1, False), (2, True), (5, True), (32, True), (33, False)])
def test_two_to_thirty_two_rows_are_multiplied_by_the_kernel(
    rows: int, served: bool, plain: PlainProduct
) -> None:
    model, apart, note = rewritten()
    assert note == "by a kernel in 3 layers"
    plain.rows.clear()
    with own_products():
        found = logits(model, rows)
    assert plain.rows == [rows] * 3 * served
    assert mx.allclose(found, logits(apart, rows), rtol=1e-5, atol=1e-5)


def test_all_other_forwards_are_mlx_own(plain: PlainProduct) -> None:
    model, apart, _ = rewritten()
    plain.rows.clear()
    assert mx.array_equal(logits(model, 4), logits(apart, 4))
    with own_products(), own_products(False):
        assert mx.array_equal(logits(model, 4), logits(apart, 4))
    assert plain.rows == []


def test_other_numbers_than_the_weights_are_multiplied_by_mlx(plain: PlainProduct) -> None:
    model, _, _ = rewritten()
    plain.rows.clear()
    with own_products():
        mx.eval(model.first(mx.zeros((2, 1, DIM), mx.float16)))
    assert plain.rows == []


def test_a_model_keeps_its_parameters() -> None:
    model, apart, _ = rewritten()
    assert sorted(dict(tree_flatten(model.parameters()))) == sorted(dict(tree_flatten(apart.parameters())))
    assert isinstance(model.first, nn.Linear)
    assert isinstance(model.embed, nn.Embedding)
    assert type(model.odd) is nn.Linear


def test_a_layer_whose_bias_is_of_another_type_is_left_alone() -> None:
    def mixed() -> nn.Module:
        model = Model()
        model.first.bias = model.first.bias.astype(mx.bfloat16)
        return model

    model, _, note = rewritten(mixed)
    assert note == "by a kernel in 2 layers"
    assert type(model.first) is nn.Linear


def test_packed_layers_are_left_alone() -> None:
    def packed() -> nn.Module:
        model = Model()
        nn.quantize(model, group_size=32, bits=8, class_predicate=lambda _, x: x is not model.odd)
        return model

    model, apart, note = rewritten(packed)
    assert note == "by MLX: no layers that the kernel knows"
    assert [type(module) for module in model.modules()] == [type(module) for module in apart.modules()]


def test_nothing_is_rewritten_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_kernel, "is_available", lambda: False)
    model, _, note = rewritten()
    assert note == "by MLX: there is a kernel for CUDA alone"
    assert not multiplies_few_rows(model)


class Particular(Model):
    """Takes no layer but MLX's."""

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        if type(self.first) is not nn.Linear:
            raise TypeError("no Linear")
        return super().__call__(tokens)


def twice(product: mx.array) -> mx.array:
    return 2 * product


def last_row_missing(product: mx.array) -> mx.array:
    return mx.concatenate([product[:-1], mx.zeros_like(product[-1:])]) if product.shape[0] > 3 else product


def by_siblings(product: mx.array) -> mx.array:
    return product * (1 + 1e-6 * product.shape[0])


@pytest.mark.parametrize(
    ("make", "wrong", "fault"),
    [
        (Model, twice, "the model differs by "),
        (Model, last_row_missing, "a row is off by 1 of its norm in ProductCase(outputs="),
        (Model, by_siblings, "rows depend on those beside them in ProductCase(outputs="),
        (Particular, lambda product: product, "the model fails (TypeError: no Linear) then"),
    ],
)
def test_a_model_that_is_wrong_then_stays_as_it_was(
    make: Callable[[], nn.Module],
    wrong: Callable[[mx.array], mx.array],
    fault: str,
    plain: PlainProduct,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def launch(**arguments: Any) -> list[mx.array]:
        return [wrong(product) for product in plain.launch(**arguments)]

    monkeypatch.setattr(product_kernel, "kernel", lambda with_bias: launch)
    with caplog.at_level(logging.WARNING):
        model, apart, note = rewritten(make)
    assert note.startswith(f"by MLX: {fault}")
    warning = note.replace("by MLX", "products of few rows are MLX's")
    assert [record.getMessage() for record in caplog.records] == [warning]
    assert [type(module) for module in model.modules()] == [type(module) for module in apart.modules()]
    with own_products():
        assert mx.array_equal(logits(model, 4), logits(apart, 4))


def test_a_model_that_cannot_be_tried_stays_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Model):
        def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
            raise ValueError("no such layer")

    model, _, note = rewritten(Broken)
    assert note == "by MLX: ValueError: no such layer"
    assert not multiplies_few_rows(model)
    assert not caplog.records


ZOO = {"llama": 13, "gemma3_text": 13, "qwen3_moe": 9, "gpt_oss": 9, "mamba2": 5, "deepseek_v3": 13}


@pytest.mark.parametrize("name", ZOO)
def test_rows_of_a_rewritten_model_are_those_of_mlx_lm_eager_and_compiled(
    name: str, plain: PlainProduct
) -> None:
    model = zoo_model(name)
    join_projections(model, mx.float32)
    assert multiply_few_rows(model, mx.float32) == f"by a kernel in {ZOO[name]} layers"
    bench = Bench(model, inspect_layers(model))
    bench.oracle = [oracle_logprobs(zoo_model(name), prompt) for prompt in PROMPTS]
    bench.runner.set_attention("gathered")
    plain.rows.clear()
    assert bench.fault([3]) is None
    assert plain.rows == []  # neither prefill nor a row alone
    assert bench.fault([0, 1, 2]) is None
    assert set(plain.rows) == {3}
    eager, compiled = bench.generate(PROMPTS), bench.compiled(PROMPTS)
    assert compiled is not None
    assert are_same(compiled, eager, bench.limits)
