"""The kernel that writes chunks against built-in operations, in the shapes in which a model asked for it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlxd.batching.chunk_kernel import ChunkCase, KernelWriter
from mlxd.caches.model_faults import summary_of
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable
from mlxd.caches.paged_view import PrefillView
from mlxd.caches.sizing import GroupSpec


@dataclass(frozen=True, slots=True)
class RandomChunk:
    """One layer's keys and values of rows that begin together, and pools of NaN.

    Attributes:
        new: keys and values, [n, kv_heads, L, dim], transposed views as a model has them.
        pools: keys and values, [num_pages, kv_heads, page_size, dim].
    """

    view: PrefillView
    new: tuple[mx.array, mx.array]
    pools: tuple[mx.array, mx.array]

    def run(self) -> None:
        """By the kernel, into `pools`."""
        mx.eval(KernelWriter().write(self.view, self.pools, self.new))

    def expected(self) -> list[mx.array]:
        """Other pools, which hold the chunk."""
        written = [self.view.write(pool + 0, x) for pool, x in zip(self.pools, self.new, strict=True)]
        mx.eval(written)
        return written

    def is_written(self, expected: Sequence[mx.array]) -> bool:
        """Whether the pools hold what they should, but for the scratch page, where rows meet."""
        return all(
            bool(mx.array_equal(pool[1:], right[1:], equal_nan=True))
            for pool, right in zip(self.pools, expected, strict=True)
        )


def random_chunk(
    case: ChunkCase, kv_heads: int, start: int, lengths: Sequence[int], padding: tuple[int, int] = (0, 0)
) -> RandomChunk:
    """Rows of so many tokens after position `start`, in pages in random order; MLX's random state.

    Args:
        start: whole pages.
        padding: rows, and tokens of each row, that are computed beside those.
    """
    size = case.page_size
    ends = [start + length for length in lengths]
    num_pages = sum(-(-end // size) for end in ends)
    num_rows, length = len(lengths) + padding[0], max(lengths) + padding[1]
    spec = GroupSpec("check", (0,), None, size, 0)
    pool = PagePool(num_pages)
    tables = [PageTable(spec, pool) for _ in lengths]
    for table, end in zip(tables, ends, strict=True):
        table.grow(end)
    order = cast(list[int], (1 + mx.random.permutation(num_pages)).tolist())
    for table in tables:
        table.pages = [order[page - 1] for page in table.pages]

    def numbers(dim: int) -> mx.array:
        return mx.random.normal((num_rows, length, kv_heads, dim)).astype(case.dtype).swapaxes(1, 2)

    def poisoned(dim: int) -> mx.array:
        return mx.full((num_pages + 1, kv_heads, size, dim), math.nan, case.dtype)

    chunk = RandomChunk(
        view=PrefillView(spec, tables, start, ends, length, num_rows=num_rows),
        new=(numbers(case.key_dim), numbers(case.value_dim)),
        pools=(poisoned(case.key_dim), poisoned(case.value_dim)),
    )
    mx.eval(chunk.new, chunk.pools)
    return chunk


def fault_in(cases: Iterable[ChunkCase]) -> str | None:
    """What the kernel does wrong, or None."""
    for case in cases:
        size = case.page_size
        for start, lengths, padding in (
            (0, [2 * size - 3, size + 1, 1], (1, 2)),
            (2 * size, [size + size // 2], (0, 2 * size)),
        ):
            chunk = random_chunk(case, 3, start, lengths, padding)
            expected = chunk.expected()
            try:
                chunk.run()
            except (RuntimeError, ValueError) as error:
                return f"{summary_of(error)} in {case}"
            if not chunk.is_written(expected):
                return f"a prompt's keys or values are not where they belong in {case}"
    return None
