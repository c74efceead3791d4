"""Recurrent state: a fixed number of bytes a row, read and replaced whole at every position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd.caches.contract import DecodeSlot, DecodeStepInputs, DecodeStepPlan, KvDonorRows
from mlxd.caches.mlx_lm_import import ArraysCache
from mlxd.caches.paged_view import PrefillView
from mlxd.caches.pooled import PooledRows
from mlxd.caches.rounds import offsets_kept
from mlxd.caches.row_group import RowGroup


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
        super().__init__(len(rows.planes))
        self._rows = rows
        self._slots = view.pages
        if view.start:
            for index, pool in enumerate(rows.planes):
                self[index] = pool[self._slots]

    def finish(self) -> None:
        self._rows.planes = [
            replace_rows(pool, self._slots, _full_size(self[index], pool.shape[1:]))
            for index, pool in enumerate(self._rows.planes)
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


class RecurrentRows(PooledRows):
    """One recurrent layer, all rows: pools of states, a slot a row, given out as the group's pages.

    A slot is zeroed before it gets an owner, and zero is the state that a model starts from.

    planes: one array [num_slots + 1, ...] for each of the layer's state arrays.
    """

    def __init__(self, shape: StateShape, group: RowGroup, num_pages: int) -> None:
        super().__init__(group, num_pages, shape.arrays)
        self.shape = shape

    def _forget_rows(self) -> None:
        super()._forget_rows()
        self._round: list[tuple[tuple[int, ...], list[mx.array]]] | None = None

    def signature(self) -> str:
        return "ssm"

    def bytes_per_token(self) -> int:
        return 0

    def decode_slot(self, plan: DecodeStepPlan) -> DecodeSlot:
        key = f"{self.signature()}:{len(self.planes)}"
        return self.group.slot(key, lambda: _slot(key, self.group.spec.name, len(self.planes)))

    def commit_decode_step(self, slot: DecodeSlot, outputs: Sequence[mx.array]) -> list[mx.array]:
        super().commit_decode_step(slot, outputs)
        if self._round is not None:
            self._round.append((self._offsets, self.planes))
        return []

    def prefill(self, view: PrefillView) -> RecurrentPrefill:
        return RecurrentPrefill(self, view)

    def is_trimmable(self) -> bool:
        return False

    def trim(self, num_tokens: int, *, bypass: bool = False) -> None:
        """Raises ValueError always: what a position did to the state cannot be taken back."""
        raise ValueError("recurrent state cannot be trimmed")

    def spec_round_begin(self) -> None:
        """From here on each position's states are kept, so a round costs a copy of the pools a step."""
        self._round = [(self._offsets, [mx.array(pool) for pool in self.planes])]

    def spec_round_commit(self) -> None:
        self._round = None

    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        """Each row gets back the state it had after its first keep[i] positions, bit for bit.

        Raises:
            ValueError: no round is open, or a row would keep more than it appended.
        """
        offsets = offsets_kept(None if self._round is None else self._round[0][0], self._offsets, keep)
        assert self._round is not None
        slots = self.group.table[:, 0]
        pools = [mx.array(pool) for pool in self._round[-1][1]]
        for row, kept in enumerate(keep):
            slot = int(slots[row])
            for pool, kept_pool in zip(pools, self._round[kept][1], strict=True):
                pool[slot] = kept_pool[slot]
        self.planes, self._offsets, self._round = pools, offsets, None

    def capture_donor_rows(self) -> KvDonorRows:
        """Raises ValueError: there are no keys and values."""
        raise ValueError("recurrent state has no keys and values to lend")


def _slot(key: str, group: str, num_arrays: int) -> DecodeSlot:
    def trace(inputs: Sequence[mx.array], step: DecodeStepInputs) -> RecurrentStandIn:
        return RecurrentStandIn(inputs, step.view(group).table[:, 0])

    return DecodeSlot(key=key, num_inputs=num_arrays, num_outputs=num_arrays, trace=trace)
