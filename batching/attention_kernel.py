"""Decode attention over pages by a CUDA kernel of our own: no mask, no copy, long rows divided."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlxd.caches.paged_view import PagedView

Launch = Callable[..., list[mx.array]]
_Extent = tuple[int, int, int]

_FILES = ("warp_products.cu", "attention_kernel.cu")
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_WIDTH_STEP = 32
_WIDEST = 256
_TILE = 16
"""Columns that a warp takes at once, `kTile` of the source; pages are whole tiles."""
_HEADS_OF_BLOCK = 8
_WARPS = 8
_THREADS = 32 * _WARPS
_ENOUGH_BLOCKS = 256
"""Rows are divided until there are about so many blocks, which fill the largest GPU."""
_LONGEST_PART = 4096
_SHORTEST_PART = 512
"""Columns: a part is longer only where the table is too narrow to have one, shorter only as a row's last."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """What a kernel is compiled for.

    Attributes:
        group: query heads that share a KV head.
        window: positions that a position attends to, itself included; None for all.
        scale: factor of scores.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.
        sinks: dtype of the sinks, None without.
    """

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    page_size: int
    window: int | None
    scale: float
    soft_cap: float | None = None
    sinks: mx.Dtype | None = None

    @property
    def blocks_of_row(self) -> int:
        return self.kv_heads * -(-self.group // _HEADS_OF_BLOCK)


def is_supported(key_dim: int, value_dim: int, dtype: mx.Dtype, page_size: int) -> bool:
    """Whether the kernel serves heads this wide in such pages."""
    widths_fit = all(0 < dim <= _WIDEST and dim % _WIDTH_STEP == 0 for dim in (key_dim, value_dim))
    return widths_fit and dtype in _DTYPES and page_size % _TILE == 0


def num_parts(blocks: int, columns: int) -> int:
    """Parts into which each row of so many columns is divided, where undivided rows make so many blocks."""
    wanted = max(-(-_ENOUGH_BLOCKS // blocks), -(-columns // _LONGEST_PART))
    return max(1, min(wanted, columns // _SHORTEST_PART))


def attend_by_kernel(
    case: KernelCase,
    queries: mx.array,
    new: tuple[mx.array, mx.array],
    keys: mx.array,
    values: mx.array,
    view: PagedView,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of one position a row, which is written first.

    Args:
        queries: [B, n_heads, 1, key_dim], rotated.
        new: the position's keys and values, [B, n_kv_heads, 1, dim].
        keys, values: the pools, [num_pages, n_kv_heads, page_size, dim]. Changed in place, unseen by MLX: who
            reads them must come after the result, or in a later evaluation.
        sinks: [n_heads] extra logits that take weight and give no value, or None.
    Returns:
        [B, n_heads, 1, value_dim] in the queries' dtype.
    """
    rows, heads = queries.shape[:2]
    columns = view.width * case.page_size
    if case.window is not None:
        columns = min(columns, case.window)
    parts = num_parts(rows * case.blocks_of_row, columns)
    grid = (parts * _THREADS, case.blocks_of_row, rows), (_THREADS, 1, 1)
    given = (x.astype(case.dtype) for x in (queries, *new))
    inputs = [*given, keys, values, view.table, view.column]
    shape = (rows, heads, 1, case.value_dim)
    if parts == 1:
        (out,) = _launch("whole", case, inputs, sinks, grid, [shape])
    else:
        partial = _launch(
            "part", case, inputs, None, grid, [(rows, heads, parts, case.value_dim), (rows, heads, parts, 2)]
        )
        grid = (heads * case.value_dim, rows, 1), (case.value_dim, 1, 1)
        (out,) = _launch("join", case, partial, sinks, grid, [shape])
    return out.astype(queries.dtype)


def _launch(
    role: str,
    case: KernelCase,
    inputs: list[mx.array],
    sinks: mx.array | None,
    grid: tuple[_Extent, _Extent],
    output_shapes: Sequence[tuple[int, ...]],
) -> list[mx.array]:
    """`grid`: threads in all, and of a block."""
    return kernel(role, with_sinks=sinks is not None)(
        inputs=inputs if sinks is None else [*inputs, sinks],
        template=_template(case),
        grid=grid[0],
        threadgroup=grid[1],
        output_shapes=output_shapes,
        output_dtypes=[mx.float32 if role == "part" else case.dtype] * len(output_shapes),
    )


def _template(case: KernelCase) -> list[tuple[str, Any]]:
    """Constants of the source; MLX takes integers and dtypes, so floats go as their bits."""
    return [
        ("T", case.dtype),
        ("SINK", case.sinks or case.dtype),
        ("GROUP", case.group),
        ("KEY_DIM", case.key_dim),
        ("VALUE_DIM", case.value_dim),
        ("PAGE", case.page_size),
        ("WARPS", _WARPS),
        ("WINDOW", case.window or 0),
        ("SHORTEST", _SHORTEST_PART // _TILE),
        ("SCALE", _bits(case.scale)),
        ("CAP", _bits(case.soft_cap or 0.0)),
    ]


def _bits(number: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


_ATTEND = """
  mlxd::attend<T, GROUP, KEY_DIM, VALUE_DIM, PAGE, WARPS>(
      queries, new_keys, new_values, const_cast<T*>(keys), const_cast<T*>(values), table, table_shape[1],
      last, WINDOW, SHORTEST, __int_as_float(SCALE), __int_as_float(CAP), {result});
"""
_JOIN = "  mlxd::join<VALUE_DIM>(sums, stats, sums_shape[2], {result});\n"
_WHOLE = "mlxd::Whole<T, SINK, {with_sinks}>{{out, {sinks}}}"
_READ = ("queries", "new_keys", "new_values", "keys", "values", "table", "last")
_WRITTEN = ("sums", "stats")


@cache
def source() -> str:
    """All functions of the kernels, in CUDA C++."""
    return "".join(Path(__file__).with_name(name).read_text() for name in _FILES)


@cache
def kernel(role: str, *, with_sinks: bool = False) -> Launch:
    """One of the kernels: "whole" rows, a "part" of each, or the "join" of those.

    MLX keeps what it compiled by name alone, also on disk, so the name holds a digest of the source.
    """
    sinks = ("sinks",) if with_sinks else ()
    whole = _WHOLE.format(with_sinks=str(with_sinks).lower(), sinks="sinks" if with_sinks else "nullptr")
    names: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
        "whole": ((*_READ, *sinks), ("out",), _ATTEND.format(result=whole)),
        "part": (_READ, _WRITTEN, _ATTEND.format(result="mlxd::Part{sums, stats}")),
        "join": ((*_WRITTEN, *sinks), ("out",), _JOIN.format(result=whole)),
    }
    inputs, outputs, body = names[role]
    digest = hashlib.blake2b((source() + body).encode(), digest_size=8).hexdigest()
    name = f"mlxd_{role}_{digest}"
    made = mx.fast.cuda_kernel(
        name=name, input_names=inputs, output_names=outputs, header=source(), source=body
    )
    return cast(Launch, made)
