"""Projections that share their input become one product; the model computes what it did."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from model_bench import PROMPTS, Bench, are_same
from tiny_zoo import MODELS, zoo_model

from mlxd.batching.joined import join_projections
from mlxd.batching.selftest import oracle_logprobs
from mlxd.caches.kinds import REFUSED, inspect_layers

DIM = 64
VOCAB = 32


class Layer(nn.Module):
    """q, k and v of one input, o of another."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.q, self.k, self.v = make(DIM, DIM), make(DIM, 32), make(DIM, 32)
        self.o = make(DIM, DIM)

    def __call__(self, x: mx.array) -> mx.array:
        keys, values = self.k(x), self.v(x)
        return x + self.o(self.q(x) + mx.concatenate([keys * values, values], axis=-1))


class Model(nn.Module):
    """Two layers between an embedding and its transpose; it keeps no state."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = [layer(), layer()]
        self.make_cache = list

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.as_linear(x)


def plain(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def packed(**options: object) -> Callable[[int, int], nn.Module]:
    def make(inputs: int, outputs: int) -> nn.Module:
        return nn.QuantizedLinear(inputs, outputs, **options)

    return make


FORMS = {
    "plain": plain,
    "bias": nn.Linear,
    "4 bits": packed(group_size=32, bits=4, bias=False),
    "8 bits and bias": packed(group_size=64, bits=8),
    "mxfp4": packed(mode="mxfp4", bias=False),
}


def logits(model: nn.Module) -> mx.array:
    result: mx.array = model(mx.array([[5, 3, 1]]))
    mx.eval(result)
    return result


def num_bytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def num_products(array: mx.array) -> int:
    """Of the graph that the array is yet to be computed by."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return graph.getvalue().count('label ="Matmul"')


@pytest.mark.parametrize("form", FORMS)
def test_layers_that_are_called_with_the_same_array_become_one(form: str) -> None:
    mx.random.seed(0)
    model = Model(lambda: Layer(FORMS[form]))
    before, size = logits(model), num_bytes(model)
    assert join_projections(model, mx.float32) == "q+k+v of 2 modules"
    assert mx.allclose(logits(model), before, rtol=1e-5, atol=1e-5)
    assert num_bytes(model) == size
    assert isinstance(model.layers[0].o, (nn.Linear, nn.QuantizedLinear))


def test_one_product_is_computed_for_all_of_them() -> None:
    model = Model(lambda: Layer(plain))
    join_projections(model, mx.float32)
    layer, x = model.layers[0], mx.ones((1, 2, DIM))
    products = [layer.k(x), layer.v(x), layer.q(x)]
    assert len({id(array) for array in products}) == 3
    joined = layer.q.joined
    for product, (start, end) in zip(products, ((64, 96), (96, 128), (0, 64)), strict=True):
        assert mx.array_equal(product, joined(x)[..., start:end])


class OtherArrays(Layer):
    def __call__(self, x: mx.array) -> mx.array:
        return self.q(x) + self.k(x * 1.0).sum() + self.v(x + 0.0).sum()


class OtherForms(Layer):
    """k has a bias, v is in half precision."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__(make)
        self.k = nn.Linear(DIM, 32)
        self.v.set_dtype(mx.float16)


class Watched(Layer):
    def __call__(self, x: mx.array) -> mx.array:
        return self.q(x) + self.k(x).sum() / self.k.weight.shape[0] + self.v.weight.sum()


class QueriesAlone(Layer):
    """Of one position."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.q(x) + (self.k(x).sum() if x.shape[1] > 1 else 0.0)


class Twice(Layer):
    def __call__(self, x: mx.array) -> mx.array:
        return self.q(x) + self.q(x) + self.k(x).sum() + self.k(x).sum()


class Shared(Layer):
    """k and v are those of one layer's, and of another's."""

    everywhere = nn.Linear(DIM, 32), nn.Linear(DIM, 32)

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__(make)
        self.k, self.v = self.everywhere


class Overwriting(Layer):
    """Looks as if its input was the same."""

    def __call__(self, x: mx.array) -> mx.array:
        x = x * 1.0
        q = self.q(x)
        x += 1.0
        return q + self.k(x).sum() + self.v(x).sum()


