"""The residual stream: what is added is added where it is normed, and all else reads the plain sum."""

from __future__ import annotations

import gc
import io
import logging
import operator
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from plain_norm import PlainNorm, use_plain_norm
from residual_layers import (
    DIM,
    TOKENS,
    ChangedInPlace,
    ChangedTerm,
    Layer,
    Model,
    OtherShapes,
    Parallel,
    Particular,
    ReadElsewhere,
    Scaled,
    Wider,
    fused,
    logits,
)

from mlxd.batching import norm_kernel
from mlxd.batching.own_forward import own_forward
from mlxd.batching.residual import Residual, fuse_norms


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> PlainNorm:
    return use_plain_norm(monkeypatch)


def test_every_sum_that_is_normed_is_one_launch(plain: PlainNorm) -> None:
    model, apart, note = fused()
    assert note == "add+norm of 4 modules"
    plain.rows.clear()
    assert mx.allclose(logits(model), logits(apart), rtol=1e-5, atol=1e-5)
    assert plain.rows == [6] * 4


def test_a_model_keeps_its_parameters_and_their_names() -> None:
    model, apart, _ = fused()
    names = [[name for name, _ in tree_flatten(each.parameters())] for each in (model, apart)]
    assert names[0] == names[1]
    assert isinstance(model.norm, nn.RMSNorm)
    assert type(model.layers[0].first_norm) is nn.RMSNorm  # is given the embedding itself


def test_forwards_of_others_are_left_to_mlx_lm(plain: PlainNorm) -> None:
    model, apart, _ = fused()
    plain.rows.clear()
    assert mx.array_equal(model(TOKENS), apart(TOKENS))
    assert plain.rows == []


def test_nothing_is_fused_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernel, "is_available", lambda: False)
    model, _, note = fused()
    assert note == "nothing: there is a kernel for CUDA alone"
    assert type(model.embed) is nn.Embedding


def test_a_packed_embedding_begins_a_stream() -> None:
    mx.random.seed(0)
    model = Model()
    nn.quantize(model, group_size=32, bits=8)
    before = logits(model)
    assert fuse_norms(model, mx.float32) == "add+norm of 4 modules"
    assert mx.allclose(logits(model), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "num_norms"),
    [
        (Scaled, 4),
        (ReadElsewhere, 4),
        (ChangedTerm, 4),
        (ChangedInPlace, 2),
        (Parallel, 2),
        (OtherShapes, 2),
        (Wider, 2),
    ],
)
def test_whatever_else_reads_or_changes_a_sum_is_right(layer: type[Layer], num_norms: int) -> None:
    model, apart, note = fused(layer)
    assert note == f"add+norm of {num_norms} modules"
    assert mx.allclose(logits(model), logits(apart), rtol=1e-5, atol=1e-5)


