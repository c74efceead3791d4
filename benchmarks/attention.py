"""Decode attention of one layer: variants and page sizes, against a padded batch as mlx-lm keeps it.

    python benchmarks/attention.py --rows 1,8,32 --context 256,2048 --heads 9,3,64

A step writes each row's new position and attends to all of the row's positions. Rows own distinct pages in
random order; their lengths go from half the context to all of it. Prints JSON lines: milliseconds a layer,
eager, the best of `--repeats`.
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import entry
from figures import Record, record
from options import PAGE_SIZES, Parser, add_out, number_from, numbers, page_sizes

from mlxd.batching.blas import ensure_blas

ensure_blas()  # before anything imports mlx

import mlx.core as mx  # noqa: E402

from mlxd.batching.attention import InPlace, variant  # noqa: E402
from mlxd.caches.paged import PagedStandIn  # noqa: E402
from mlxd.caches.paged_view import PagedView  # noqa: E402
from mlxd.caches.row_group import width_bucket  # noqa: E402
from mlxd.caches.sizing import GroupSpec  # noqa: E402

Step = Callable[[], list[mx.array]]
VARIANTS = ("in_place", "gathered", "kernel") if mx.cuda.is_available() else ("in_place", "gathered")


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.dim)


def paged_step(name: str, page_size: int, lengths: Sequence[int], heads: Heads, dtype: mx.Dtype) -> Step:
    """A layer's write and attention. `lengths`: of the rows, the new position included."""
    rows = len(lengths)
    spec = GroupSpec("full", (0,), None, page_size, 2 * heads.kv * heads.dim * dtype.size)
    most = -(-max(lengths) // page_size)
    pages = list(range(1, rows * most + 1))
    random.Random(0).shuffle(pages)
    width = width_bucket(most)
    table = []
    for length in lengths:
        own = [pages.pop() for _ in range(-(-length // page_size))]
        table.append(own + [own[-1]] * (width - len(own)))
    pool_shape = (rows * most + 1, heads.kv, page_size, heads.dim)
    pools = [mx.random.normal(pool_shape).astype(dtype) for _ in range(2)]
    start, positions = mx.zeros((rows,), mx.int32), mx.array([length - 1 for length in lengths])
    tables = mx.array(table, mx.int32)
    queries, new = _inputs(rows, heads, dtype)
    attention = variant(name)

    def step() -> list[mx.array]:
        view = PagedView(spec, tables, start, positions, attention)
        stand_in = PagedStandIn(pools[0], pools[1], view)
        # The pools' only holders are then the stand-in and the graph, so the write is in place.
        pools.clear()
        keys, values = stand_in.update_and_fetch(new, new)
        if isinstance(attention, InPlace):
            out = attention.attend(queries, keys, values, stand_in, heads.scale, None)
        else:
            mask = attention.mask(view)
            out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=heads.scale, mask=mask)
        pools.extend(stand_in.outputs)
        return [out, *pools]

    return step


def padded_step(rows: int, context: int, heads: Heads, dtype: mx.Dtype) -> Step:
    """One buffer for all rows, padded on the left, and an array mask."""
    shape = (rows, heads.kv, context, heads.dim)
    buffers = [mx.random.normal(shape).astype(dtype) for _ in range(2)]
    padding = mx.array([context - length for length in _lengths(rows, context)])
    mask = (mx.arange(context) >= padding[:, None])[:, None, None, :]
    queries, new = _inputs(rows, heads, dtype)
    mx.eval(mask)

    def step() -> list[mx.array]:
        for buffer in buffers:
            buffer[:, :, -1:] = new
        out = mx.fast.scaled_dot_product_attention(queries, *buffers, scale=heads.scale, mask=mask)
        return [out, *buffers]

    return step


def _lengths(rows: int, context: int) -> list[int]:
    return [context - (context // 2) * i // max(1, rows - 1) for i in range(rows)]


def _inputs(rows: int, heads: Heads, dtype: mx.Dtype) -> list[mx.array]:
    """Queries, and the new position's keys (values are the same)."""
    shapes = (rows, heads.query, 1, heads.dim), (rows, heads.kv, 1, heads.dim)
    return [mx.random.normal(shape).astype(dtype) for shape in shapes]


def best_ms(step: Step, repeats: int) -> float:
    mx.eval(step())
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        mx.eval(step())
        times.append(time.perf_counter() - begun)
    return round(min(times) * 1e3, 4)


def measure(
    rows: int, context: int, heads: Heads, page_sizes: Sequence[int], repeats: int, record: Record
) -> None:
    dtype = mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16
    case = {"rows": rows, "context": context, "heads": f"{heads.query}/{heads.kv}x{heads.dim}"}
    padded = best_ms(padded_step(rows, context, heads, dtype), repeats)
    record(case | {"variant": "padded", "ms": padded})
    for page_size in page_sizes:
        for name in VARIANTS:
            ms = best_ms(paged_step(name, page_size, _lengths(rows, context), heads, dtype), repeats)
            record(case | {"variant": name, "page_size": page_size, "ms": ms})


def _check_heads(options: argparse.Namespace) -> str | None:
    match options.heads:
        case [query, kv, _] if query % kv == 0:
            return None
    return "--heads takes query heads, a multiple of KV heads, those, and their width, as 9,3,64"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32])
    parser.add_argument("--context", type=numbers, default=[256, 2048])
    parser.add_argument("--heads", type=numbers, default=[9, 3, 64], help="query heads, KV heads, head dim")
    parser.add_argument("--page-sizes", type=page_sizes, default=list(PAGE_SIZES))
    parser.add_argument("--repeats", type=number_from(1), default=10)
    add_out(parser, "attention")
    parser.checks.append(_check_heads)
    options = parser.options()
    keep = partial(record, out=options.out)
    for context in options.context:
        for rows in options.rows:
            measure(rows, context, Heads(*options.heads), options.page_sizes, options.repeats, keep)


if __name__ == "__main__":
    entry.run(main)
