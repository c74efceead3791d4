"""Recurrent state: a fixed number of bytes a row, read and replaced whole at every position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlxd.caches.contract import DecodeSlot, DecodeStepInputs, DecodeStepPlan, KvDonorRows, PageStorage
from mlxd.caches.mlx_lm_import import ArraysCache
from mlxd.caches.paged_view import PrefillView
from mlxd.caches.row_group import RowGroup
from mlxd.caches.row_offsets import RowOffsets


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's state arrays, without the row axis. `index`: place in the flat list of caches."""

    index: int
    arrays: tuple[tuple[tuple[int, ...], mx.Dtype], ...]

    @property
    def bytes_per_token(self) -> int:
        return 0

    @property
    def bytes_per_row(self) -> int:
        return sum(math.prod(shape) * dtype.size for shape, dtype in self.arrays)


class RecurrentStandIn(ArraysCache):
    """A recurrent layer inside a decode step. Some models test for the class, so it is mlx-lm's own."""

    def __init__(self, pools: Sequence[mx.array], slots: mx.array) -> None:
        """Takes pools [num_slots + 1, ...] and each row's slot, int32 [B]."""
        super().__init__(len(pools))
        self._pools = pools
        self._slots = slots
        for index, pool in enumerate(pools):
            self[index] = pool[slots]

    @property
    def outputs(self) -> list[mx.array]:
        return [replace_rows(pool, self._slots, self[index]) for index, pool in enumerate(self._pools)]


class RecurrentPrefill(ArraysCache):
    """A recurrent layer inside a prefill forward of one row, which must see no padding.

    A row's first chunk starts from no state, as in mlx-lm: to some models that is not the same as zeros.
    """

    def __init__(self, rows: "RecurrentRows", view: PrefillView) -> None:
        super().__init__(len(rows.pools))
        self._rows = rows
        self._slots = view.pages
        if view.start:
            for index, pool in enumerate(rows.pools):
                self[index] = pool[self._slots]

    def finish(self) -> None:
        self._rows.pools = [
            replace_rows(pool, self._slots, _full_size(self[index], pool.shape[1:]))
            for index, pool in enumerate(self._rows.pools)
        ]


def _full_size(state: mx.array, shape: Sequence[int]) -> mx.array:
    """`state` [1, ...] of a row too short to fill it: what is missing came before, and is zero."""
    missing = [(full - size, 0) for full, size in zip(shape, state.shape[1:], strict=True)]
    return mx.pad(state, [(0, 0), *missing])


def replace_rows(pool: mx.array, slots: mx.array, states: mx.array) -> mx.array:
    """`pool` [num_slots + 1, ...] with rows `slots`, int32 [B], replaced by `states` [B, ...]."""
    flat = pool.reshape(pool.shape[0], -1)
    new = states.reshape(states.shape[0], -1).astype(pool.dtype)
    index = mx.broadcast_to(slots[:, None], new.shape)
    return mx.put_along_axis(flat, index, new, axis=0).reshape(pool.shape)


class RecurrentRows(RowOffsets):
    """One recurrent layer, all rows: pools of states, a slot a row, given out as the group's pages.

    A slot is zeroed before it gets an owner, and zero is the state that a model starts from.

    pools: one array [num_slots + 1, ...] for each of the layer's state arrays. Slot 0 is scratch.
    """

    prefill_maintenance = None
    composed = None
    state_needs_dispose = False
    minimum_reusable_offset = 0

    def __init__(self, shape: StateShape, group: RowGroup, num_pages: int) -> None:
        self.shape = shape
        self.group = group
        self._num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        slots = self._num_pages + 1
        self.pools = [mx.zeros((slots, *shape), dtype) for shape, dtype in self.shape.arrays]
        self._offsets = ()
        self._round: list[tuple[tuple[int, ...], list[mx.array]]] | None = None

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        return (self,)

    def signature(self) -> str:
        return "ssm"

    def bytes_per_token(self) -> int:
        return 0

    def max_append_tokens(self) -> float:
        return math.inf

    def prepare_decode_step(self) -> DecodeStepPlan:
        """Adopts the rows bound to the group."""
        if not self.group.num_rows:
            raise IndexError(f"{self.signature()}: no row is bound")
        self._offsets = self.group.offsets
        return DecodeStepPlan(fetch="ring", num_rows=self.group.num_rows, width=self.group.width)

    def decode_phase(self) -> Literal["concat", "ring"]:
        return "ring"

    def decode_slot(self, plan: DecodeStepPlan) -> DecodeSlot:
        key = f"{self.signature()}:{len(self.pools)}"
        return self.group.slot(key, lambda: _slot(key, self.group.spec.name, len(self.pools)))

    def decode_inputs(self, plan: DecodeStepPlan, step: DecodeStepInputs) -> list[mx.array]:
        return list(self.pools)

    def commit_decode_step(self, slot: DecodeSlot, outputs: Sequence[mx.array]) -> list[mx.array]:
        self.pools = list(outputs)
        self._offsets = self.group.advanced(self._offsets)
        if self._round is not None:
            self._round.append((self._offsets, self.pools))
        return []

    def prefill(self, view: PrefillView) -> RecurrentPrefill:
        return RecurrentPrefill(self, view)

    def scrub(self, pages: mx.array) -> None:
        for pool in self.pools:
            pool[pages] = mx.zeros((), pool.dtype)

    def state(self) -> list[mx.array]:
        return list(self.pools)

    def is_trimmable(self) -> bool:
        return False

    def trim(self, num_tokens: int, *, bypass: bool = False) -> None:
        """Raises ValueError always: what a position did to the state cannot be taken back."""
        raise ValueError("recurrent state cannot be trimmed")

    def spec_round_begin(self) -> None:
        """From here on each position's states are kept, so a round costs a copy of the pools a step."""
        self._round = [(self._offsets, [mx.array(pool) for pool in self.pools])]

    def spec_round_commit(self) -> None:
        self._round = None

    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        """Each row gets back the state it had after its first keep[i] positions, bit for bit.

        Raises:
            ValueError: no round is open, or a row would keep more than it appended.
        """
        if self._round is None:
            raise ValueError("no speculative round is open")
        appended = len(self._round) - 1
        for kept in keep:
            if not 0 <= kept <= appended:
                raise ValueError(f"keep is {kept}; the row appended {appended} positions in this round")
        slots = self.group.table[:, 0]
        pools = [mx.array(pool) for pool in self._round[-1][1]]
        for row, kept in enumerate(keep):
            slot = int(slots[row])
            for pool, kept_pool in zip(pools, self._round[kept][1], strict=True):
                pool[slot] = kept_pool[slot]
        self.pools = pools
        before = self._round[0][0]
        self._offsets = tuple(offset + kept for offset, kept in zip(before, keep, strict=True))
        self._round = None

    def capture_donor_rows(self) -> KvDonorRows:
        """Raises ValueError: there are no keys and values."""
        raise ValueError("recurrent state has no keys and values to lend")

    def dispose(self) -> None:
        self.pools = []
        self._offsets = ()
        self._round = None


def _slot(key: str, group: str, num_arrays: int) -> DecodeSlot:
    def trace(inputs: Sequence[mx.array], step: DecodeStepInputs) -> RecurrentStandIn:
        return RecurrentStandIn(inputs, step.view(group).table[:, 0])

    return DecodeSlot(key=key, num_inputs=num_arrays, num_outputs=num_arrays, trace=trace)
