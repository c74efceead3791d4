"""Decode attention over pages by a CUDA kernel of our own: no mask, no copy, long rows divided."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlxd.batching.cuda_kernel import Launch, bits_of, make_kernel
from mlxd.batching.rotation import Rotary
from mlxd.caches.paged_view import PagedView
from mlxd.caches.quantization import Quantization

_Extent = tuple[int, int, int]

_FILES = (
    "warp_products.cu",
    "weighted_sums.cu",
    "rotary_heads.cu",
    "page_cells.cu",
    "attention_kernel.cu",
)
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_WIDTH_STEP = 32
_PACKED_WIDTH_STEP = 64
_WIDEST = 256
_TILE = 16
"""Columns that a warp takes at once, `kTile` of the source; pages are whole tiles."""
_HEADS_OF_BLOCK = 8
_LANES = 32
_ENOUGH_WARPS = 2048
"""Rows are divided until there are about so many, which fill the largest GPU."""
_LONGEST_PART = 4096
_SHORTEST_PART = 512
"""Columns: a part is longer only where the table is too narrow to have one, shorter only as a row's last."""


class Division(NamedTuple):
    """`parts` of each row, and `warps` of a block, which takes a part of one row's KV head."""

    parts: int
    warps: int


@dataclass(frozen=True, slots=True)
class KernelCase:
    """What a kernel is compiled for.

    Attributes:
        group: query heads that share a KV head.
        window: positions that a position attends to, itself included; None for all.
        scale: factor of scores.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.
        sinks: dtype of the sinks, None without.
        quantization: how keys and values are packed; `dtype` is then that of scales and biases.
        rotary: how queries and dense keys are rotated first; None where they come rotated.
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
    quantization: Quantization | None = None
    rotary: Rotary | None = None

    @property
    def blocks_of_row(self) -> int:
        return self.kv_heads * -(-self.group // _HEADS_OF_BLOCK)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Warps that a block may have, the most first.

        Fewer leave less to join, where there are many blocks; wide and packed heads keep a warp longer.
        """
        if self.quantization is not None:
            return (4,)
        widest = max(self.key_dim, self.value_dim)
        return (8, 4, 2) if widest <= 64 else (8, 4) if widest <= 128 else (8,)

    def divide(self, rows: int, columns: int) -> Division:
        """How so many rows of at most `columns` are spread over the GPU."""
        if self.window is not None:
            columns = min(columns, self.window)
        blocks = rows * self.blocks_of_row
        fitting = (warps for warps in self.block_sizes if warps * blocks <= _ENOUGH_WARPS)
        warps = next(fitting, self.block_sizes[-1])
        wanted = max(_ENOUGH_WARPS // (warps * blocks), -(-columns // _LONGEST_PART))
        return Division(max(1, min(wanted, columns // _SHORTEST_PART)), warps)


def is_supported(
    key_dim: int,
    value_dim: int,
    dtype: mx.Dtype,
    page_size: int,
    quantization: Quantization | None = None,
) -> bool:
    """Whether the kernel serves heads this wide in such pages."""
    step, dtypes = (_WIDTH_STEP, _DTYPES) if quantization is None else (_PACKED_WIDTH_STEP, _DTYPES[:2])
    widths_fit = all(0 < dim <= _WIDEST and dim % step == 0 for dim in (key_dim, value_dim))
    return widths_fit and dtype in dtypes and page_size % _TILE == 0


def attend_by_kernel(
    case: KernelCase,
    queries: mx.array,
    new: Sequence[mx.array],
    pools: Sequence[mx.array],
    view: PagedView,
    sinks: mx.array | None,
    turns: mx.array | None = None,
    division: Division | None = None,
) -> mx.array:
    """Attention of one position a row, which is written, too.

    Args:
        queries: [B, n_heads, 1, key_dim].
        new: the position's keys and values, [B, n_kv_heads, 1, dim], or their planes.
        pools: keys and values, [num_pages, n_kv_heads, page_size, dim], or their planes (`QuantizedRows`).
            Changed in place, unseen by MLX: who reads them must come after the result, or in a later
            evaluation.
        sinks: [n_heads] extra logits that take weight and give no value, or None.
        turns: float32 [B, dims], `Turns.table`, where `case` says that queries and dense keys are rotated.
        division: `case.divide` where it is None.
    Returns:
        [B, n_heads, 1, value_dim] in the queries' dtype.
    """
    rows, heads = queries.shape[:2]
    parts, warps = division or case.divide(rows, view.width * case.page_size)
    threads = _LANES * warps
    grid = (parts * threads, case.blocks_of_row, rows), (threads, 1, 1)
    given = (x.astype(pool.dtype) for x, pool in zip(new, pools, strict=True))
    inputs = [queries.astype(case.dtype), *given, *pools, view.table, view.column]
    if turns is not None:
        inputs.append(turns)
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
    launch = kernel(
        role,
        with_sinks=sinks is not None,
        packed=case.quantization is not None,
        rotates=case.rotary is not None and role != "join",
    )
    return launch(
        inputs=inputs if sinks is None else [*inputs, sinks],
        template=[*_template(case), ("WARPS", grid[1][0] // _LANES)],
        grid=grid[0],
        threadgroup=grid[1],
        output_shapes=output_shapes,
        output_dtypes=[mx.float32 if role == "part" else case.dtype] * len(output_shapes),
    )


def _template(case: KernelCase) -> list[tuple[str, Any]]:
    """Constants of the source."""
    return [
        ("T", case.dtype),
        ("SINK", case.sinks or case.dtype),
        ("GROUP", case.group),
        ("KEY_DIM", case.key_dim),
        ("VALUE_DIM", case.value_dim),
        ("PAGE", case.page_size),
        ("WINDOW", case.window or 0),
        ("SHORTEST", _SHORTEST_PART // _TILE),
        ("SCALE", bits_of(case.scale)),
        ("CAP", bits_of(case.soft_cap or 0.0)),
        ("BITS", case.quantization.bits if case.quantization else 0),
        ("SHARING", case.quantization.group_size if case.quantization else 0),
        ("ROTATED", case.rotary.dims if case.rotary else 0),
        ("NEIGHBOURS", int(case.rotary is not None and case.rotary.neighbours)),
    ]


_ATTEND = """
  mlxd::attend<T, GROUP, KEY_DIM, VALUE_DIM, PAGE, WARPS>(
      {queries}, {key}, {value}, {keys}, {values}, table, table_shape[1], last, WINDOW, SHORTEST,
      __int_as_float(SCALE), __int_as_float(CAP), {result});
"""
_JOIN = "  mlxd::join<VALUE_DIM>(sums, stats, sums_shape[2], {result});\n"
_WHOLE = "mlxd::Whole<T, SINK, {with_sinks}>{{out, {sinks}}}"
_HEADS = (
    "mlxd::Heads<T, {rotation}>{{{name}, {name}_strides[0], {name}_strides[1], {name}_strides[3], "
    "{rotation}{{{rotated_by}}}}}"
)
_UNROTATED = {"rotation": "mlxd::Unrotated", "rotated_by": ""}
_ROTARY = {"rotation": "mlxd::Rotary<ROTATED, NEIGHBOURS>", "rotated_by": "turns"}
_CELLS = ("key", "value", "keys", "values")
_DENSE = "mlxd::Dense<T, {dim}>{{const_cast<T*>({name})}}"
_PACKED = (
    "mlxd::Packed<T, {dim}, BITS, SHARING>{{const_cast<uint32_t*>({name}_codes), "
    "const_cast<T*>({name}_scales), const_cast<T*>({name}_biases)}}"
)
_WRITTEN = ("sums", "stats")


@cache
def source() -> str:
    """All functions of the kernels, in CUDA C++."""
    return "".join(Path(__file__).with_name(name).read_text() for name in _FILES)


@cache
def kernel(role: str, *, with_sinks: bool = False, packed: bool = False, rotates: bool = False) -> Launch:
    """One of the kernels: "whole" rows, a "part" of each, or the "join" of those."""
    sinks = ("sinks",) if with_sinks else ()
    whole = _WHOLE.format(with_sinks=str(with_sinks).lower(), sinks="sinks" if with_sinks else "nullptr")
    read = _read(packed, rotates)
    names: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
        "whole": ((*read, *sinks), ("out",), _attend(packed, rotates, whole)),
        "part": (read, _WRITTEN, _attend(packed, rotates, "mlxd::Part{sums, stats}")),
        "join": ((*_WRITTEN, *sinks), ("out",), _JOIN.format(result=whole)),
    }
    inputs, outputs, body = names[role]
    return make_kernel(role, inputs, outputs, source(), body)


def _read(packed: bool, rotates: bool) -> tuple[str, ...]:
    parts = ("_codes", "_scales", "_biases") if packed else ("",)
    cells = (name + part for name in _CELLS for part in parts)
    return ("queries", *cells, "table", "last", *(("turns",) if rotates else ()))


def _attend(packed: bool, rotates: bool, result: str) -> str:
    turned = _ROTARY if rotates else _UNROTATED
    dims = {name: "KEY_DIM" if name.startswith("key") else "VALUE_DIM" for name in _CELLS}
    cells = _PACKED if packed else _DENSE
    arguments = {name: cells.format(dim=dim, name=name) for name, dim in dims.items()}
    if not packed:
        arguments |= {"key": _HEADS.format(name="key", **turned)}
        arguments |= {"value": _HEADS.format(name="value", **_UNROTATED)}
    return _ATTEND.format(queries=_HEADS.format(name="queries", **turned), **arguments, result=result)
