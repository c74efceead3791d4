"""Cache kinds as subjects of the conformance suite: how a layer of each uses its cache."""

from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxd.batching.attention_quantized import attend_packed_pages
from mlxd.caches.conformance import Subject
from mlxd.caches.delayed import DelayedRows
from mlxd.caches.delayed_step import DelayedShape, DelayedStandIn
from mlxd.caches.paged import LayerShape, PagedRows, PagedStandIn
from mlxd.caches.quantization import Quantization
from mlxd.caches.quantized import QuantizedRows, QuantizedShape, QuantizedStandIn
from mlxd.caches.recurrent import RecurrentRows, StateShape
from mlxd.caches.sizing import ENDLESS, GroupSpec

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
PAGE, WINDOW = 4, 6
SHAPE = LayerShape(0, HEADS, KEY_DIM, VALUE_DIM, mx.float32)
PACKED = QuantizedShape(0, HEADS, 32, 32, mx.float32, Quantization(bits=8, group_size=32))
BOUNDARY = 8
DELAYED = DelayedShape(0, HEADS, 32, 32, mx.float32, Quantization(bits=8, group_size=32, start=BOUNDARY))
STATE = StateShape(0, (((2, 3), mx.float32), ((4,), mx.float32)))


def pages(shape: LayerShape, window: int | None = None) -> GroupSpec:
    return GroupSpec("group", (0,), window, PAGE, shape.bytes_per_token)


def vectors(marks: mx.array, dim: int, turn: float) -> mx.array:
    """[B, HEADS, L, dim] of marks [B, L]: every mark has its own."""
    cells = mx.arange(HEADS * dim, dtype=mx.float32).reshape(HEADS, 1, dim)
    return mx.sin(3 * marks[:, None, :, None] + cells + turn)


def attend(stand_in: Any, marks: mx.array) -> mx.array:
    keys, values = vectors(marks[:, None], KEY_DIM, 0), vectors(marks[:, None], VALUE_DIM, 1)
    all_keys, all_values = stand_in.update_and_fetch(keys, values)
    mask = stand_in.make_mask(1)
    return mx.fast.scaled_dot_product_attention(keys, all_keys, all_values, scale=1.0, mask=mask)


def store(stand_in: Any, marks: mx.array) -> None:
    stand_in.update_and_fetch(vectors(marks, KEY_DIM, 0), vectors(marks, VALUE_DIM, 1))


def attend_packed(stand_in: Any, marks: mx.array) -> mx.array:
    keys = vectors(marks[:, None], 32, 0)
    stand_in.update_and_fetch(keys, vectors(marks[:, None], 32, 1))
    return attend_packed_pages(stand_in, keys, 1.0, None)


def store_packed(stand_in: Any, marks: mx.array) -> None:
    stand_in.update_and_fetch(vectors(marks, 32, 0), vectors(marks, 32, 1))


def remember(stand_in: Any, marks: mx.array) -> mx.array:
    """A state that decays, and one that turns."""
    for index, (shape, _) in enumerate(STATE.arrays):
        before = stand_in[index]
        new = marks.reshape(-1, *(1 for _ in shape)) + mx.arange(shape[-1], dtype=mx.float32)
        stand_in[index] = mx.sin(new) if before is None else 0.5 * before + mx.sin(new)
        stand_in[index] = mx.broadcast_to(stand_in[index], (marks.shape[0], *shape))
    return mx.concatenate([stand_in[0].reshape(-1, 6), stand_in[1]], axis=1)


def remember_all(stand_in: Any, marks: mx.array) -> None:
    for position in range(marks.shape[1]):
        remember(stand_in, marks[:, position])


def paged(kind: type[PagedRows], window: int | None = None) -> Subject:
    return Subject(pages(SHAPE, window), lambda group, n: kind(SHAPE, group, n), attend, store)


def recurrent(kind: type[RecurrentRows]) -> Subject:
    spec = GroupSpec("state", (0,), None, ENDLESS, 0, STATE.bytes_per_row)
    return Subject(spec, lambda group, n: kind(STATE, group, n), remember, remember_all)


def packed(kind: type[QuantizedRows], window: int | None = None) -> Subject:
    return Subject(
        pages(PACKED, window), lambda group, n: kind(PACKED, group, n), attend_packed, store_packed
    )


def attend_delayed(stand_in: Any, marks: mx.array) -> mx.array:
    """By the sort of step, as the seam in mlxd.batching.attention does it."""
    if isinstance(stand_in, QuantizedStandIn):
        return attend_packed(stand_in, marks)
    queries, values = vectors(marks[:, None], 32, 0), vectors(marks[:, None], 32, 1)
    if isinstance(stand_in, PagedStandIn):
        return _attend_dense(stand_in, queries, *stand_in.update_and_fetch(queries, values))
    assert isinstance(stand_in, DelayedStandIn)
    stand_in.update_and_fetch(queries, values)
    return stand_in.choose(
        _attend_dense(stand_in.dense, queries, *stand_in.dense.keys_and_values()),
        attend_packed_pages(stand_in.packed, queries, 1.0, None),
    )


def _attend_dense(stand_in: PagedStandIn, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=stand_in.make_mask(1))


def delayed(window: int | None = None) -> Subject:
    dense = replace(pages(DELAYED.dense, window), until=BOUNDARY, successor="packed")
    return Subject(
        dense,
        lambda group, n: DelayedRows(DELAYED, group, n),
        attend_delayed,
        store_packed,
        replace(pages(DELAYED, window), name="packed", since=BOUNDARY),
    )