class Particular(Layer):
    """Looks at its layers from its fourth call on."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__(make)
        self.calls = 0

    def __call__(self, x: mx.array) -> mx.array:
        self.calls += 1
        if self.calls > 3 and not isinstance(self.q, nn.Linear):
            raise TypeError("q is no Linear")
        return super().__call__(x)


NOTHING_SHARED = "nothing: no layers that it knows share their input"


@pytest.mark.parametrize(
    ("layer", "note"),
    [
        (OtherArrays, NOTHING_SHARED),
        (OtherForms, NOTHING_SHARED),
        (Watched, NOTHING_SHARED),
        (QueriesAlone, NOTHING_SHARED),
        (Twice, NOTHING_SHARED),
        (Shared, NOTHING_SHARED),
        (Overwriting, "nothing: the model differs by "),
        (Particular, "nothing: the model fails (TypeError: q is no Linear) then"),
    ],
)
def test_what_does_not_go_together_stays_as_it_is(layer: type[Layer], note: str) -> None:
    mx.random.seed(0)
    model = Model(lambda: layer(plain))
    names, before = [name for name, _ in tree_flatten(model.parameters())], logits(model)
    assert join_projections(model, mx.float32).startswith(note)
    assert mx.array_equal(logits(model), before)
    assert [name for name, _ in tree_flatten(model.parameters())] == names


def test_memory_grows_by_one_group_at_most() -> None:
    def wide(inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(DIM, 4096, bias=False)

    class Wide(Layer):
        def __call__(self, x: mx.array) -> mx.array:
            return x + (self.q(x) + self.k(x) + self.v(x)).sum()

    model = Model(lambda: Wide(wide))
    model.layers += [Wide(wide) for _ in range(6)]
    mx.eval(model.parameters())
    group = 3 * 4 * DIM * 4096
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert join_projections(model, mx.float32) == "q+k+v of 8 modules"
    assert mx.get_peak_memory() - before < 1.5 * group
    assert mx.get_active_memory() - before < 0.1 * group
    assert mx.get_cache_memory() < group


def test_nothing_is_held_when_all_have_asked() -> None:
    model = Model(lambda: Layer(plain))
    join_projections(model, mx.float32)
    layer = model.layers[0]
    x = mx.ones((1, 1, DIM))
    first = layer.q(x)
    assert mx.array_equal(layer.q(x), first)
    again = layer.k(2 * x)
    assert mx.allclose(again, 2 * layer.k(x), rtol=1e-5)
    layer.v(x), layer.q(x)
    product = layer.q._product
    assert product._input is None
    assert not product._outputs


def test_a_compiled_model_computes_the_same_in_one_product() -> None:
    mx.random.seed(0)
    model = Model(lambda: Layer(plain))
    apart = deepcopy(model)
    join_projections(model, mx.float32)
    tokens = mx.array([[1, 2], [3, 4]])
    step, before = mx.compile(lambda tokens: model(tokens)), mx.compile(lambda tokens: apart(tokens))
    assert num_products(before(tokens)) == 9
    for _ in range(2):
        assert num_products(step(tokens)) == 5
        assert mx.allclose(step(tokens), before(tokens), rtol=1e-5, atol=1e-5)


NEED_METAL = set() if mx.metal.is_available() else {"bitnet", "muse_spark"}
MLP = "gate_proj+up_proj of 4 modules"
EXPECTED = {
    "llama": f"{MLP}, q_proj+k_proj+v_proj of 4 modules",
    "qwen3_moe": "q_proj+k_proj+v_proj of 4 modules",
    "gemma3n": f"{MLP}, q_proj+k_proj+v_proj of 2 modules",
    "deepseek_v3": f"{MLP}, q_a_proj+kv_a_proj_with_mqa of 4 modules",
    "qwen3_next": f"gate+shared_expert_gate of 4 modules, {MLP}, q_proj+k_proj+v_proj of 2 modules, "
    "in_proj_qkvz+in_proj_ba of 2 modules",
    "gpt_oss": "q_proj+k_proj+v_proj of 4 modules",
    "phi3": NOTHING_SHARED,
    "mamba2": NOTHING_SHARED,
}


def joined(name: str) -> tuple[nn.Module, str]:
    """A tiny model, which computes what it did apart, and what was joined in it."""
    apart = zoo_model(name)
    model = deepcopy(apart)
    note = join_projections(model, mx.float32)
    tokens = mx.array([[5, 3, 1, 7]])
    assert mx.allclose(model(tokens), apart(tokens), rtol=1e-4, atol=1e-4), name
    return model, note


@pytest.mark.parametrize("name", EXPECTED)
def test_models_of_mlx_lm_are_joined_where_they_can_be(name: str) -> None:
    assert joined(name)[1] == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"phi3", "mamba2"}))
def test_rows_of_a_joined_model_are_those_of_mlx_lm_eager_and_compiled(name: str) -> None:
    model, _ = joined(name)
    bench = Bench(model, inspect_layers(model))
    bench.oracle = [oracle_logprobs(zoo_model(name), prompt) for prompt in PROMPTS]
    bench.runner.set_attention("gathered" if name == "deepseek_v3" else "in_place")
    for rows in ([0, 1, 2], [3]):
        assert bench.fault(rows) is None
    eager, compiled = bench.generate(PROMPTS), bench.compiled(PROMPTS)
    assert compiled is not None
    assert are_same(compiled, eager, bench.limits)


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(EXPECTED) - NEED_METAL - set(REFUSED)))
def test_every_model_of_mlx_lm_computes_the_same_when_it_is_joined(name: str) -> None:
    joined(name)
