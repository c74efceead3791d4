"""Page tables as arrays: where a decode step or a prefill writes and what it may read."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import mlx.core as mx

from mlxd.caches.packed import Packed
from mlxd.caches.page_pool import SCRATCH_PAGE
from mlxd.caches.page_table import PageTable
from mlxd.caches.sizing import GroupSpec

_BARRED = -1e9
"""Added to a score it leaves a weight of 0; not -inf, so that a row with nothing to read stays finite."""


class DecodeAttention(Protocol):
    """How one query position a row reads pages: one of the variants in mlxd.batching.attention."""

    def fetch(self, keys: mx.array, values: mx.array, view: "PagedView") -> tuple[mx.array, mx.array]:
        """What the model gets from `update_and_fetch`, given the pools after the write."""
        ...

    def mask(self, view: "PagedView") -> mx.array | None:
        """What the model gets from `make_mask`."""
        ...

    def writes(self, keys: mx.array | Packed, values: mx.array | Packed) -> bool:
        """Whether the new position gets into these pools by itself, when the variant attends."""
        ...


class ChunkWriter(Protocol):
    """How a prefill chunk gets into pools that stay the arrays they are: mlxd.batching.chunk_kernel."""

    def serves(self, keys: mx.array, values: mx.array) -> bool:
        """Whether it can write into these pools."""
        ...

    def write(self, view: "PrefillView", pools: Sequence[mx.array], new: Sequence[mx.array]) -> mx.array:
        """Put the chunk's keys and values where `PrefillView.write` puts them.

        Args:
            pools, new: keys and values, as there. The pools are changed in place, unseen by MLX: who reads
                what is written must do so in a later evaluation.
        Returns:
            An array whose evaluation writes.
        """
        ...


class PagedView:
    """One group inside a decode step; every derived array is built once and shared by the group's layers.

    Args:
        table: int32 [B, T], physical pages, oldest first; columns past a row's pages repeat its last one.
        start: int32 [B], position of each row's first column.
        positions: int32 [B], where each row's new position goes.
    """

    def __init__(
        self,
        spec: GroupSpec,
        table: mx.array,
        start: mx.array,
        positions: mx.array,
        attention: DecodeAttention,
    ) -> None:
        self.spec = spec
        self.table = table
        self.positions = positions
        self.attention = attention
        self._start = start
        self._column: mx.array | None = None
        self._write_rows: dict[int, mx.array] = {}
        self._page_rows: dict[int, mx.array] = {}
        self._valid: mx.array | None = None
        self._bias: mx.array | None = None

    @property
    def num_rows(self) -> int:
        return int(self.table.shape[0])

    @property
    def width(self) -> int:
        return int(self.table.shape[1])

    @property
    def column(self) -> mx.array:
        """int32 [B]: where the new position goes; the last column, of scratch, for rows served elsewhere."""
        if self._column is None:
            self._column = self.positions - self._start
            if self.spec.is_partial:
                last = self.width * self.spec.page_size - 1
                self._column = mx.where(self._serves, self._column, last)
        return self._column

    @property
    def _serves(self) -> mx.array:
        """bool [B]: rows whose position this group holds."""
        serves = self.positions >= self.spec.since
        return serves if self.spec.until is None else serves & (self.positions < self.spec.until)

    def write_rows(self, n_kv_heads: int) -> mx.array:
        """int32 [B * n_kv_heads, 1]: where the new position goes in a pool seen as rows of head_dim."""
        if n_kv_heads not in self._write_rows:
            size = self.spec.page_size
            column = self.column
            page = mx.take_along_axis(self.table, (column // size)[:, None], axis=1)
            heads = mx.arange(n_kv_heads, dtype=mx.int32)
            rows = (page * n_kv_heads + heads) * size + (column % size)[:, None]
            self._write_rows[n_kv_heads] = rows.reshape(-1, 1)
        return self._write_rows[n_kv_heads]

    def page_rows(self, n_kv_heads: int) -> mx.array:
        """int32 [B, T, n_kv_heads]: pages in a pool seen as [num_pages * n_kv_heads, page_size, head_dim].

        Heads come last, as they lie: reading on is faster than reading elsewhere.
        """
        if n_kv_heads not in self._page_rows:
            heads = mx.arange(n_kv_heads, dtype=mx.int32)
            self._page_rows[n_kv_heads] = self.table[:, :, None] * n_kv_heads + heads
        return self._page_rows[n_kv_heads]

    @property
    def valid(self) -> mx.array:
        """bool [B, T * page_size]: columns that the new position attends to, itself included."""
        if self._valid is None:
            columns = mx.arange(self.width * self.spec.page_size, dtype=mx.int32)
            position = self.column[:, None]
            self._valid = columns <= position
            if self.spec.window is not None:
                self._valid = self._valid & (columns > position - self.spec.window)
        return self._valid

    @property
    def bias(self) -> mx.array:
        """float32 [B, T, 1, 1, page_size]: 0 where `valid`, else far below any score."""
        if self._bias is None:
            shape = (self.num_rows, self.width, 1, 1, self.spec.page_size)
            self._bias = mx.where(self.valid, 0.0, _BARRED).reshape(shape)
        return self._bias


def write_position(pool: mx.array, new: mx.array, rows: mx.array) -> mx.array:
    """Put one position of each row into its page.

    Args:
        pool: [num_pages, n_kv_heads, page_size, head_dim]; donated where the caller keeps no reference.
        new: [B, n_kv_heads, 1, head_dim].
        rows: int32 [B * n_kv_heads, 1], from `PagedView.write_rows`.
    """
    num_pages, heads, size, head_dim = pool.shape
    if not head_dim:
        return pool
    flat = pool.reshape(num_pages * heads * size, head_dim)
    new = new.reshape(-1, head_dim).astype(pool.dtype)
    return mx.put_along_axis(flat, mx.broadcast_to(rows, new.shape), new, axis=0).reshape(pool.shape)


class PrefillView:
    """One group during a prefill forward: a chunk of one row, or whole short prompts padded on the right.

    Args:
        tables: one a row; they have room up to `ends`.
        start: first position computed, the same for all rows (0 where there are several), a multiple of the
            page size.
        ends: one past the last position computed, a row.
        num_tokens: tokens a row, padding included; None: as many as the longest row has.
        num_rows: rows, those included that are padding and go to the scratch page; None: one a table.
        writer: of all pools of the forward, each of which it serves; None: they are replaced by written ones.
    """

    def __init__(
        self,
        spec: GroupSpec,
        tables: Sequence[PageTable],
        start: int,
        ends: Sequence[int],
        num_tokens: int | None = None,
        *,
        num_rows: int | None = None,
        writer: ChunkWriter | None = None,
    ) -> None:
        if start % spec.page_size and not spec.state_bytes:
            raise IndexError(f"a chunk starts at {start}, not a multiple of the page size {spec.page_size}")
        for table, end in zip(tables, ends, strict=True):
            if not table.start <= start < end <= table.end:
                raise IndexError(
                    f"chunk [{start}, {end}) is outside the pages held, [{table.start}, {table.end})"
                )
        self.spec = spec
        self.start = start
        self.ends = tuple(ends)
        self.tables = tuple(tables)
        self.writer = writer
        self._num_tokens = max(ends) - start if num_tokens is None else num_tokens
        size = spec.page_size
        self.num_pages = -(-self._num_tokens // size)
        """Pages a row's part of the chunk covers, padding included."""
        written = [self._written_pages(table, end) for table, end in zip(tables, ends, strict=True)]
        idle = [SCRATCH_PAGE] * (self.num_pages * ((num_rows or len(tables)) - len(tables)))
        self.pages = mx.array([*chain.from_iterable(written), *idle], dtype=mx.int32)
        """int32 [n * num_pages], the pages written, row by row; beyond a row's end the scratch page."""
        self._history: dict[int, mx.array] = {}

    def _written_pages(self, table: PageTable, end: int) -> list[int]:
        size = self.spec.page_size
        pages = table.pages[self.start // size - table.first_page : -(-end // size) - table.first_page]
        return pages + [SCRATCH_PAGE] * (self.num_pages - len(pages))

    def write(self, pool: mx.array, new: mx.array) -> mx.array:
        """Put the chunk into its pages, a page at a time; columns past a row's end become zeros or padding.

        Args:
            pool: [num_pages, n_kv_heads, page_size, head_dim]; donated where the caller keeps no reference.
            new: [n, n_kv_heads, L, head_dim].
        """
        size = self.spec.page_size
        n, heads, length, head_dim = new.shape
        pad = self.num_pages * size - length
        if pad:
            new = mx.pad(new, [(0, 0), (0, 0), (0, pad), (0, 0)])
        new = new.reshape(n, heads, self.num_pages, size, head_dim).transpose(0, 2, 1, 3, 4)
        pool[self.pages] = new.reshape(n * self.num_pages, heads, size, head_dim).astype(pool.dtype)
        return pool

    @property
    def first_column(self) -> int:
        """Position of the first column that `read` returns."""
        return self.tables[0].start if self.start else 0

    def read(self, pool: mx.array, new: mx.array) -> mx.array:
        """What the chunk attends to: the positions before it in the row's pages, where there are any, and it.

        Args:
            pool, new: as for `write`, before or after it.
        Returns:
            [n, n_kv_heads, S, head_dim], positions [first_column, start + num_tokens); a copy where there is
            a history.
        """
        if self.first_column == self.start:
            return new
        num_pages, heads, size, head_dim = pool.shape
        columns = pool.reshape(num_pages * heads, size, head_dim)[self._history_rows(heads)]
        columns = columns.reshape(1, heads, self.start - self.first_column, head_dim)
        return mx.concatenate([columns, new.astype(pool.dtype)], axis=2)

    def _history_rows(self, heads: int) -> mx.array:
        """int32 [heads, n]: pages before the chunk, in a pool seen as `PagedView.page_rows` says."""
        if heads not in self._history:
            num_pages = (self.start - self.first_column) // self.spec.page_size
            pages = mx.array(self.tables[0].pages[:num_pages], dtype=mx.int32)
            self._history[heads] = pages * heads + mx.arange(heads, dtype=mx.int32)[:, None]
        return self._history[heads]

    def mask(self, num_tokens: int, window: int | None, return_array: bool) -> mx.array | str | None:
        """None, "causal", or bool [num_tokens, S] where a window cuts or an array is asked for.

        A single token attends to all it finds, so it gets None, array or not, as in mlx-lm.
        """
        window = self.spec.window if window is None else window
        length = self.start + num_tokens - self.first_column
        cuts = window is not None and length > window
        if not cuts and num_tokens == 1:
            return None
        if not cuts and not return_array:
            return "causal"
        query = mx.arange(self.start, self.start + num_tokens)[:, None]
        column = mx.arange(self.first_column, self.first_column + length)[None]
        mask = column <= query
        return mask & (column > query - window) if cuts and window is not None else mask
