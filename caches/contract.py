"""The contract between the decode step and every kind of cache.

One object holds one layer's state for all rows of the batch. It declares the slot it takes in the compiled
step and applies the step's outputs back; each row keeps its own positions and its own precision boundary;
identity is a string that is compared, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast, runtime_checkable

from mlxd.caches.signatures import SignatureError

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxd.caches.paged_view import ChunkWriter, PagedView, PrefillView


@dataclass(frozen=True, slots=True)
class DecodeStepPlan:
    """What one cache does in the coming append of one position to each of its rows.

    Attributes:
        fetch: "concat": the step sees the live prefix and returns new columns, written outside the graph;
            "ring": the step sees whole buffers, writes in place and returns them.
        num_rows: rows of the compiled step, idle ones included.
        width: columns of the group's page table; 0 for kinds without pages.
    """

    fetch: Literal["concat", "ring"]
    num_rows: int
    width: int


class DecodeStepInputs(Protocol):
    """Arrays that all caches of one step share."""

    @property
    def positions(self) -> mx.array:
        """int32 [num_rows], where each row's new position is written; its RoPE position too."""
        ...

    def view(self, group: str) -> PagedView:
        """A group's page tables, seen from inside the step."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeSlot:
    """A cache's place in the compiled step: plain data that captures no cache and no array.

    Attributes:
        key: everything about this cache that changes the traced operations, and nothing that changes by step.
        num_inputs, num_outputs: arrays it takes and returns, in order.
        trace: builds the stand-in that the model sees in place of the cache; `outputs` of it are this slot's.
    """

    key: str
    num_inputs: int
    num_outputs: int
    trace: Callable[[Sequence[mx.array], DecodeStepInputs], DecodeStandIn]


class DecodeStandIn(Protocol):
    """What a layer of mlx-lm gets in place of its cache, inside a step."""

    @property
    def outputs(self) -> Sequence[mx.array]: ...


class PrefillStandIn(Protocol):
    """What a layer of mlx-lm gets in place of its cache, inside a prefill forward."""

    def finish(self) -> mx.array | None:
        """The forward is built: what it left here goes into the cache.

        Returns:
            An array whose evaluation writes into the layer's pools, where those stay the arrays they are.
        """
        ...


class PrefillMaintenance(Protocol):
    """Moves rows to their stored precision, each at its own boundary and at no other moment."""

    def begin_prefill(self) -> None:
        """Appends now store what they are given and convert nothing."""
        ...

    def commit_prefill(self, rows: Sequence[int]) -> None:
        """Convert these rows: their own planned chunk ended with the forward just evaluated."""
        ...

    def end_prefill(self) -> None: ...


class ComposedStorage(Protocol):
    """A storage that another cache holds and may swap."""

    @property
    def current(self) -> CompiledDecodeCache: ...


@dataclass(frozen=True, slots=True)
class KvDonorRows:
    """One layer's keys and values for queries that are not its own; valid whatever happens to the owner.

    Row i's columns are starts[i] <= j < ends[i]; column j holds position offsets[i] - ends[i] + j.

    Attributes:
        keys, values: [num_rows, n_kv_heads, width, head_dim], oldest first.
        offsets, starts, ends: one int a row.
    """

    keys: mx.array
    values: mx.array
    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


class KvDonorAttention(Protocol):
    """Like KvDonorRows, but the storage stays as it is and attends by itself."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def starts(self) -> tuple[int, ...]: ...

    @property
    def ends(self) -> tuple[int, ...]: ...

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attention of [num_rows, n_heads, L, key_dim] to each row's columns starts[i] <= j < ends[i]."""
        ...


@runtime_checkable
class RowBatch(Protocol):
    """Holds rows that come and go."""

    @property
    def num_rows(self) -> int: ...


