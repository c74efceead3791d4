"""The decode step: one closure over all rows, compiled once a bucket, eager where it cannot be."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.allocation import is_allocation_failure
from mlxd.batching.attention import DecodeVariant
from mlxd.batching.few_rows import ROW_BUCKETS, multiplies_few_rows, own_products
from mlxd.batching.own_forward import own_forward
from mlxd.batching.rotation import note_rotations
from mlxd.batching.sampler import SamplingShape, sample
from mlxd.caches.composite import Path, assemble
from mlxd.caches.contract import DecodeSlot, RowCache
from mlxd.caches.paged_view import PagedView
from mlxd.caches.row_group import RowGroup, row_bucket
from mlxd.caches.sizing import GroupSpec

logger = logging.getLogger(__name__)

StepFunction = Callable[..., list[mx.array]]

_Kept = TypeVar("_Kept")

MOST_GRAPHS = 512
"""Kept at once: one of thirty layers takes 4 MB of the host's memory, and clients choose what they hold."""
MOST_WANTED = 64
"""Remembered at once, of buckets that ran eagerly."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """All that a compiled step is specialised on; nothing in it changes from step to step.

    Attributes:
        num_rows: rows of the step, idle ones included; a power of two.
        widths: page-table columns, one a group.
        slots: the caches' slot keys, in layer order.
        sampling: which parts of the sampler are in the graph.
        attention: the decode attention variant.
        products: whether they are our own.
    """

    num_rows: int
    widths: tuple[int, ...]
    slots: tuple[str, ...] = field(repr=False)
    sampling: SamplingShape
    attention: str
    products: bool

    def __str__(self) -> str:
        widths = "x".join(map(str, self.widths))
        return (
            f"rows={self.num_rows} pages={widths} sampling={self.sampling.label} attention={self.attention}"
            f"{' products=kernel' if self.products else ''}"
        )


class StepInputs:
    """The arrays that all caches of one step share (contract.DecodeStepInputs)."""

    def __init__(self, positions: mx.array, views: dict[str, PagedView]) -> None:
        self.positions = positions
        self._views = views

    def view(self, group: str) -> PagedView:
        return self._views[group]


@dataclass(slots=True)
class _Traces:
    """How often the bodies of graphs were traced: once each, where nothing retraces them."""

    count: int = 0


class DecodeStep:
    """Runs steps over the rows bound to its groups.

    A step either succeeds whole, and every cache has adopted its outputs, or raises and has changed nothing.
    A compiled graph that fails is retired for good and the same step runs eagerly; for want of memory that
    would fail as well, so it raises. Of too many graphs the one goes that was not used for longest.

    Attributes:
        enabled: whether graphs are compiled at all.
        eager_at: row buckets that run eagerly all the same.
        own_products: row buckets whose products are our own; none where the model has no such layers.
        wanted: buckets that ran eagerly because they were not traced yet, oldest first; the latest ones.
        compiles, failures: graphs compiled, and retired, so far.
        compiled_steps, eager_steps: steps run so far, by kind.
    """

    def __init__(
        self, model: nn.Module, caches: Sequence[RowCache], paths: Sequence[Path], groups: Sequence[RowGroup]
    ) -> None:
        self._model = model
        self._paths = tuple(paths)
        self._caches = caches
        self._groups = groups
        self._rotations = note_rotations(model)
        self._graphs: OrderedDict[Bucket, StepFunction | None] = OrderedDict()
        self._shown: tuple[str, ...] | None = None
        self._traces = _Traces()
        self._tables: dict[str, tuple[mx.array, mx.array]] = {}
        self.enabled = True
        self.eager_at: frozenset[int] = frozenset()
        self.own_products = ROW_BUCKETS if multiplies_few_rows(model) else frozenset()
        self.wanted: OrderedDict[Bucket, None] = OrderedDict()
        self.compiles = 0
        self.failures = 0
        self.compiled_steps = 0
        self.eager_steps = 0

    @property
    def num_traces(self) -> int:
        """Of all graphs, those that failed among them."""
        return self._traces.count

    @property
    def retraces(self) -> int:
        return max(0, self._traces.count - self.compiles)

    def compiles_at(self, num_rows: int) -> bool:
        """Whether steps of so many rows are compiled."""
        return self.enabled and row_bucket(num_rows) not in self.eager_at

    @property
    def has_room(self) -> bool:
        """Whether one more graph takes none away."""
        return len(self._graphs) < MOST_GRAPHS

    @property
    def buckets(self) -> tuple[str, ...]:
        """Of graphs that are there. Asked for once a step, so made only when they change."""
        if self._shown is None:
            self._shown = tuple(str(bucket) for bucket, graph in self._graphs.items() if graph is not None)
        return self._shown

    def run(
        self,
        tokens: mx.array,
        positions: mx.array,
        attention: DecodeVariant,
        shape: SamplingShape,
        sampling: Sequence[mx.array],
        *,
        may_trace: bool,
    ) -> tuple[list[mx.array], bool]:
        """Build one step; the caches move on, nothing is evaluated.

        Args:
            tokens, positions: int32 [num_rows], input token of each row and where its keys and values go.
            sampling: the sampler's inputs for `shape`.
            may_trace: whether a bucket met for the first time may be compiled now; else it runs eagerly and
                is `wanted`.
        Returns:
            The sampler's outputs, named by `shape.outputs`, and whether the step is compiled.
        """
        plans = [cache.prepare_decode_step() for cache in self._caches]
        slots = [cache.decode_slot(plan) for cache, plan in zip(self._caches, plans, strict=True)]
        bucket = Bucket(
            num_rows=int(tokens.shape[0]),
            widths=tuple(group.width for group in self._groups),
            slots=tuple(slot.key for slot in slots),
            sampling=shape,
            attention=attention.name,
            products=row_bucket(int(tokens.shape[0])) in self.own_products,
        )
        step = StepInputs(positions, {})
        arrays = [tokens, positions, *self._device_tables(), *sampling]
        for cache, plan in zip(self._caches, plans, strict=True):
            arrays += cache.decode_inputs(plan, step)
        body = self._body(slots, attention, bucket, len(sampling))
        outputs = self._run_compiled(bucket, body, arrays, may_trace)
        compiled = outputs is not None
        if outputs is None:
            outputs = body(*arrays)
        del arrays
        self.compiled_steps += compiled
        self.eager_steps += not compiled
        return self._commit(slots, outputs), compiled

    def _device_tables(self) -> list[mx.array]:
        """Page tables on the device, uploaded anew only where the host's changed."""
        arrays: list[mx.array] = []
        for group in self._groups:
            if group.changed:
                self._tables[group.spec.name] = mx.array(group.table), mx.array(group.start)
                group.changed = False
            arrays += self._tables[group.spec.name]
        return arrays

    def _run_compiled(
        self, bucket: Bucket, body: StepFunction, arrays: Sequence[mx.array], may_trace: bool
    ) -> list[mx.array] | None:
        """None where the step must run eagerly."""
        if not self.compiles_at(bucket.num_rows):
            return None
        if bucket not in self._graphs:
            if not may_trace:
                _remember(self.wanted, bucket, None, MOST_WANTED)
                return None
            self.wanted.pop(bucket, None)
            _remember(self._graphs, bucket, _compiled(body, self._traces), MOST_GRAPHS)
            self._shown = None
            self.compiles += 1
        self._graphs.move_to_end(bucket)
        function = self._graphs[bucket]
        if function is None:
            return None
        try:
            return function(*arrays)
        except (RuntimeError, TypeError, ValueError) as error:
            if is_allocation_failure(error):
                raise
            logger.warning("compiled step retired, running it eagerly bucket=%s error=%s", bucket, error)
            self._graphs[bucket] = self._shown = None
            self.failures += 1
            return None

    def _body(
        self, slots: Sequence[DecodeSlot], attention: DecodeVariant, bucket: Bucket, num_sampling: int
    ) -> StepFunction:
        """The step as a function of arrays: it captures the model, slots and specs, no cache, no state."""
        model, paths, rotations = self._model, self._paths, self._rotations
        attention = attention.knowing(rotations)
        specs: tuple[GroupSpec, ...] = tuple(group.spec for group in self._groups)

        def body(*arrays: mx.array) -> list[mx.array]:
            tokens, positions = arrays[:2]
            at = 2
            views = {}
            for spec in specs:
                table, start = arrays[at : at + 2]
                views[spec.name] = PagedView(spec, table, start, positions, attention)
                at += 2
            sampling = arrays[at : at + num_sampling]
            at += num_sampling
            step = StepInputs(positions, views)
            stand_ins = []
            for slot in slots:
                stand_ins.append(slot.trace(arrays[at : at + slot.num_inputs], step))
                at += slot.num_inputs
            with rotations.during(positions), own_forward(), own_products(bucket.products):
                logits = model(tokens[:, None], cache=assemble(paths, stand_ins))[:, -1]
            drawn = sample(bucket.sampling, logits, tokens, sampling)
            return [*drawn, *(array for stand_in in stand_ins for array in stand_in.outputs)]

        return body

    def _commit(self, slots: Sequence[DecodeSlot], outputs: list[mx.array]) -> list[mx.array]:
        at = len(outputs) - sum(slot.num_outputs for slot in slots)
        drawn = outputs[:at]
        for cache, slot in zip(self._caches, slots, strict=True):
            cache.commit_decode_step(slot, outputs[at : at + slot.num_outputs])
            at += slot.num_outputs
        return drawn


def _compiled(body: StepFunction, traces: _Traces) -> StepFunction:
    def traced(*arrays: mx.array) -> list[mx.array]:
        traces.count += 1
        return body(*arrays)

    return cast(StepFunction, mx.compile(traced))


def _remember(kept: OrderedDict[Bucket, _Kept], bucket: Bucket, what: _Kept, most: int) -> None:
    """As the latest of at most so many."""
    kept[bucket] = what
    while len(kept) > most:
        kept.popitem(last=False)
