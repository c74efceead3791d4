"""Rows of one layer driven by hand, as the runner drives them: for the conformance suite."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxd.caches.contract import KvDonorRows, RowCache
from mlxd.caches.donor import pages_in_order
from mlxd.caches.packed import Packed
from mlxd.caches.page_io import PageArrays
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable, page_tables
from mlxd.caches.paged_view import PagedView, PrefillView
from mlxd.caches.prefix import PrefixCache
from mlxd.caches.row_group import RowGroup, row_groups
from mlxd.caches.sizing import GroupPlan, GroupSpec

NUM_PAGES = 16
_STATE_STRIDE = 4
Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind, and the part of a model's layer that uses it.

    Attributes:
        spec: the group it is made for; a small page size and window make for quick tests.
        make: the cache of one layer, as in `kind.Kind`.
        step: (decode stand-in, marks float32 [B]) -> float32 [B, ...]. Appends one position a row, made from
            the row's mark, and returns what depends on all positions that the row may read.
        prefill: (prefill stand-in, marks float32 [1, L]). Appends L positions of one row.
        successor: the group that takes its rows over, where one does; `make`'s group is tied to it.
    """

    spec: GroupSpec
    make: Callable[[RowGroup, int], RowCache]
    step: Callable[[Any, mx.array], mx.array]
    prefill: Callable[[Any, mx.array], None]
    successor: GroupSpec | None = None

    @property
    def specs(self) -> tuple[GroupSpec, ...]:
        return (self.spec,) if self.successor is None else (self.spec, self.successor)

    @property
    def page_size(self) -> int:
        """Positions between two places where a row may begin on what another computed."""
        return _STATE_STRIDE if self.spec.state_bytes else self.spec.page_size


class CopiedPages:
    """Decode attention by copy (paged_view.DecodeAttention), so that the suite needs no model."""

    def fetch(self, keys: mx.array, values: mx.array, view: PagedView) -> tuple[mx.array, mx.array]:
        """Returns [B, n_kv_heads, T * page_size, head_dim] of each."""
        return pages_in_order(keys, view.table), pages_in_order(values, view.table)

    def mask(self, view: PagedView) -> mx.array | None:
        return view.valid[:, None, None, :]

    def writes(self, keys: mx.array | Packed, values: mx.array | Packed) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Step:
    """contract.DecodeStepInputs."""

    positions: mx.array
    views: dict[str, PagedView]

    def view(self, group: str) -> PagedView:
        return self.views[group]


def _step(specs: Sequence[GroupSpec], at: mx.array, tables: Sequence[mx.array]) -> _Step:
    """`tables`: table and start of each group."""
    pairs = zip(specs, tables[::2], tables[1::2], strict=True)
    return _Step(
        at, {spec.name: PagedView(spec, table, start, at, CopiedPages()) for spec, table, start in pairs}
    )


