"""Every member of the cache contract, on paged and rotating rows driven by hand."""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxd.batching.attention import Gathered
from mlxd.batching.decode import StepInputs
from mlxd.caches.contract import has_spec_round, is_compiled_decode, is_row_batch
from mlxd.caches.packed import pack
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable
from mlxd.caches.paged import LayerShape, PagedRows
from mlxd.caches.paged_view import PagedView
from mlxd.caches.quantization import Quantization
from mlxd.caches.quantized import QuantizedRotatingRows, QuantizedRows, QuantizedShape
from mlxd.caches.rotating import RotatingRows
from mlxd.caches.row_group import RowGroup
from mlxd.caches.signatures import signature_of
from mlxd.caches.sizing import GroupSpec

PAGE = 4
WINDOW = 6
HEADS = 2
KEY_DIM = 32
VALUE_DIM = 64
NUM_PAGES = 24
FOUR_BITS = Quantization(bits=4, group_size=32)
EIGHT_BITS = Quantization(bits=8, group_size=32)
KINDS: dict[str, tuple[type[PagedRows], int | None, Quantization | None]] = {
    "paged": (PagedRows, None, None),
    "rotating": (RotatingRows, WINDOW, None),
    "quantized": (QuantizedRows, None, FOUR_BITS),
    "rotating quantized": (QuantizedRotatingRows, WINDOW, EIGHT_BITS),
}

Bytes = npt.NDArray[np.float32]


def number(row: int, position: int, dim: int) -> Bytes:
    """[HEADS, 1, dim], a number for every cell that no other cell has."""
    cells = np.arange(HEADS * dim, dtype=np.float32).reshape(HEADS, 1, dim)
    return cells + 1_000 * position + 100_000 * (row + 1)


class Layer:
    """One layer, its group and pool; it appends numbers that tell where they belong."""

    def __init__(self, kind: str, num_pages: int = NUM_PAGES) -> None:
        rows, window, self.quantization = KINDS[kind]
        dense = (0, HEADS, KEY_DIM, VALUE_DIM, mx.float32)
        packed = self.quantization
        self.shape = LayerShape(*dense) if packed is None else QuantizedShape(*dense, packed)
        self.spec = GroupSpec("group", (0,), window, PAGE, self.shape.bytes_per_token)
        self.pool = PagePool(num_pages)
        self.group = RowGroup(self.spec)
        self.cache = rows(self.shape, self.group, num_pages)
        self.tables: list[PageTable] = []
        self.offsets: list[int] = []

    def join(self) -> None:
        self.tables.append(PageTable(self.spec, self.pool))
        self.offsets.append(0)

    def bind(self, num_rows: int | None = None) -> None:
        """Room for one more position a row."""
        for table, offset in zip(self.tables, self.offsets, strict=True):
            table.release_before(offset)
            table.grow(offset + 1)
        self.group.bind(self.tables, self.offsets, num_rows or len(self.tables))

    def append(self, times: int = 1) -> None:
        """Whole steps: every row by one position, each."""
        for _ in range(times):
            self.bind()
            plan = self.cache.prepare_decode_step()
            slot = self.cache.decode_slot(plan)
            stand_in = slot.trace(self.cache.decode_inputs(plan, self.step()), self.step())
            stand_in.update_and_fetch(self.new(KEY_DIM), self.new(VALUE_DIM))
            self.cache.commit_decode_step(slot, stand_in.outputs)
            self.offsets = list(self.cache.row_offsets)

    def step(self) -> StepInputs:
        positions = mx.array(self.offsets, mx.int32)
        table, start = mx.array(self.group.table), mx.array(self.group.start)
        view = PagedView(self.spec, table, start, positions, Gathered())
        return StepInputs(positions, {self.spec.name: view})

    def new(self, dim: int) -> mx.array:
        return mx.array(np.stack([number(row, offset, dim) for row, offset in enumerate(self.offsets)]))

    def stored(self, numbers: Bytes) -> Bytes:
        """What is left of numbers that this layer stored."""
        if self.quantization is None:
            return numbers
        return np.array(pack(mx.array(numbers), self.quantization).dense())


def layer_at(kind: str, offsets: Sequence[int]) -> Layer:
    """Rows that joined one after another and reached these offsets, the longest first."""
    layer = Layer(kind)
    for offset, next_offset in zip(offsets, [*offsets[1:], 0], strict=True):
        layer.join()
        layer.append(offset - next_offset)
    return layer


def held_positions(layer: Layer, row: int) -> range:
    """Positions a query at the row's last one reads."""
    offset = layer.offsets[row]
    return range(0 if layer.spec.window is None else max(0, offset - layer.spec.window), offset)


