"""Every kind passes the suite that a third party's kind must pass."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxd.batching.attention_quantized import attend_packed_pages
from mlxd.caches.conformance import CacheConformance, Subject
from mlxd.caches.contract import DecodeSlot, KvDonorRows
from mlxd.caches.paged import LayerShape, PagedRows
from mlxd.caches.paged_view import PrefillView
from mlxd.caches.quantization import Quantization
from mlxd.caches.quantized import QuantizedRotatingRows, QuantizedRows, QuantizedShape
from mlxd.caches.recurrent import RecurrentPrefill, RecurrentRows, StateShape
from mlxd.caches.rotating import RotatingRows
from mlxd.caches.sizing import ENDLESS, GroupSpec

HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
PAGE, WINDOW = 4, 6
SHAPE = LayerShape(0, HEADS, KEY_DIM, VALUE_DIM, mx.float32)
PACKED = QuantizedShape(0, HEADS, 32, 32, mx.float32, Quantization(bits=8, group_size=32))
STATE = StateShape(0, (((2, 3), mx.float32), ((4,), mx.float32)))


def pages(shape: LayerShape, window: int | None = None) -> GroupSpec:
    return GroupSpec("group", (0,), window, PAGE, shape.bytes_per_token)


def vectors(marks: mx.array, dim: int, turn: float) -> mx.array:
    """[B, HEADS, L, dim] of marks [B, L]: every mark has its own."""
    cells = mx.arange(HEADS * dim, dtype=mx.float32).reshape(HEADS, 1, dim)
    return mx.sin(3 * marks[:, None, :, None] + cells + turn)


def attend(stand_in: Any, marks: mx.array) -> mx.array:
    keys, values = vectors(marks[:, None], KEY_DIM, 0), vectors(marks[:, None], VALUE_DIM, 1)
    all_keys, all_values = stand_in.update_and_fetch(keys, values)
    mask = stand_in.make_mask(1)
    return mx.fast.scaled_dot_product_attention(keys, all_keys, all_values, scale=1.0, mask=mask)


def store(stand_in: Any, marks: mx.array) -> None:
    stand_in.update_and_fetch(vectors(marks, KEY_DIM, 0), vectors(marks, VALUE_DIM, 1))


def attend_packed(stand_in: Any, marks: mx.array) -> mx.array:
    keys = vectors(marks[:, None], 32, 0)
    stand_in.update_and_fetch(keys, vectors(marks[:, None], 32, 1))
    return attend_packed_pages(stand_in, keys, 1.0, None)


def store_packed(stand_in: Any, marks: mx.array) -> None:
    stand_in.update_and_fetch(vectors(marks, 32, 0), vectors(marks, 32, 1))


def remember(stand_in: Any, marks: mx.array) -> mx.array:
    """A state that decays, and one that turns."""
    for index, (shape, _) in enumerate(STATE.arrays):
        before = stand_in[index]
        new = marks.reshape(-1, *(1 for _ in shape)) + mx.arange(shape[-1], dtype=mx.float32)
        stand_in[index] = mx.sin(new) if before is None else 0.5 * before + mx.sin(new)
        stand_in[index] = mx.broadcast_to(stand_in[index], (marks.shape[0], *shape))
    return mx.concatenate([stand_in[0].reshape(-1, 6), stand_in[1]], axis=1)


def remember_all(stand_in: Any, marks: mx.array) -> None:
    for position in range(marks.shape[1]):
        remember(stand_in, marks[:, position])


def paged(kind: type[PagedRows]) -> Subject:
    return Subject(pages(SHAPE), lambda group, n: kind(SHAPE, group, n), attend, store)


def recurrent(kind: type[RecurrentRows]) -> Subject:
    spec = GroupSpec("state", (0,), None, ENDLESS, 0, STATE.bytes_per_row)
    return Subject(spec, lambda group, n: kind(STATE, group, n), remember, remember_all)


class TestPaged(CacheConformance):
    subject = paged(PagedRows)


class TestRotating(CacheConformance):
    subject = Subject(pages(SHAPE, WINDOW), lambda group, n: RotatingRows(SHAPE, group, n), attend, store)


class TestQuantized(CacheConformance):
    subject = Subject(
        pages(PACKED), lambda group, n: QuantizedRows(PACKED, group, n), attend_packed, store_packed
    )


class TestQuantizedRotating(CacheConformance):
    subject = Subject(
        pages(PACKED, WINDOW),
        lambda group, n: QuantizedRotatingRows(PACKED, group, n),
        attend_packed,
        store_packed,
    )


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
        pools = self.pools
        super().spec_round_rollback(keep)
        self.pools = pools


class LendsThePool(PagedRows):
    def capture_donor_rows(self) -> KvDonorRows:
        donor = super().capture_donor_rows()
        return replace(donor, starts=tuple(0 for _ in donor.starts), ends=tuple(9 for _ in donor.ends))


class Renamed(PagedRows):
    def signature(self) -> str:
        return f"kv:{self.offset}"


class SharesItsSlots(RecurrentRows):
    """Every row writes the scratch slot."""

    def prefill(self, view: PrefillView) -> RecurrentPrefill:
        view.pages = mx.zeros_like(view.pages)
        return super().prefill(view)


@pytest.mark.parametrize(
    ("subject", "rule", "arguments"),
    [
        (paged(NeverScrubbed), "test_scrub_zeroes_its_pages_and_no_other", ()),
        (paged(Stuck), "test_commit_moves_every_row_by_one", ()),
        (paged(LendsThePool), "test_what_it_lends_outlives_appends_pages_and_the_cache", ()),
        (paged(Renamed), "test_its_identity_is_a_name_that_never_changes", ()),
        (recurrent(ForgetsToRestore), "test_a_round_keeps_what_each_row_accepted_to_the_bit", ((1, 2),)),
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