class Rows:
    """Rows of one layer, driven by hand as the runner drives them."""

    def __init__(self, subject: Subject, num_pages: int = NUM_PAGES) -> None:
        self.subject = subject
        self.pools = [PagePool(num_pages) for _ in subject.specs]
        self.groups = row_groups([GroupPlan(spec, num_pages) for spec in subject.specs])
        self.cache = subject.make(self.groups[0], num_pages)
        self.tables: dict[int, tuple[PageTable, ...]] = {}
        self.offsets: dict[int, int] = {}

    def join(self, row: int, length: int = 0) -> None:
        """Row number `row`, which decides its marks, with `length` positions prefilled in chunks."""
        self.tables[row] = page_tables(self.subject.specs, self.pools)
        self.offsets[row] = 0
        chunk = min(self.subject.spec.page_size, 4)
        for start in range(0, length, chunk):
            self._prefill(row, start, min(length, start + chunk))

    def _prefill(self, row: int, start: int, end: int) -> None:
        self._make_room(row, start, end)
        [serving] = [table for table in self.tables[row] if table.spec.serves(start)]
        maintenance = self.cache.prefill_maintenance
        if maintenance is not None:
            maintenance.begin_prefill()
        stand_in = self.cache.prefill(PrefillView(serving.spec, [serving], start, [end]))
        self.subject.prefill(stand_in, mx.array([[mark(row, at) for at in range(start, end)]]))
        stand_in.finish()
        if maintenance is not None:
            maintenance.commit_prefill([0])
            maintenance.end_prefill()
        mx.eval(self.cache.state())
        self.offsets[row] = end

    def leave(self, row: int) -> None:
        for table in self.tables.pop(row):
            table.clear()
        del self.offsets[row]

    def prefill(self, row: int, num_tokens: int) -> None:
        """A chunk more of this row."""
        self._prefill(row, self.offsets[row], self.offsets[row] + num_tokens)

    def begin_again(self, row: int) -> int:
        """Let a row of whole pages leave and come back on what the prefix cache kept; how many pages."""
        size = self.subject.page_size
        prefix = PrefixCache(self.subject.specs, self.pools, size, "", b"")
        chain, tables, offset = prefix.chain(""), self.tables[row], self.offsets[row]
        chain.extend(offset // size, size, lambda start, end: range(start, end))
        prefix.leave(chain, tables, offset // size, offset)
        self.leave(row)
        self.tables[row] = page_tables(self.subject.specs, self.pools)
        num_pages = prefix.take(chain, self.tables[row], offset // size)
        self._fill()
        self.offsets[row] = num_pages * size
        return num_pages

    def _fill(self) -> None:
        """What the pools want before the next step: pages copied, others zeroed."""
        for pool, storage in zip(self.pools, self.cache.storages, strict=True):
            dirty, origins = pool.take_scrub(), pool.take_origins()
            pairs = {page: origin for page, origin in origins.items() if isinstance(origin, int)}
            if pairs:
                PageArrays([storage]).copy(list(pairs.values()), list(pairs))
            if dirty:
                storage.scrub(mx.array(dirty, dtype=mx.int32))

    def append(self, rows: Sequence[int] | None = None, *, compiled: bool = False) -> dict[int, Array]:
        """One step over these rows, all by default; what each of them computed."""
        rows = list(self.offsets) if rows is None else rows
        self.bind(rows)
        outputs = self.step(mx.array([mark(row, self.offsets[row]) for row in rows]), compiled=compiled)
        for row, offset in zip(rows, self.cache.row_offsets, strict=True):
            self.offsets[row] = offset
        return dict(zip(rows, np.array(outputs), strict=True))

    def bind(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._make_room(row, self.offsets[row], self.offsets[row] + 1)
        offsets = [self.offsets[row] for row in rows]
        for index, group in enumerate(self.groups):
            group.bind([self.tables[row][index] for row in rows], offsets, len(rows))

    def bind_idle(self, num_rows: int, width: int, num_pages: int) -> int:
        """A step of idle rows, as `RowGroup.bind_idle`; the position they write."""
        position = max(group.bind_idle(num_rows, width, num_pages) for group in self.groups)
        for group in self.groups:
            group.shift_idle(position)
        return position

    def scrub(self, pages: mx.array) -> None:
        for storage in self.cache.storages:
            storage.scrub(pages)

    def adopt_offsets(self) -> None:
        """Go on from where the cache says its rows are, after it dropped positions."""
        self.offsets = dict(zip(self.offsets, self.cache.row_offsets, strict=True))

    def _make_room(self, row: int, start: int, end: int) -> None:
        for table in self.tables[row]:
            table.release_before(start)
            table.grow(end)
        self._fill()

    def step(
        self, marks: mx.array, positions: Sequence[int] | None = None, *, compiled: bool = False
    ) -> mx.array:
        """The bound step, as a function of arrays; `positions` where rows are idle."""
        plan = self.cache.prepare_decode_step()
        slot = self.cache.decode_slot(plan)
        specs, layer = self.subject.specs, self.subject.step

        def body(marks: mx.array, at: mx.array, *arrays: mx.array) -> list[mx.array]:
            tables, inputs = arrays[: 2 * len(specs)], arrays[2 * len(specs) :]
            stand_in = slot.trace(inputs, _step(specs, at, tables))
            return [layer(stand_in, marks), *stand_in.outputs]

        at = mx.array(list(self.groups[0].offsets if positions is None else positions), dtype=mx.int32)
        tables = [mx.array(array) for group in self.groups for array in (group.table, group.start)]
        inputs = self.cache.decode_inputs(plan, _step(specs, at, tables))
        assert len(inputs) == slot.num_inputs, "decode_inputs and the slot disagree"
        run = mx.compile(body) if compiled else body
        computed, *outputs = run(marks, at, *tables, *inputs)
        assert len(outputs) == slot.num_outputs, "the stand-in's outputs and the slot disagree"
        self.cache.commit_decode_step(slot, outputs)
        mx.eval(computed, self.cache.state())
        return computed

    def state(self, pages: slice) -> list[npt.NDArray[Any]]:
        return [np.array(array[pages]) for array in self.cache.state()]


def mark(row: int, position: int) -> float:
    """A number between -1 and 1 that no other position of any row has."""
    return math.sin(1.0 + 7.3 * row + 1.7 * position)


def alone(subject: Subject, row: int, position: int) -> Array:
    """What a row computes at `position`, decoded from its start with nobody beside it."""
    rows = Rows(subject)
    rows.join(row)
    for _ in range(position):
        rows.append()
    return rows.append()[row]


def attention_over(lent: KvDonorRows, queries: mx.array, scale: float) -> list[mx.array]:
    """Of each row, [1, n_heads, L, value_dim], over its live columns."""
    return [
        mx.fast.scaled_dot_product_attention(
            queries[row : row + 1],
            lent.keys[row : row + 1, :, start:end],
            lent.values[row : row + 1, :, start:end],
            scale=scale,
        )
        for row, (start, end) in enumerate(zip(lent.starts, lent.ends, strict=True))
    ]