def assert_donates(layer: Layer) -> None:
    donor = layer.cache.capture_donor_rows()
    assert donor.offsets == tuple(layer.offsets)
    for row in range(len(layer.tables)):
        columns = slice(donor.starts[row], donor.ends[row])
        positions = held_positions(layer, row)
        for pool, dim in ((donor.keys, KEY_DIM), (donor.values, VALUE_DIM)):
            expected = np.concatenate([number(row, position, dim) for position in positions], axis=1)
            np.testing.assert_array_equal(np.array(pool[row, :, columns]), layer.stored(expected))
        first = donor.offsets[row] - donor.ends[row] + donor.starts[row]
        assert first == positions.start


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_probes_know_it(self, kind: str) -> None:
        cache = Layer(kind).cache
        assert is_row_batch(cache)
        assert is_compiled_decode(cache)
        assert has_spec_round(cache)
        assert cache.composed is None
        assert cache.prefill_maintenance is None
        assert cache.minimum_reusable_offset == 0
        assert cache.max_append_tokens() == math.inf
        assert not cache.state_needs_dispose

    def test_it_is_always_true(self, kind: str) -> None:
        """Models ask `if cache`, so it must not be empty when it has no rows; and `bits` means quantised."""
        cache = Layer(kind).cache
        assert cache
        assert not hasattr(cache, "__len__")
        assert not hasattr(cache, "bits")

    def test_bytes_per_token_are_those_of_the_pools(self, kind: str) -> None:
        cache = Layer(kind).cache
        pools = sum(array.nbytes for array in cache.state())
        assert cache.bytes_per_token() == pools // ((NUM_PAGES + 1) * PAGE)

    def test_signature_is_the_same_at_every_offset(self, kind: str) -> None:
        layer = layer_at(kind, (1,))
        signature = signature_of(layer.cache)
        for _ in range(3 * WINDOW):
            layer.append()
            assert signature_of(layer.cache) == signature

    def test_decode_phase_foretells_prepare_and_changes_nothing(self, kind: str) -> None:
        layer = layer_at(kind, (2, 1))
        for _ in range(3 * WINDOW):
            layer.bind()
            before = layer.cache.row_offsets
            assert layer.cache.decode_phase() == layer.cache.decode_phase()
            assert layer.cache.row_offsets == before
            assert layer.cache.prepare_decode_step().fetch == layer.cache.decode_phase()
            layer.append()

    def test_prepare_without_rows_raises(self, kind: str) -> None:
        with pytest.raises(IndexError, match="no row is bound"):
            Layer(kind).cache.prepare_decode_step()

    def test_a_step_that_is_abandoned_leaves_no_trace(self, kind: str) -> None:
        layer = layer_at(kind, (5, 3))
        layer.bind()
        layer.cache.decode_slot(layer.cache.prepare_decode_step())
        layer.append()
        assert_donates(layer)

    def test_a_position_without_room_raises(self, kind: str) -> None:
        layer = layer_at(kind, (PAGE,))
        with pytest.raises(IndexError, match=rf"position {PAGE} is outside the pages held, \[0, {PAGE}\)"):
            layer.group.bind(layer.tables, [PAGE], 1)

    def test_offsets_are_a_rows_own(self, kind: str) -> None:
        layer = layer_at(kind, (9, 4, 1))
        assert layer.cache.row_offsets == (9, 4, 1)
        assert layer.cache.offset == 9
        assert layer.cache.num_rows == 3
        rope = layer.cache.rope_offsets
        assert rope is not None
        assert np.array(rope).tolist() == [9, 4, 1]

    @pytest.mark.parametrize("offset", [1, PAGE, PAGE + 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 1])
    def test_rows_hold_what_was_appended(self, kind: str, offset: int) -> None:
        assert_donates(layer_at(kind, (offset + 3, offset, 1)))

    def test_donors_outlive_appends_pages_and_the_cache(self, kind: str) -> None:
        layer = layer_at(kind, (9, 5))
        donor = layer.cache.capture_donor_rows()
        kept = np.array(layer.cache.capture_donor_rows().keys)
        layer.append(2 * WINDOW)
        layer.tables[0].clear()
        layer.cache.scrub(mx.arange(1, NUM_PAGES + 1))
        layer.cache.dispose()
        np.testing.assert_array_equal(np.array(donor.keys), kept)
        assert donor.offsets == (9, 5)

    def test_dispose_twice_leaves_an_empty_cache(self, kind: str) -> None:
        layer = layer_at(kind, (5,))
        for _ in range(2):
            layer.cache.dispose()
            assert layer.cache.row_offsets == ()
            assert layer.cache.offset == 0
            assert layer.cache.rope_offsets is None
            assert sum(array.nbytes for array in layer.cache.state()) == 0

    def test_a_reset_leaves_nothing_behind(self, kind: str) -> None:
        layer = layer_at(kind, (5, 3))
        layer.cache.reset()
        assert layer.cache.row_offsets == ()
        assert not any(np.array(pool).any() for pool in layer.cache.state())
        assert [pool.shape[0] for pool in layer.cache.state()] == [NUM_PAGES + 1] * len(layer.shape.planes)

    def test_scrub_zeroes_its_pages_and_no_other(self, kind: str) -> None:
        layer = layer_at(kind, (5,))
        first, second = layer.tables[0].pages
        kept = [np.array(pool[second]) for pool in layer.cache.state()]
        layer.cache.scrub(mx.array([first]))
        for pool, before in zip(layer.cache.state(), kept, strict=True):
            assert not np.array(pool[first]).any()
            np.testing.assert_array_equal(np.array(pool[second]), before)

    def test_trimmed_positions_are_overwritten(self, kind: str) -> None:
        layer = layer_at(kind, (5, 3))
        assert layer.cache.is_trimmable()
        layer.cache.trim(2)
        assert layer.cache.row_offsets == (3, 1)
        layer.offsets = list(layer.cache.row_offsets)
        layer.append(4)
        assert_donates(layer)
        layer.cache.trim(6)
        assert layer.cache.row_offsets == (1, 0)

    @pytest.mark.parametrize("keep", [(0, 0), (3, 1), (2, 3), (3, 3)])
    def test_a_spec_round_keeps_what_each_row_accepted(self, kind: str, keep: tuple[int, int]) -> None:
        layer = layer_at(kind, (2, 1))
        layer.cache.spec_round_begin()
        layer.append(3)
        layer.cache.spec_round_rollback(keep)
        assert layer.cache.row_offsets == (2 + keep[0], 1 + keep[1])
        layer.offsets = list(layer.cache.row_offsets)
        layer.append()
        assert_donates(layer)

    def test_a_spec_round_that_was_accepted_cannot_be_undone(self, kind: str) -> None:
        layer = layer_at(kind, (2, 1))
        layer.cache.spec_round_begin()
        layer.append(2)
        layer.cache.spec_round_commit()
        with pytest.raises(ValueError, match="no speculative round is open"):
            layer.cache.spec_round_rollback((0, 0))

    @pytest.mark.parametrize("keep", [(3, 0), (0, -1)])
    def test_a_row_keeps_no_more_than_it_appended(self, kind: str, keep: tuple[int, int]) -> None:
        layer = layer_at(kind, (2, 1))
        layer.cache.spec_round_begin()
        layer.append(2)
        with pytest.raises(ValueError, match="the row appended 2 positions"):
            layer.cache.spec_round_rollback(keep)
        assert layer.cache.row_offsets == (4, 3)

    def test_idle_rows_write_only_the_scratch_page(self, kind: str) -> None:
        layer = layer_at(kind, (5,))
        before = [np.array(pool[1:]) for pool in layer.cache.state()]
        position = layer.group.bind_idle(4, 2, num_pages=3)
        layer.group.shift_idle(position)
        layer.tables, layer.offsets = [], [position] * 4
        plan = layer.cache.prepare_decode_step()
        slot = layer.cache.decode_slot(plan)
        stand_in = slot.trace(layer.cache.decode_inputs(plan, layer.step()), layer.step())
        stand_in.update_and_fetch(layer.new(KEY_DIM), layer.new(VALUE_DIM))
        layer.cache.commit_decode_step(slot, stand_in.outputs)
        for pool, kept in zip(layer.cache.state(), before, strict=True):
            np.testing.assert_array_equal(np.array(pool[1:]), kept)


