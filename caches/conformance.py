"""What every kind of cache must pass, run by pytest: a subclass of `CacheConformance` says how to drive it.

    class TestMine(CacheConformance):
        subject = Subject(spec, make, step, prefill)

Nothing here knows how a kind stores a position. A row is right if it computes in any company, and after
anything that happened beside it, what it computes alone.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlxd.caches.conformance_rows import NUM_PAGES, Rows, Subject, alone, attention_over
from mlxd.caches.contract import (
    donor_attention_of,
    has_spec_round,
    is_compiled_decode,
    is_row_batch,
)
from mlxd.caches.signatures import signature_of

__all__ = ["CacheConformance", "Subject"]


def _assert_as_alone(subject: Subject, rows: Rows) -> None:
    """One more step; every row computes what it would alone."""
    positions = dict(rows.offsets)
    for row, output in rows.append().items():
        np.testing.assert_allclose(output, alone(subject, row, positions[row]), rtol=1e-5, atol=1e-6)


class CacheConformance:
    """The contract (contract.RowCache), a rule a test."""

    subject: Subject

    def rows_at(self, *offsets: int) -> Rows:
        """Rows 0, 1, ... decoded to these offsets, one after another."""
        rows = Rows(self.subject)
        for row, offset in enumerate(offsets):
            rows.join(row)
            for _ in range(offset):
                rows.append([row])
        return rows

    def test_its_identity_is_a_name_that_never_changes(self) -> None:
        rows = self.rows_at(1)
        names = {signature_of(rows.cache)}
        for _ in range(12):
            rows.append()
            names.add(signature_of(rows.cache))
        assert len(names) == 1
        assert names == {signature_of(Rows(self.subject, num_pages=3).cache)}, "capacity is no identity"

    def test_probes_know_it_and_models_take_it_for_a_plain_cache(self) -> None:
        cache = Rows(self.subject).cache
        assert is_row_batch(cache)
        assert is_compiled_decode(cache)
        assert has_spec_round(cache)
        assert cache
        assert not hasattr(cache, "__len__")
        assert not hasattr(cache, "bits")

    def test_bytes_are_those_of_the_pools(self) -> None:
        spec, cache = self.subject.spec, Rows(self.subject).cache
        per_page = sum(array.nbytes for array in cache.state()) // (NUM_PAGES + 1)
        assert per_page == sum(spec.page_bytes for spec in self.subject.specs)
        assert cache.bytes_per_token() == (0 if spec.state_bytes else per_page // spec.page_size)

    def test_prepare_without_rows_raises(self) -> None:
        with pytest.raises(IndexError):
            Rows(self.subject).cache.prepare_decode_step()

    def test_phase_foretells_prepare_and_changes_nothing(self) -> None:
        rows = self.rows_at(2, 1)
        for _ in range(12):
            rows.bind([0, 1])
            before = rows.cache.row_offsets
            phase = rows.cache.decode_phase()
            assert rows.cache.row_offsets == before
            assert rows.cache.prepare_decode_step().fetch == phase
            rows.append()

    def test_commit_moves_every_row_by_one(self) -> None:
        rows = self.rows_at(5, 3)
        rows.append()
        assert rows.cache.row_offsets == (6, 4)
        assert rows.cache.offset == 6
        assert rows.cache.num_rows == 2  # type: ignore[attr-defined]

    def test_a_step_that_is_abandoned_leaves_no_trace(self) -> None:
        rows = self.rows_at(5, 3)
        rows.bind([0, 1])
        rows.cache.decode_slot(rows.cache.prepare_decode_step())
        _assert_as_alone(self.subject, rows)

    def test_rows_that_join_and_leave_move_nobody(self) -> None:
        rows = self.rows_at(9, 4)
        rows.join(2)
        for _ in range(3):
            _assert_as_alone(self.subject, rows)
        rows.leave(0)
        for _ in range(12):
            _assert_as_alone(self.subject, rows)

    def test_a_prompt_in_chunks_is_as_good_as_one_decoded(self) -> None:
        for length in range(1, 14):
            rows = self.rows_at(6)
            rows.join(1, length)
            _assert_as_alone(self.subject, rows)

    def test_a_row_on_used_pages_sees_nothing_of_their_last_owner(self) -> None:
        rows = Rows(self.subject, num_pages=4)
        for row in range(6):
            rows.join(row, 6)
            _assert_as_alone(self.subject, rows)
            rows.leave(row)
        for pool in rows.pools:
            pool.check_integrity()

    @pytest.mark.parametrize("num_pages", [1, 2, 3])
    def test_a_row_goes_on_from_what_the_prefix_cache_kept_of_it(self, num_pages: int) -> None:
        """By a chunk, then by steps; it never sees the row's beginning."""
        rows = self.rows_at(num_pages * self.subject.page_size, 2)
        assert rows.begin_again(0) == num_pages
        rows.prefill(0, 3)
        for _ in range(6):
            _assert_as_alone(self.subject, rows)

    def test_idle_rows_write_only_the_scratch_page(self) -> None:
        rows = self.rows_at(5)
        before = rows.state(slice(1, None))
        position = rows.bind_idle(4, 1 if self.subject.spec.state_bytes else 2, num_pages=3)
        rows.step(mx.ones((4,)), [position] * 4)
        for kept, array in zip(before, rows.state(slice(1, None)), strict=True):
            np.testing.assert_array_equal(array, kept)

    def test_scrub_zeroes_its_pages_and_no_other(self) -> None:
        rows = self.rows_at(3, 3)
        mine, other = rows.tables[0][0].pages[0], rows.tables[1][0].pages[0]
        kept = rows.state(slice(other, other + 1))
        rows.scrub(mx.array([mine], dtype=mx.int32))
        assert not any(array.any() for array in rows.state(slice(mine, mine + 1)))
        for before, array in zip(kept, rows.state(slice(other, other + 1)), strict=True):
            np.testing.assert_array_equal(array, before)

    def test_reset_leaves_nothing_behind(self) -> None:
        rows = self.rows_at(5, 3)
        shapes = [array.shape for array in rows.cache.state()]
        rows.cache.reset()
        assert rows.cache.row_offsets == ()
        assert [array.shape for array in rows.cache.state()] == shapes
        assert not any(array.any() for array in rows.state(slice(None)))

    def test_a_compiled_step_computes_and_stores_what_an_eager_one_does(self) -> None:
        eager, compiled = self.rows_at(12, 3), self.rows_at(12, 3)
        for _ in range(14):
            expected, found = eager.append(), compiled.append(compiled=True)
            for row in expected:
                np.testing.assert_allclose(found[row], expected[row], rtol=1e-5, atol=1e-6)
            stored = zip(eager.state(slice(1, None)), compiled.state(slice(1, None)), strict=True)
            for kept, array in stored:
                np.testing.assert_allclose(array, kept, rtol=1e-5, atol=1e-6)

    def test_dropped_positions_are_as_if_they_had_never_been(self) -> None:
        rows = self.rows_at(4, 2)
        rows.append()
        if not rows.cache.is_trimmable():
            with pytest.raises(ValueError, match="trim"):
                rows.cache.trim(2)
            assert rows.cache.row_offsets == (5, 3)
            return
        rows.cache.trim(2)
        assert rows.cache.row_offsets == (3, 1)
        rows.adopt_offsets()
        for _ in range(4):
            _assert_as_alone(self.subject, rows)

    @pytest.mark.parametrize("keep", [(0, 0), (3, 1), (1, 2), (2, 3), (3, 3)])
    def test_a_round_keeps_what_each_row_accepted_to_the_bit(self, keep: Sequence[int]) -> None:
        rows = self.round_of(3, 7, 1)
        rows.cache.spec_round_rollback(keep)
        assert rows.cache.row_offsets == (8 + keep[0], 2 + keep[1])
        rows.adopt_offsets()
        twin = self.rows_at(8 + keep[0], 2 + keep[1])
        for _ in range(3):
            found, expected = rows.append(), twin.append()
            for row in expected:
                np.testing.assert_array_equal(found[row], expected[row])

    def round_of(self, appends: int, *offsets: int) -> Rows:
        """Rows one past these offsets, and then a round of `appends`, left open."""
        rows = self.rows_at(*offsets)
        rows.append()
        rows.cache.spec_round_begin()
        for _ in range(appends):
            rows.append()
        return rows

    def test_pages_handed_back_in_a_round_come_back(self) -> None:
        """As far as a row goes back, and no page is lost or kept beyond that."""
        for keep in range(7):
            rows = self.round_of(6, 9)
            rows.cache.spec_round_rollback((keep,))
            rows.adopt_offsets()
            _assert_as_alone(self.subject, rows)
            rows.leave(0)
            assert all(pool.num_held == 0 for pool in rows.pools)

    def test_a_round_that_was_accepted_cannot_be_undone(self) -> None:
        rows = self.round_of(2, 2, 1)
        rows.cache.spec_round_commit()
        with pytest.raises(ValueError, match="round"):
            rows.cache.spec_round_rollback((0, 0))
        _assert_as_alone(self.subject, rows)

    @pytest.mark.parametrize("keep", [(3, 0), (0, -1)])
    def test_a_row_keeps_no_more_than_it_appended(self, keep: Sequence[int]) -> None:
        rows = self.round_of(2, 2, 1)
        with pytest.raises(ValueError, match="appended 2"):
            rows.cache.spec_round_rollback(keep)
        assert rows.cache.row_offsets == (5, 4)

    @pytest.mark.parametrize("offsets", [(8, 4), (7, 3)])
    def test_what_it_lends_outlives_appends_pages_and_the_cache(self, offsets: Sequence[int]) -> None:
        rows = self.rows_at(*offsets)
        rows.append()
        try:
            donor = rows.cache.capture_donor_rows()
        except ValueError as error:
            pytest.skip(str(error))
        assert donor.offsets == tuple(offset + 1 for offset in offsets)
        window = self.subject.spec.window or max(donor.offsets)
        lent = [end - start for start, end in zip(donor.starts, donor.ends, strict=True)]
        assert lent == [min(window, offset) for offset in donor.offsets]
        before = np.array(rows.cache.capture_donor_rows().keys)
        for _ in range(12):
            rows.append()
        rows.leave(0)
        rows.scrub(mx.arange(1, NUM_PAGES + 1))
        rows.cache.dispose()
        np.testing.assert_array_equal(np.array(donor.keys), before)

    @pytest.mark.parametrize("offsets", [(8, 4), (7, 3), (3, 7)])
    def test_what_it_lends_to_attend_reads_what_each_row_holds(self, offsets: Sequence[int]) -> None:
        rows = self.rows_at(*offsets)
        rows.append()
        donor = donor_attention_of(rows.cache)
        if donor is None:
            pytest.skip("it has no keys and values that attend by themselves")
        lent = rows.cache.capture_donor_rows()
        assert donor.offsets == lent.offsets == tuple(offset + 1 for offset in offsets)
        _, heads, _, dim = lent.keys.shape
        queries = mx.sin(7.3 * mx.arange(2 * 2 * heads * 3 * dim).reshape(2, 2 * heads, 3, dim))
        before = np.array(donor.attend(queries, 0.3))
        for row, expected in enumerate(attention_over(lent, queries, 0.3)):
            np.testing.assert_allclose(before[row : row + 1], np.array(expected), rtol=1e-5, atol=1e-5)
        for _ in range(12):
            rows.append()
        rows.leave(0)
        rows.scrub(mx.arange(1, NUM_PAGES + 1))
        rows.cache.dispose()
        np.testing.assert_array_equal(np.array(donor.attend(queries, 0.3)), before)

    def test_dispose_may_be_repeated_and_leaves_nothing(self) -> None:
        rows = self.rows_at(5)
        for _ in range(2):
            rows.cache.dispose()
            assert rows.cache.row_offsets == ()
            assert rows.cache.offset == 0
            assert rows.cache.rope_offsets is None
            assert sum(array.nbytes for array in rows.cache.state()) == 0