class CompiledDecodeCache(Protocol):
    """One layer's state, drivable by the compiled step.

    `offset` is the largest number of committed positions over the rows; `row_offsets` says it a row.
    Optional members are None or absent where a kind has no use for them: `prefill_maintenance`, `composed`,
    `capture_donor_attention` and the three `spec_round_*`, which come all or none.
    """

    @property
    def prefill_maintenance(self) -> PrefillMaintenance | None: ...

    @property
    def composed(self) -> ComposedStorage | None: ...

    @property
    def state_needs_dispose(self) -> bool:
        """Whether `state()` returns temporary views that must not be kept."""
        ...

    @property
    def offset(self) -> int: ...

    @property
    def row_offsets(self) -> tuple[int, ...]: ...

    @property
    def rope_offsets(self) -> mx.array | None:
        """int32 [num_rows], each row's position before the coming append; None outside a step."""
        ...

    @property
    def minimum_reusable_offset(self) -> int:
        """Shortest prefix from which this state may be resumed; 0: any."""
        ...

    def signature(self) -> str:
        """Storage identity: all that changes bytes or arithmetic, never offsets or capacity."""
        ...

    def bytes_per_token(self) -> int:
        """Bytes that one more position of one row costs in this layer; 0 for recurrent state."""
        ...

    def max_append_tokens(self) -> float:
        """Positions until the first row changes precision; infinity where none is pending."""
        ...

    def prepare_decode_step(self) -> DecodeStepPlan:
        """Host bookkeeping for one more position a row, without the write; harmless if the step is abandoned.

        Raises:
            IndexError: a row's next position has no room. Writes check no bounds, so this is the only guard.
        """
        ...

    def decode_phase(self) -> Literal["concat", "ring"]:
        """The fetch `prepare_decode_step` will choose; changes nothing."""
        ...

    def decode_slot(self, plan: DecodeStepPlan) -> DecodeSlot: ...

    def decode_inputs(self, plan: DecodeStepPlan, step: DecodeStepInputs) -> list[mx.array]:
        """The slot's inputs. Drop them before evaluation: a kept reference turns the write into a copy."""
        ...

    def commit_decode_step(self, slot: DecodeSlot, outputs: Sequence[mx.array]) -> list[mx.array]:
        """Adopt the slot's outputs, advance every row by one; returns what else must be evaluated.

        Called once a successful step, never after a failed one.
        """
        ...

    def state(self) -> list[mx.array]:
        """Arrays whose evaluation makes the cache real, in the order persistence stores them."""
        ...

    def is_trimmable(self) -> bool: ...

    def trim(self, num_tokens: int, *, bypass: bool = False) -> None:
        """Drop the newest positions of every row by bookkeeping alone.

        `bypass` allows it where `is_trimmable` does not hold, right after a multi-token append.
        """
        ...

    def spec_round_begin(self) -> None: ...

    def spec_round_commit(self) -> None: ...

    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        """Undo all but the first keep[i] positions that row i appended since `spec_round_begin`."""
        ...

    def capture_donor_rows(self) -> KvDonorRows: ...

    def dispose(self) -> None:
        """Release the arrays; may be called again. Captures stay valid."""
        ...


class PageStorage(Protocol):
    """Pools of one group's pages."""

    def scrub(self, pages: mx.array) -> None:
        """Zero these pages, int32 [n], before they get another owner."""
        ...

    def state(self) -> list[mx.array]:
        """The pools, [num_pages + 1, ...] each; what is assigned into them is kept."""
        ...


class RowCache(CompiledDecodeCache, Protocol):
    """What the runner drives: a compiled-decode cache whose rows also prefill."""

    @property
    def storages(self) -> Sequence[PageStorage]:
        """Its pools: one for its group, and one for each successor of it, in order."""
        ...

    def prefill(self, view: PrefillView) -> PrefillStandIn:
        """The stand-in for one prefill forward; its appends land in this cache.

        Args:
            view: of the layer's group, or of its successor where that serves the chunk.
        """
        ...

    def keeps_pools(self, writer: ChunkWriter) -> bool:
        """Whether its pools stay the arrays they are through a prefill forward whose view has this writer."""
        ...

    def reset(self) -> None:
        """Empty pools, as new: also after an evaluation that failed, which the old arrays would repeat."""
        ...


_COMPILED_MEMBERS = (
    "prepare_decode_step",
    "decode_phase",
    "decode_slot",
    "decode_inputs",
    "commit_decode_step",
)


def is_row_batch(cache: object) -> bool:
    """Ask this first: a layout of rows may report the same signature as its one-row form."""
    return isinstance(cache, RowBatch)


def is_compiled_decode(cache: object) -> bool:
    """Whether the compiled step can drive it: all five methods, no fewer."""
    return all(callable(getattr(cache, name, None)) for name in _COMPILED_MEMBERS)


def has_spec_round(cache: object) -> bool:
    """Whether it can undo part of a round; having only some of the three methods is an error.

    Raises:
        SignatureError: one or two of the three are there.
    """
    names = ("spec_round_begin", "spec_round_commit", "spec_round_rollback")
    present = [name for name in names if callable(getattr(cache, name, None))]
    if present and len(present) != len(names):
        raise SignatureError(f"{type(cache).__name__} has {present} but not all of {names}")
    return bool(present)


def donor_attention_of(cache: object) -> KvDonorAttention | None:
    """What it lends now to attend by itself; None for a kind that has no such thing."""
    capture = getattr(cache, "capture_donor_attention", None)
    return None if capture is None else cast(KvDonorAttention, capture())
