"""A model's caches as one: what holds for it holds for all of them."""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from cache_subjects import SHAPE, STATE, WINDOW, paged, recurrent

from mlxd.caches.composite import Composite, Path
from mlxd.caches.conformance import Subject
from mlxd.caches.conformance_rows import Rows
from mlxd.caches.paged import PagedRows
from mlxd.caches.recurrent import RecurrentRows
from mlxd.caches.rotating import RotatingRows

FULL = paged(PagedRows)
SLIDING = paged(RotatingRows, WINDOW)
RECURRENT = recurrent(RecurrentRows)


class Layers:
    """Layers of these kinds, each row in all of them."""

    def __init__(self, subjects: Sequence[Subject], paths: Sequence[Path] | None = None) -> None:
        self.layers = [Rows(subject) for subject in subjects]
        self.whole = Composite(
            [layer.cache for layer in self.layers], paths or [(i,) for i in range(len(subjects))]
        )
        for layer in self.layers:
            layer.join(0)
            layer.join(1)

    def append(self, times: int) -> list[np.ndarray]:
        """Whole steps; what the layers computed in the last one."""
        for _ in range(times):
            computed = [layer.append() for layer in self.layers]
        return [output[row] for output in computed for row in (0, 1)]

    def adopt_offsets(self) -> None:
        for layer in self.layers:
            layer.adopt_offsets()


def test_its_identity_is_that_of_its_entries_in_order() -> None:
    alone = [(0,), (1,), (2,), (3,)]
    in_pairs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    kinds = [RECURRENT, FULL, RECURRENT, FULL]
    assert Layers(kinds, alone).whole.signature() == "ssm,kv:paged:4,ssm,kv:paged:4"
    assert Layers(kinds, in_pairs).whole.signature() == "ssm+kv:paged:4*2"
    assert Layers([FULL] * 4, alone).whole.signature() == "kv:paged:4*4"


def test_positions_are_those_on_which_all_agree() -> None:
    layers = Layers([FULL, RECURRENT])
    layers.append(3)
    assert layers.whole.row_offsets == (3, 3)
    assert layers.whole.offset == 3
    layers.layers[0].append()
    with pytest.raises(ValueError, match=r"disagree about their rows: \[\(3, 3\), \(4, 4\)\]"):
        _ = layers.whole.row_offsets


def test_costs_add_up_and_limits_are_the_tightest() -> None:
    layers = Layers([FULL, SLIDING, RECURRENT])
    first, second, third = (layer.cache for layer in layers.layers)
    assert layers.whole.bytes_per_token() == 2 * SHAPE.bytes_per_token
    assert layers.whole.max_append_tokens() == math.inf
    second.max_append_tokens = lambda: 7.0  # type: ignore[method-assign]
    assert layers.whole.max_append_tokens() == 7
    for cache, floor in ((first, 3), (third, 5)):
        cache.minimum_reusable_offset = floor  # type: ignore[misc]
    assert layers.whole.minimum_reusable_offset == 5
    assert not layers.whole.state_needs_dispose
    assert len(layers.whole.state()) == 2 + 2 + len(STATE.arrays)


def test_it_can_be_trimmed_where_all_of_it_can() -> None:
    layers = Layers([FULL, SLIDING])
    layers.append(4)
    layers.whole.trim(1)
    assert layers.whole.row_offsets == (3, 3)


def test_one_layer_that_cannot_be_trimmed_keeps_the_others_whole() -> None:
    layers = Layers([FULL, RECURRENT])
    layers.append(4)
    assert not layers.whole.is_trimmable()
    with pytest.raises(ValueError, match="cannot be trimmed: ssm"):
        layers.whole.trim(1)
    assert layers.whole.row_offsets == (4, 4)


@pytest.mark.parametrize("keep", [(0, 0), (2, 1), (1, 3)])
def test_a_round_is_undone_in_all_layers_to_the_bit(keep: tuple[int, int]) -> None:
    layers = Layers([FULL, SLIDING, RECURRENT])
    layers.append(3)
    layers.whole.spec_round_begin()
    layers.append(3)
    layers.whole.spec_round_rollback(keep)
    assert layers.whole.row_offsets == (3 + keep[0], 3 + keep[1])
    layers.adopt_offsets()
    twin = Layers([FULL, SLIDING, RECURRENT])
    for layer in twin.layers:
        for row in (0, 1):
            for _ in range(3 + keep[row]):
                layer.append([row])
    for found, expected in zip(layers.append(2), twin.append(2), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_round_that_keeps_too_much_changes_no_layer() -> None:
    layers = Layers([FULL, RECURRENT])
    layers.append(2)
    layers.whole.spec_round_begin()
    layers.append(1)
    with pytest.raises(ValueError, match="appended 1"):
        layers.whole.spec_round_rollback((2, 0))
    assert layers.whole.row_offsets == (3, 3)
    layers.whole.spec_round_commit()
    with pytest.raises(ValueError, match="no speculative round is open"):
        layers.whole.spec_round_rollback((0, 0))


def test_reset_and_dispose_reach_all_layers() -> None:
    layers = Layers([FULL, RECURRENT])
    layers.append(2)
    layers.whole.reset()
    assert layers.whole.row_offsets == ()
    assert not any(bool(mx.any(array)) for array in layers.whole.state())
    for _ in range(2):
        layers.whole.dispose()
        assert sum(array.nbytes for array in layers.whole.state()) == 0
