"""Every kind passes the suite that a third party's kind must pass."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from cache_subjects import PAGE, WINDOW, delayed, packed, paged, recurrent

from mlxd.caches.conformance import CacheConformance, Subject
from mlxd.caches.contract import DecodeSlot, KvDonorRows
from mlxd.caches.donor import DenseDonor, Donor
from mlxd.caches.paged import PagedRows
from mlxd.caches.paged_view import PrefillView
from mlxd.caches.quantized import QuantizedRotatingRows, QuantizedRows
from mlxd.caches.recurrent import RecurrentPrefill, RecurrentRows
from mlxd.caches.rotating import RotatingRows
from mlxd.caches.rounds import offsets_kept


class TestPaged(CacheConformance):
    subject = paged(PagedRows)


class TestRotating(CacheConformance):
    subject = paged(RotatingRows, WINDOW)


class TestRotatingByOne(CacheConformance):
    """A position attends to itself alone."""

    subject = paged(RotatingRows, 1)


class TestRotatingByPages(CacheConformance):
    subject = paged(RotatingRows, 2 * PAGE)


class TestQuantized(CacheConformance):
    subject = packed(QuantizedRows)


class TestQuantizedRotating(CacheConformance):
    subject = packed(QuantizedRotatingRows, WINDOW)


class TestDelayed(CacheConformance):
    subject = delayed()


class TestDelayedRotating(CacheConformance):
    subject = delayed(WINDOW)


class TestDelayedNarrow(CacheConformance):
    """Nothing of a row is in its window when it is packed."""

    subject = delayed(1)


class TestRecurrent(CacheConformance):
    subject = recurrent(RecurrentRows)


class NeverScrubbed(PagedRows):
    def scrub(self, pages: mx.array) -> None:
        pass


class Stuck(PagedRows):
    def commit_decode_step(self, slot: DecodeSlot, outputs: Sequence[mx.array]) -> list[mx.array]:
        self.planes = list(outputs)
        return []


class ForgetsToRestore(RecurrentRows):
    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        planes = self.planes
        super().spec_round_rollback(keep)
        self.planes = planes


class LendsThePool(PagedRows):
    def capture_donor_rows(self) -> KvDonorRows:
        donor = super().capture_donor_rows()
        return replace(donor, starts=tuple(0 for _ in donor.starts), ends=tuple(9 for _ in donor.ends))


class GoesBackBlindly(RotatingRows):
    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        self._offsets = offsets_kept(self._round, self._offsets, keep)


class LendsMoreThanItsWindow(RotatingRows):
    """To attend; read, it is right."""

    def capture_donor_rows(self) -> KvDonorRows:
        return self.lend(self.group.tables, self.row_offsets).rows()

    def capture_donor_attention(self) -> Donor:
        donor = super().capture_donor_attention()
        assert isinstance(donor, DenseDonor)
        return replace(donor, starts=tuple(0 for _ in donor.starts))


class Renamed(PagedRows):
    def signature(self) -> str:
        return f"kv:{self.offset}"


class SharesItsSlots(RecurrentRows):
    """Every row writes the scratch slot."""

    def prefill(self, view: PrefillView) -> RecurrentPrefill:
        view.pages = mx.zeros_like(view.pages)
        return super().prefill(view)


class NeedsItsBeginning(RecurrentRows):
    """A row that it has not seen begin starts from nothing."""

    def prefill(self, view: PrefillView) -> RecurrentPrefill:
        begun = self.__dict__.setdefault("begun", set[int]())
        slot = int(view.pages[0])
        if not view.start:
            begun.add(slot)
        elif slot not in begun:
            view.start = 0
        return super().prefill(view)


@pytest.mark.parametrize(
    ("subject", "rule", "arguments"),
    [
        (paged(NeverScrubbed), "test_scrub_zeroes_its_pages_and_no_other", ()),
        (paged(Stuck), "test_commit_moves_every_row_by_one", ()),
        (paged(LendsThePool), "test_what_it_lends_outlives_appends_pages_and_the_cache", ((8, 4),)),
        (
            paged(GoesBackBlindly, WINDOW),
            "test_pages_handed_back_in_a_round_come_back",
            (),
        ),
        (
            paged(LendsMoreThanItsWindow, WINDOW),
            "test_what_it_lends_to_attend_reads_what_each_row_holds",
            ((8, 4),),
        ),
        (paged(Renamed), "test_its_identity_is_a_name_that_never_changes", ()),
        (recurrent(ForgetsToRestore), "test_a_round_keeps_what_each_row_accepted_to_the_bit", ((1, 2),)),
        (
            recurrent(NeedsItsBeginning),
            "test_a_row_goes_on_from_what_the_prefix_cache_kept_of_it",
            (2,),
        ),
        (recurrent(SharesItsSlots), "test_a_prompt_in_chunks_is_as_good_as_one_decoded", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_kind_that_breaks_a_rule_is_caught(
    subject: Subject, rule: str, arguments: tuple[object, ...]
) -> None:
    suite = CacheConformance()
    suite.subject = subject
    with pytest.raises(AssertionError):
        getattr(suite, rule)(*arguments)