IN_PLACE = [name for name in dir(operator) if name.startswith("__i") and hasattr(mx.array, name)]
OF_BITS = {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
NO_CHANGES = {"__index__", "__init__", "__init_subclass__", "__invert__"}


@pytest.mark.parametrize("name", sorted({*IN_PLACE, "__setitem__"} - NO_CHANGES))
def test_a_sum_that_is_changed_in_place_is_the_sum_of_its_terms_no_more(name: str) -> None:
    dtype = mx.int32 if name in OF_BITS else mx.float32
    twos = mx.full((2, 2), 2, dtype)
    total, other = Residual(twos) + twos, mx.array(twos + twos)
    assert total.terms is not None
    arguments = (0, twos[0]) if name == "__setitem__" else (twos,)
    getattr(total, name)(*arguments)
    getattr(other, name)(*arguments)
    assert total.terms is None
    assert mx.array_equal(total, other)


def num_operations(array: mx.array) -> Counter[str]:
    """Of the graph that the array is yet to be computed by."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return Counter(re.findall(r'label ="(\w+)", shape=rectangle', graph.getvalue()))


def test_a_stream_takes_no_operation_of_its_own() -> None:
    model, apart, _ = fused()
    with own_forward():
        assert num_operations(model(TOKENS)) == num_operations(apart(TOKENS))
    compiled = [mx.compile(lambda tokens, each=each: each(tokens)) for each in (model, apart)]
    with own_forward():
        assert num_operations(compiled[0](TOKENS)) == num_operations(compiled[1](TOKENS))


def test_a_sum_becomes_the_kernels_when_it_is_normed(plain: PlainNorm) -> None:
    model, _, _ = fused()
    total = Residual(mx.ones((2, DIM))) + mx.ones((2, DIM))
    plain.rows.clear()
    first = model.norm(total)
    assert total.terms is None
    assert mx.array_equal(model.norm(total), first)
    assert plain.rows == [2]


@pytest.mark.parametrize(
    ("rows", "dtype", "weight_dtype"), [(0, mx.float32, mx.float32), (2, mx.float32, mx.float16)], ids=str
)
def test_what_the_kernel_does_not_serve_is_normed_as_ever(
    plain: PlainNorm, rows: int, dtype: mx.Dtype, weight_dtype: mx.Dtype
) -> None:
    model, _, _ = fused()
    model.norm.weight = mx.random.normal((DIM,)).astype(weight_dtype)
    total = Residual(mx.ones((rows, DIM), dtype)) + mx.ones((rows, DIM), dtype)
    plain.rows.clear()
    assert mx.array_equal(model.norm(total), mx.fast.rms_norm(total, model.norm.weight, 1e-5))
    assert plain.rows == []


def test_a_compiled_model_computes_the_same(plain: PlainNorm) -> None:
    model, apart, _ = fused()

    def forward(tokens: mx.array) -> mx.array:
        with own_forward():
            result: mx.array = model(tokens)
        return result

    step = mx.compile(forward)
    plain.rows.clear()
    for _ in range(2):
        assert mx.allclose(step(TOKENS), apart(TOKENS), rtol=1e-5, atol=1e-5)
    assert plain.rows == [6] * 4


def test_nothing_of_a_forward_is_left_behind() -> None:
    model, _, _ = fused()
    logits(model)
    gc.disable()  # whatever refers to itself would stay
    try:
        before = mx.get_active_memory()
        for _ in range(3):
            logits(model)
        assert mx.get_active_memory() == before
    finally:
        gc.enable()


def half_a_norm(plain: PlainNorm) -> Callable[..., list[mx.array]]:
    """Wrong wherever it is asked."""

    def launch(**arguments: Any) -> list[mx.array]:
        total, normed = plain.launch(**arguments)
        return [total, normed / 2]

    return launch


def no_rows_beyond(plain: PlainNorm) -> Callable[..., list[mx.array]]:
    """Wrong in more rows than the model is tried with."""

    def launch(**arguments: Any) -> list[mx.array]:
        total, normed = plain.launch(**arguments)
        return [total, normed.at[8:].multiply(0.0)]

    return launch


@pytest.mark.parametrize(
    ("layer", "make", "fault"),
    [
        (Layer, half_a_norm, "the model differs by "),
        (Layer, no_rows_beyond, "the norm of 40 rows is off by 1 "),
        (Particular, lambda plain: plain.launch, "the model fails (TypeError: no RMSNorm) then"),
    ],
)
def test_a_model_that_is_wrong_then_stays_as_it_was(
    layer: type[Layer],
    make: Callable[[PlainNorm], Callable[..., list[mx.array]]],
    fault: str,
    plain: PlainNorm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    launch = make(plain)
    monkeypatch.setattr(norm_kernel, "kernel", lambda: launch)
    with caplog.at_level(logging.WARNING):
        model, apart, note = fused(layer)
    assert note.startswith(f"nothing: {fault}")
    assert [record.getMessage() for record in caplog.records] == [note.replace("nothing", "norms do not add")]
    assert [type(module) for module in model.modules()] == [type(module) for module in apart.modules()]
    assert mx.array_equal(logits(model), logits(apart))


def test_a_model_that_cannot_be_tried_stays_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Layer):
        def __call__(self, x: mx.array) -> mx.array:
            raise ValueError("no such layer")

    model, _, note = fused(Broken)
    assert note == "nothing: ValueError: no such layer"
    assert type(model.embed) is nn.Embedding
    assert not caplog.records