def test_signatures_name_what_changes_bytes_or_arithmetic() -> None:
    assert signature_of(Layer("paged").cache) == f"kv:paged:{PAGE}"
    assert signature_of(Layer("rotating").cache) == f"kv:paged-rotating:{WINDOW}:{PAGE}"
    assert signature_of(Layer("quantized").cache) == f"kv:paged-quant:4:32:{PAGE}"
    assert signature_of(Layer("rotating quantized").cache) == f"kv:paged-rotating-quant:{WINDOW}:8:32:{PAGE}"


def test_rotating_rows_hand_pages_back_and_can_then_be_trimmed_only_by_force() -> None:
    layer = layer_at("rotating", (WINDOW + 2 * PAGE,))
    assert layer.tables[0].first_page > 0
    assert not layer.cache.is_trimmable()
    with pytest.raises(ValueError, match="pages have left the window"):
        layer.cache.trim(1)
    assert layer.cache.row_offsets == (WINDOW + 2 * PAGE,)


def test_a_forced_trim_must_leave_the_window_whole() -> None:
    layer = layer_at("rotating", (3 * PAGE + 1 + WINDOW,))
    start = layer.tables[0].start
    slack = layer.offsets[0] - WINDOW - start
    layer.cache.trim(slack, bypass=True)
    with pytest.raises(ValueError, match=f"position {start - 1} was handed back"):
        layer.cache.trim(1, bypass=True)
    assert layer.cache.row_offsets == (start + WINDOW,)


@pytest.mark.parametrize("offset", range(1, 5 * WINDOW))
def test_a_rotating_row_costs_its_window_whatever_its_length(offset: int) -> None:
    layer = layer_at("rotating", (offset,))
    assert len(layer.tables[0].pages) <= -(-WINDOW // PAGE) + 1
    assert layer.pool.num_held == len(layer.tables[0].pages)
