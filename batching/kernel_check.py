"""The kernel against built-in operations, in the shapes in which a model asked for it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import cast

import mlx.core as mx

from mlxd.batching.attention import InPlace
from mlxd.batching.attention_kernel import KernelCase, attend_by_kernel
from mlxd.batching.rotation import Rotary
from mlxd.caches.model_faults import summary_of
from mlxd.caches.paged import PagedStandIn
from mlxd.caches.paged_view import PagedView, write_position
from mlxd.caches.quantized import keys_and_values, planes_of
from mlxd.caches.sizing import GroupSpec

LIMITS = {mx.bfloat16: 2e-2, mx.float16: 5e-3, mx.float32: 5e-3}
"""Largest relative error of a row that is taken for rounding; built-in products round float32 to TF32."""
_NARROW, _WIDE = 128, 4096
"""Columns of tables whose rows are read whole, and divided."""


@dataclass(frozen=True, slots=True)
class RandomStep:
    """One layer's attention of rows over random pages in random order.

    Attributes:
        queries: [B, n_heads, 1, key_dim]; rotated by the kernel where `case` says how.
        new: keys and values of the new position, [B, kv_heads, 1, dim]; of keys that hold for dense pools.
        pools: keys and values, [num_pages, kv_heads, page_size, dim], or their planes where they are packed.
            NaN where no row looks, which is also where the new position goes.
        table, positions: int32 [B, T] and [B].
        sinks: [n_heads], or None.
        turns: float32 [B, dims] of random angles, where there is a rotary embedding.
    """

    case: KernelCase
    queries: mx.array
    new: tuple[mx.array, mx.array]
    pools: list[mx.array]
    table: mx.array
    positions: mx.array
    sinks: mx.array | None
    turns: mx.array | None

    @property
    def view(self) -> PagedView:
        spec = GroupSpec("check", (0,), self.case.window, self.case.page_size, 0)
        return PagedView(spec, self.table, mx.zeros_like(self.positions), self.positions, InPlace())

    @property
    def rotated_queries(self) -> mx.array:
        return self._rotated(self.queries)

    def _rotated(self, heads: mx.array) -> mx.array:
        if self.case.rotary is None or self.turns is None:
            return heads
        return self.case.rotary.turn(heads, self.case.rotary.factors(self.turns))

    def _new_planes(self) -> list[mx.array]:
        keys, values = self.new
        return _planes(self.case, self._rotated(keys), values)

    def run(self, warps: int | None = None) -> mx.array:
        """[B, n_heads, 1, value_dim], by the kernel, which writes into `pools`.

        Args:
            warps: of a block; as `case` would have it where it is None.
        """
        new = self.new if self.case.quantization is None else self._new_planes()
        division = self.case.divide(len(self.queries), self.view.width * self.case.page_size)
        if warps is not None:
            division = division._replace(warps=warps)
        return attend_by_kernel(
            self.case, self.queries, new, self.pools, self.view, self.sinks, self.turns, division
        )

    def written(self) -> list[mx.array]:
        """Other pools, which hold the new position, too."""
        rows = self.view.write_rows(self.case.kv_heads)
        pairs = zip(self.pools, self._new_planes(), strict=True)
        return [write_position(pool, new, rows) for pool, new in pairs]

    def numbers(self) -> tuple[mx.array, mx.array]:
        """Keys and values with the new position, dense and float32, 0 where no row looks."""
        written, quantization = self.written(), self.case.quantization
        if quantization is not None:
            written = [packed.dense() for packed in keys_and_values(written, quantization)]
        keys, values = (mx.nan_to_num(pool.astype(mx.float32)) for pool in written)
        return keys, values

    def expected(self) -> mx.array:
        """What built-in operations in float32 make of it."""
        keys, values = self.numbers()
        stand_in = PagedStandIn(keys, values, self.view)
        queries = self.rotated_queries.astype(mx.float32)
        return InPlace().attend(queries, keys, values, stand_in, self.case.scale, self.sinks)


def _planes(case: KernelCase, keys: mx.array, values: mx.array) -> list[mx.array]:
    return [keys, values] if case.quantization is None else planes_of(keys, values, case.quantization)


def random_step(case: KernelCase, lengths: list[int], width: int) -> RandomStep:
    """Rows of these lengths, the new position included, in a table of `width` pages; MLX's random state."""
    rows, size = len(lengths), case.page_size
    num_pages, heads = rows * width + 1, case.kv_heads * case.group
    table = 1 + mx.random.permutation(num_pages - 1).reshape(rows, width).astype(mx.int32)
    positions = mx.array([length - 1 for length in lengths], mx.int32)
    spec = GroupSpec("check", (0,), case.window, size, 0)
    valid = PagedView(spec, table, mx.zeros_like(positions), positions, InPlace()).valid
    known = valid & (mx.arange(width * size) < positions[:, None])
    live = mx.zeros((num_pages, size), mx.bool_)
    live[table] = known.reshape(rows, width, size)

    def numbers(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(case.dtype)

    def poisoned(plane: mx.array) -> mx.array:
        no_number = (
            mx.array(math.nan, plane.dtype) if plane.dtype == case.dtype else mx.array(~0, plane.dtype)
        )
        return mx.where(live[:, None, :, None], plane, no_number)

    pools = (numbers(num_pages, case.kv_heads, size, dim) for dim in (case.key_dim, case.value_dim))
    new_keys, new_values = (numbers(rows, case.kv_heads, 1, dim) for dim in (case.key_dim, case.value_dim))

    step = RandomStep(
        case=case,
        queries=numbers(rows, heads, 1, case.key_dim),
        new=(new_keys, new_values),
        pools=[poisoned(plane) for plane in _planes(case, *pools)],
        table=table,
        positions=positions,
        sinks=None if case.sinks is None else mx.random.normal((heads,)).astype(case.sinks),
        turns=None if case.rotary is None else _random_turns(case.rotary, rows),
    )
    mx.eval(step.queries, step.new, step.pools, table, positions)
    return step


def _random_turns(rotary: Rotary, rows: int) -> mx.array:
    angles = mx.random.uniform(0, 2 * math.pi, (rows, rotary.dims // 2))
    axis = -1 if rotary.neighbours else -2
    return mx.stack([mx.cos(angles), mx.sin(angles)], axis=axis).reshape(rows, rotary.dims)


def relative_errors(out: mx.array, expected: mx.array) -> list[float]:
    """Norm of the difference over the norm of what is expected, a row; NaN where `out` has one."""
    out, expected = (x.astype(mx.float32).reshape(out.shape[0], -1) for x in (out, expected))
    errors = mx.linalg.norm(out - expected, axis=1) / mx.linalg.norm(expected, axis=1)
    return cast(list[float], errors.tolist())


def fault_in(cases: Iterable[KernelCase]) -> str | None:
    """What the kernel does wrong, or None."""
    for case in cases:
        for columns, warps in product((_NARROW, _WIDE), case.block_sizes):
            width = max(2, columns // case.page_size)
            lengths = [1, case.page_size + 1, width * case.page_size - 5]
            fault = _fault(random_step(case, lengths, width), warps)
            if fault is not None:
                return f"{fault} in {case}"
    return None


def _fault(step: RandomStep, warps: int) -> str | None:
    expected, written = step.expected(), step.written()
    mx.eval(expected, written)
    try:
        errors = relative_errors(step.run(warps), expected)
    except (RuntimeError, ValueError) as error:
        return summary_of(error)
    for row, off in enumerate(errors):
        if not off <= LIMITS[step.case.dtype]:
            return f"row {row} of {len(errors)} is off by {off:.2g} of its norm"
    if not is_written(step, written):
        return "the new keys or values are not where they belong"
    return None


def is_written(step: RandomStep, expected: list[mx.array]) -> bool:
    """Whether the pools hold what they should, to the bit but for keys that the kernel rotated."""
    may_round = step.case.rotary is not None and step.case.quantization is None
    limit = LIMITS[step.case.dtype] if may_round else 0.0
    return all(
        bool(mx.allclose(pool, right, limit, limit, equal_nan=True))
        for pool, right in zip(step.pools, expected, strict=True)
    )
