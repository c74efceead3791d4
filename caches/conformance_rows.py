"""Rows of one layer driven by hand, as the runner drives them: for the conformance suite."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxd.caches.contract import RowCache
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable
from mlxd.caches.paged_view import PagedView, PrefillView
from mlxd.caches.row_group import RowGroup
from mlxd.caches.sizing import GroupSpec

NUM_PAGES = 16
Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind, and the part of a model's layer that uses it.

    Attributes:
        spec: the group it is made for; a small page size and window make for quick tests.
        make: the cache of one layer, as in `kinds.Kind`.
        step: (decode stand-in, marks float32 [B]) -> float32 [B, ...]. Appends one position a row, made from
            the row's mark, and returns what depends on all positions that the row may read.
        prefill: (prefill stand-in, marks float32 [1, L]). Appends L positions of one row.
    """

    spec: GroupSpec
    make: Callable[[RowGroup, int], RowCache]
    step: Callable[[Any, mx.array], mx.array]
    prefill: Callable[[Any, mx.array], None]


class CopiedPages:
    """Decode attention by copy (paged_view.DecodeAttention), so that the suite needs no model."""

    def fetch(self, keys: mx.array, values: mx.array, view: PagedView) -> tuple[mx.array, mx.array]:
        """Returns [B, n_kv_heads, T * page_size, head_dim] of each."""
        return _in_order(keys, view.table), _in_order(values, view.table)

    def mask(self, view: PagedView) -> mx.array | None:
        return view.valid[:, None, None, :]


def _in_order(pool: mx.array, table: mx.array) -> mx.array:
    batch, width = table.shape
    _, heads, size, head_dim = pool.shape
    return pool[table].transpose(0, 2, 1, 3, 4).reshape(batch, heads, width * size, head_dim)


@dataclass(frozen=True, slots=True)
class _Step:
    """contract.DecodeStepInputs of the one group there is."""

    positions: mx.array
    only: PagedView

    def view(self, group: str) -> PagedView:
        return self.only


class Rows:
    """Rows of one layer, driven by hand as the runner drives them."""

    def __init__(self, subject: Subject, num_pages: int = NUM_PAGES) -> None:
        self.subject = subject
        self.pool = PagePool(num_pages)
        self.group = RowGroup(subject.spec)
        self.cache = subject.make(self.group, num_pages)
        self.tables: dict[int, PageTable] = {}
        self.offsets: dict[int, int] = {}
        self.holds_pages = False
        """Set while a speculative round is open: what it undoes must still be there."""

    def join(self, row: int, length: int = 0) -> None:
        """Row number `row`, which decides its marks, with `length` positions prefilled in chunks."""
        self.tables[row] = PageTable(self.subject.spec, self.pool)
        self.offsets[row] = 0
        chunk = min(self.subject.spec.page_size, 4)
        for start in range(0, length, chunk):
            self._prefill(row, start, min(length, start + chunk))

    def _prefill(self, row: int, start: int, end: int) -> None:
        table = self.tables[row]
        self._make_room(row, start, end)
        stand_in = self.cache.prefill(PrefillView(self.subject.spec, [table], start, [end]))
        self.subject.prefill(stand_in, mx.array([[mark(row, at) for at in range(start, end)]]))
        stand_in.finish()
        mx.eval(self.cache.state())
        self.offsets[row] = end

    def leave(self, row: int) -> None:
        self.tables.pop(row).clear()
        del self.offsets[row]

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
        self.group.bind([self.tables[row] for row in rows], [self.offsets[row] for row in rows], len(rows))

    def adopt_offsets(self) -> None:
        """Go on from where the cache says its rows are, after it dropped positions."""
        self.offsets = dict(zip(self.offsets, self.cache.row_offsets, strict=True))

    def _make_room(self, row: int, start: int, end: int) -> None:
        if not self.holds_pages:
            self.tables[row].release_before(start)
        self.tables[row].grow(end)
        if dirty := self.pool.take_scrub():
            self.cache.scrub(mx.array(dirty, dtype=mx.int32))

    def step(
        self, marks: mx.array, positions: Sequence[int] | None = None, *, compiled: bool = False
    ) -> mx.array:
        """The bound step, as a function of arrays; `positions` where rows are idle."""
        plan = self.cache.prepare_decode_step()
        slot = self.cache.decode_slot(plan)
        spec, layer = self.subject.spec, self.subject.step

        def body(marks: mx.array, at: mx.array, *arrays: mx.array) -> list[mx.array]:
            table, start, *inputs = arrays
            step = _Step(at, PagedView(spec, table, start, at, CopiedPages()))
            stand_in = slot.trace(inputs, step)
            return [layer(stand_in, marks), *stand_in.outputs]

        at = mx.array(list(self.group.offsets if positions is None else positions), dtype=mx.int32)
        table, start = mx.array(self.group.table), mx.array(self.group.start)
        inputs = self.cache.decode_inputs(plan, _Step(at, PagedView(spec, table, start, at, CopiedPages())))
        assert len(inputs) == slot.num_inputs, "decode_inputs and the slot disagree"
        run = mx.compile(body) if compiled else body
        computed, *outputs = run(marks, at, table, start, *inputs)
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
