"""The kernels in numpy, for machines without CUDA: same inputs, same outputs, same writes."""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxd.batching import attention_kernel, chunk_kernel
from mlxd.batching.cuda_kernel import Launch

Array = npt.NDArray[Any]
_NOTHING = -1e30
_TILE = 16


def use_numpy_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention_kernel, "kernel", numpy_kernel)
    patch.setattr(chunk_kernel, "kernel", numpy_writer)


def numpy_writer() -> Launch:
    """Stands in for `chunk_kernel.kernel`."""

    def launch(*, inputs: list[mx.array], grid: tuple[int, int, int], **arguments: Any) -> list[mx.array]:
        mx.eval(inputs)
        key, value, *pools, pages = (np.array(array, copy=False) for array in inputs)
        for pool, new in zip(pools, (key, value), strict=True):
            size = pool.shape[2]
            for place, page in enumerate(pages):
                row, part = divmod(place, grid[1])
                columns = new[row, :, part * size : (part + 1) * size]
                pool[page] = 0
                pool[page, :, : columns.shape[1]] = columns
        return [mx.zeros((1,))]

    return launch


def numpy_kernel(
    role: str, *, with_sinks: bool = False, packed: bool = False, rotates: bool = False
) -> Launch:
    """Stands in for `attention_kernel.kernel`; not for bfloat16, which numpy lacks."""
    body: Callable[..., list[Array]] = {"whole": _whole, "part": _part, "join": _join}[role]

    def launch(
        *,
        inputs: list[mx.array],
        template: list[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        mx.eval(inputs)
        # Views, not copies: what is written to them is in the arrays.
        views = [np.array(array, copy=False) for array in inputs]
        sinks = views.pop() if with_sinks else None
        if rotates:
            turns = views.pop()
            for i in range(1 if packed else 2):
                views[i] = _rotated(views[i], turns, dict(template))
        outputs = body(*views, sinks=sinks, parts=grid[0] // threadgroup[0], constants=dict(template))
        return [
            mx.array(out.reshape(shape)).astype(dtype)
            for out, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    return launch


def _rotated(heads: Array, turns: Array, constants: dict[str, Any]) -> Array:
    """Queries or new keys, [B, heads, 1, dim]."""
    dims = constants["ROTATED"]
    pairs = (
        (slice(0, dims, 2), slice(1, dims, 2))
        if constants["NEIGHBOURS"]
        else (slice(dims // 2), slice(dims // 2, dims))
    )
    cosines, sines = (turns[:, None, None, pair] for pair in pairs)
    x, y = (heads[..., pair].astype(np.float32) for pair in pairs)
    turned = heads.copy()
    turned[..., pairs[0]] = x * cosines - y * sines
    turned[..., pairs[1]] = x * sines + y * cosines
    return turned


def _part(
    queries: Array, *cells: Array, sinks: Array | None, parts: int, constants: dict[str, Any]
) -> list[Array]:
    """Sums of weighted values [B, heads, parts, dim], and base-2 top and total [B, heads, parts, 2].

    `cells`: new keys, new values, keys and values, each one array, or codes, scales and biases; then the page
    table and the last columns.
    """
    *planes, table, last = cells
    new, pools = planes[: len(planes) // 2], planes[len(planes) // 2 :]
    for pool, array in zip(pools, new, strict=True):
        for row, column in enumerate(last):
            page = table[row, column // constants["PAGE"]]
            pool[page, :, column % constants["PAGE"]] = array[row, :, 0]
    half = len(pools) // 2
    keys, values = (_numbers(group, constants) for group in (pools[:half], pools[half:]))
    batch, heads, dim = queries.shape[0], queries.shape[1], values.shape[-1]
    sums = np.full((batch, heads, parts, dim), np.nan, np.float32)
    stats = np.full((batch, heads, parts, 2), np.nan, np.float32)
    scale, cap = (struct.unpack("<f", struct.pack("<i", constants[name]))[0] for name in ("SCALE", "CAP"))
    size, group = constants["PAGE"], constants["GROUP"]
    for row in range(batch):
        for part, columns in enumerate(_parts(int(last[row]), parts, constants)):
            pages = table[row, columns // size], slice(None), columns % size
            k, v = (np.repeat(pool[pages], group, axis=1) for pool in (keys, values))
            scores = np.einsum("hd,chd->hc", queries[row, :, 0].astype(np.float32), k) * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            scores = scores * np.float32(np.log2(np.e))
            top = scores.max(axis=1, initial=_NOTHING)
            weights = np.exp2(scores - top[:, None])
            sums[row, :, part] = np.einsum("hc,chd->hd", weights, v)
            stats[row, :, part] = np.stack([top, weights.sum(axis=1)], axis=1)
    return [sums, stats]


def _numbers(planes: Sequence[Array], constants: dict[str, Any]) -> Array:
    """float32, of numbers as they are or of codes, scales and biases."""
    if len(planes) == 1:
        return planes[0].astype(np.float32)
    codes, scales, biases = planes
    bits, sharing = constants["BITS"], constants["SHARING"]
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (codes[..., None] >> shifts & ((1 << bits) - 1)).reshape(*codes.shape[:-1], -1)
    scales, biases = (np.repeat(plane.astype(np.float32), sharing, axis=-1) for plane in (scales, biases))
    with np.errstate(invalid="ignore"):  # cells that no row looks at hold NaN
        return numbers * scales + biases


def _parts(last: int, parts: int, constants: dict[str, Any]) -> Iterator[Array]:
    """Live columns of each part: whole tiles, as many in each but the last ones, which may have none."""
    begin = max(0, last + 1 - constants["WINDOW"]) if constants["WINDOW"] else 0
    first, past = begin // _TILE, -(-(last + 1) // _TILE)
    count = max(constants["SHORTEST"], -(-(past - first) // parts))
    for part in range(parts):
        start = first + part * count
        yield np.arange(max(begin, start * _TILE), min(last + 1, min(past, start + count) * _TILE))


def _join(
    sums: Array, stats: Array, *, sinks: Array | None, parts: int, constants: dict[str, Any]
) -> list[Array]:
    top, total = stats[..., 0], stats[..., 1]
    highest = top.max(axis=2)
    if sinks is not None:
        highest = np.maximum(highest, sinks * np.log2(np.e))
    by = np.exp2(top - highest[..., None])
    divisor = (by * total).sum(axis=2)
    if sinks is not None:
        divisor += np.exp2(sinks * np.log2(np.e) - highest)
    return [(by[..., None] * sums).sum(axis=2) / divisor[..., None]]


def _whole(*views: Array, sinks: Array | None, parts: int, constants: dict[str, Any]) -> list[Array]:
    assert parts == 1
    return _join(*_part(*views, sinks=None, parts=1, constants=constants), sinks=sinks, parts=1, constants={})
