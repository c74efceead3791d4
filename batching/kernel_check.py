"""The kernel against built-in operations, in the shapes in which a model asked for it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlxd.batching.attention import InPlace, Kernel
from mlxd.batching.attention_kernel import KernelCase
from mlxd.caches.paged_view import PagedView
from mlxd.caches.sizing import GroupSpec

LIMITS = {mx.bfloat16: 2e-2, mx.float16: 5e-3, mx.float32: 5e-3}
"""Largest relative error of a row that is taken for rounding; built-in products round float32 to TF32."""
_NARROW, _WIDE = 128, 2048
"""Columns of tables whose rows are read whole, and divided."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Rows over random pages in random order, all of their live cells filled.

    Attributes:
        keys, values: [num_pages, kv_heads, page_size, dim], zeros where no row looks.
        live: bool [num_pages, 1, page_size, 1].
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    live: mx.array
    view: PagedView
    sinks: mx.array | None

    def poisoned(self) -> tuple[mx.array, mx.array]:
        """Keys and values, NaN where no row looks."""
        return tuple(
            mx.where(self.live, pool, math.nan).astype(pool.dtype) for pool in (self.keys, self.values)
        )


def random_pages(case: KernelCase, lengths: list[int], width: int) -> Pages:
    """A row of each length in a table of `width` pages, drawn from MLX's random state."""
    rows, size = len(lengths), case.page_size
    table = 1 + mx.random.permutation(rows * width).reshape(rows, width).astype(mx.int32)
    spec = GroupSpec("check", (0,), case.window, size, 0)
    positions = mx.array([length - 1 for length in lengths], mx.int32)
    view = PagedView(spec, table, mx.zeros((rows,), mx.int32), positions, Kernel())
    live = mx.zeros((rows * width + 1, size), mx.bool_)
    live[table] = view.valid.reshape(rows, width, size)
    live = live[:, None, :, None]

    def pool(dim: int) -> mx.array:
        numbers = mx.random.normal((rows * width + 1, case.kv_heads, size, dim))
        return mx.where(live, numbers, 0.0).astype(case.dtype)

    heads = case.kv_heads * case.group
    return Pages(
        queries=mx.random.normal((rows, heads, 1, case.key_dim)).astype(case.dtype),
        keys=pool(case.key_dim),
        values=pool(case.value_dim),
        live=live,
        view=view,
        sinks=None if case.sinks is None else mx.random.normal((heads,)).astype(case.sinks),
    )


def relative_errors(out: mx.array, expected: mx.array) -> list[float]:
    """Norm of the difference over the norm of what is expected, a row; NaN where `out` has one."""
    out, expected = (x.astype(mx.float32).reshape(out.shape[0], -1) for x in (out, expected))
    errors = mx.linalg.norm(out - expected, axis=1) / mx.linalg.norm(expected, axis=1)
    return cast(list[float], errors.tolist())


def fault_in(cases: Iterable[KernelCase]) -> str | None:
    """What the kernel does wrong, or None."""
    for case in cases:
        for columns in (_NARROW, _WIDE):
            width = max(2, columns // case.page_size)
            lengths = [1, case.page_size + 1, width * case.page_size - 5]
            fault = _fault(case, random_pages(case, lengths, width))
            if fault is not None:
                return f"{fault} in {case}"
    return None


def _fault(case: KernelCase, pages: Pages) -> str | None:
    expected = InPlace().attend(
        pages.queries.astype(mx.float32),
        pages.keys.astype(mx.float32),
        pages.values.astype(mx.float32),
        pages.view,
        case.scale,
        pages.sinks,
    )
    try:
        out = Kernel().attend(pages.queries, *pages.poisoned(), pages.view, case.scale, pages.sinks)
        errors = relative_errors(out, expected)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    worst = max(range(len(errors)), key=lambda row: math.inf if math.isnan(errors[row]) else errors[row])
    if errors[worst] <= LIMITS[case.dtype]:
        return None
    return f"row {worst} of {len(errors)} is off by {errors[worst]:.2g} of its norm"
