"""Keys and values lent for queries that are not their layer's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlxd.caches.contract import KvDonorAttention, KvDonorRows
from mlxd.caches.page_table import PageTable


class Donor(KvDonorAttention, Protocol):
    """A donor that can also be read."""

    def rows(self) -> KvDonorRows:
        """All rows, dense."""
        ...


def live_columns(donor: KvDonorAttention, width: int) -> mx.array:
    """Mask, bool [num_rows, 1, 1, width]: row i may read starts[i] <= j < ends[i]."""
    column = mx.arange(width)
    live = (column >= mx.array(donor.starts)[:, None]) & (column < mx.array(donor.ends)[:, None])
    return live[:, None, None, :]


def padded_pages(tables: Sequence[PageTable]) -> mx.array:
    """int32 [num_rows, T]; shorter rows repeat their last page, since masked numbers must be finite too."""
    assert all(table.pages for table in tables), "a row that left has nothing to lend"
    width = max((len(table.pages) for table in tables), default=0)
    pages = [table.pages + table.pages[-1:] * (width - len(table.pages)) for table in tables]
    return mx.array(pages, dtype=mx.int32).reshape(len(tables), width)


def pages_in_order(pool: mx.array, table: mx.array) -> mx.array:
    """[B, n_kv_heads, T * page_size, head_dim], a copy of the rows' pages."""
    rows, width = table.shape
    _, heads, size, head_dim = pool.shape
    return pool[table].transpose(0, 2, 1, 3, 4).reshape(rows, heads, width * size, head_dim)


@dataclass(frozen=True, slots=True)
class DenseDonor:
    """Dense keys and values.

    Attributes:
        keys, values: [num_rows, n_kv_heads, width, dim], oldest first.
    """

    keys: mx.array
    values: mx.array
    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        mask = live_columns(self, self.keys.shape[2])
        return mx.fast.scaled_dot_product_attention(queries, self.keys, self.values, scale=scale, mask=mask)

    def rows(self) -> KvDonorRows:
        return KvDonorRows(self.keys, self.values, self.offsets, self.starts, self.ends)


class MixedDonor:
    """Rows of several storages; each row attends with its own."""

    def __init__(self, parts: Sequence[Donor], places: Sequence[Sequence[int]]) -> None:
        """
        Args:
            places: per part, which rows of the whole its rows are; together each row once.
        """
        self._parts = tuple(parts)
        self._places = [mx.array(list(rows), dtype=mx.int32) for rows in places]
        flat = [row for rows in places for row in rows]
        order = sorted(range(len(flat)), key=lambda at: flat[at])
        self._order = mx.array(order, dtype=mx.int32)
        self.offsets = _in_order([part.offsets for part in parts], order)
        self.starts = _in_order([part.starts for part in parts], order)
        self.ends = _in_order([part.ends for part in parts], order)

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        pairs = zip(self._parts, self._places, strict=True)
        outputs = [part.attend(queries[rows], scale) for part, rows in pairs]
        return mx.concatenate(outputs)[self._order]

    def rows(self) -> KvDonorRows:
        parts = [part.rows() for part in self._parts]
        keys = self._stacked([part.keys for part in parts])
        values = self._stacked([part.values for part in parts])
        return KvDonorRows(keys, values, self.offsets, self.starts, self.ends)

    def _stacked(self, parts: Sequence[mx.array]) -> mx.array:
        """[num_rows, heads, width, dim], narrower parts filled up with zeros at their ends."""
        width = max(part.shape[2] for part in parts)
        filled = [mx.pad(part, [(0, 0), (0, 0), (0, width - part.shape[2]), (0, 0)]) for part in parts]
        return mx.concatenate(filled)[self._order]


def _in_order(parts: Sequence[tuple[int, ...]], order: Sequence[int]) -> tuple[int, ...]:
    flat = [number for part in parts for number in part]
    return tuple(flat[at] for at in order)
