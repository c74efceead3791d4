"""One layer's arrays, shared by all rows: what every kind with pools of its own does the same way."""

import math
from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from mlxd.caches.contract import DecodeSlot, DecodeStepInputs, DecodeStepPlan, PageStorage
from mlxd.caches.paged_view import ChunkWriter
from mlxd.caches.row_group import RowGroup
from mlxd.caches.row_offsets import RowOffsets


class PooledRows(RowOffsets):
    """A base of the kinds, for one layer and all rows.

    planes: the arrays that store the layer, [num_pages + 1, ...] each. Page 0 is scratch.
    """

    prefill_maintenance = None
    composed = None
    state_needs_dispose = False
    minimum_reusable_offset = 0

    def __init__(
        self, group: RowGroup, num_pages: int, parts: Sequence[tuple[tuple[int, ...], mx.Dtype]]
    ) -> None:
        """`parts`: shape and dtype of a page's part of each plane."""
        self.group = group
        self._num_pages = num_pages
        self._parts = tuple(parts)
        self.reset()

    def reset(self) -> None:
        """Empty pools, as new: also after an evaluation that failed, which the old arrays would repeat."""
        self.planes = [mx.zeros((self._num_pages + 1, *shape), dtype) for shape, dtype in self._parts]
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._offsets = ()

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        return (self,)

    def keeps_pools(self, writer: ChunkWriter) -> bool:
        return False

    def max_append_tokens(self) -> float:
        return math.inf

    def prepare_decode_step(self) -> DecodeStepPlan:
        """Adopts the rows bound to the group; `RowGroup.bind` has checked that their positions have room."""
        if not self.group.num_rows:
            raise IndexError(f"{self.group.spec.name}: no row is bound")
        self._offsets = self.group.offsets
        return DecodeStepPlan(fetch="ring", num_rows=self.group.num_rows, width=self.group.width)

    def decode_phase(self) -> Literal["concat", "ring"]:
        return "ring"

    def decode_inputs(self, plan: DecodeStepPlan, step: DecodeStepInputs) -> list[mx.array]:
        return list(self.planes)

    def commit_decode_step(self, slot: DecodeSlot, outputs: Sequence[mx.array]) -> list[mx.array]:
        self.planes = list(outputs)
        self._offsets = self.group.advanced(self._offsets)
        return []

    def scrub(self, pages: mx.array) -> None:
        """Zero these pages, int32 [n], before they get another owner."""
        for plane in self.planes:
            plane[pages] = mx.zeros((), plane.dtype)

    def state(self) -> list[mx.array]:
        return list(self.planes)

    def dispose(self) -> None:
        self.planes = []
        self._forget_rows()
