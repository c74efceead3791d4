"""The decode step: one closure over all rows, compiled once a bucket, eager where it cannot be."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.attention import DecodeVariant
from mlxd.batching.sampler import Sampled, SamplingShape, sample
from mlxd.caches.contract import DecodeSlot
from mlxd.caches.paged import PagedRows
from mlxd.caches.paged_view import PagedView
from mlxd.caches.row_group import RowGroup
from mlxd.caches.sizing import GroupSpec

logger = logging.getLogger(__name__)

StepFunction = Callable[..., tuple[mx.array, ...]]


@dataclass(frozen=True, slots=True)
class Bucket:
    """All that a compiled step is specialised on; nothing in it changes from step to step.

    Attributes:
        num_rows: rows of the step, idle ones included; a power of two.
        widths: page-table columns, one a group.
        slots: the caches' slot keys, in layer order.
        sampling: which parts of the sampler are in the graph.
        attention: the decode attention variant.
    """

    num_rows: int
    widths: tuple[int, ...]
    slots: tuple[str, ...]
    sampling: SamplingShape
    attention: str

    def __str__(self) -> str:
        widths = "x".join(map(str, self.widths))
        return f"{self.num_rows} rows, {widths} pages, {self.sampling}, {self.attention}"


class StepInputs:
    """The arrays that all caches of one step share (contract.DecodeStepInputs)."""

    def __init__(self, positions: mx.array, views: dict[str, PagedView]) -> None:
        self.positions = positions
        self._views = views

    def view(self, group: str) -> PagedView:
        return self._views[group]


@dataclass(slots=True)
class _Graph:
    """A bucket's closure. `traces` counts how often its body ran under compilation: 1, or something retraced it."""

    function: StepFunction
    traces: int = 0


class DecodeStep:
    """Runs steps over the rows bound to its groups.

    A step either succeeds whole, and every cache has adopted its outputs, or raises and has changed nothing. A compiled
    graph that fails is retired for good and the same step runs eagerly.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: Sequence[PagedRows],
        groups: Sequence[RowGroup],
        mode: Literal["on", "off"],
    ) -> None:
        self._model = model
        self._caches = caches
        self._groups = groups
        self._graphs: dict[Bucket, _Graph] = {}
        self._wanted: dict[Bucket, None] = {}
        self._retired: set[Bucket] = set()
        self._device_tables: dict[str, tuple[mx.array, mx.array]] = {}
        self.mode: Literal["on", "off"] = mode
        self.trace_s = 0.0
        """Longest trace so far, graph building and first evaluation together."""
        self.compiled_steps = 0
        self.eager_steps = 0

    @property
    def compiles(self) -> int:
        return len(self._graphs)

    @property
    def retraces(self) -> int:
        return sum(graph.traces - 1 for graph in self._graphs.values())

    @property
    def failures(self) -> int:
        return len(self._retired)

    @property
    def buckets(self) -> tuple[str, ...]:
        return tuple(str(bucket) for bucket in self._graphs)

    def run(
        self,
        tokens: mx.array,
        positions: mx.array,
        attention: DecodeVariant,
        shape: SamplingShape,
        sampling: Sequence[mx.array],
        *,
        may_trace: bool,
    ) -> tuple[Sampled, bool]:
        """Build one step; the caches and the sampler state move on, nothing is evaluated.

        Args:
            tokens, positions: int32 [num_rows], input token of each row and where its keys and values go.
            sampling: the sampler's inputs.
            may_trace: whether a bucket met for the first time may be compiled now; else it runs eagerly and is
                remembered in `wanted`.
        Returns:
            What was drawn, and whether the step is compiled.
        """
        plans = [cache.prepare_decode_step() for cache in self._caches]
        slots = [cache.decode_slot(plan) for cache, plan in zip(self._caches, plans, strict=True)]
        bucket = Bucket(
            num_rows=int(tokens.shape[0]),
            widths=tuple(group.width for group in self._groups),
            slots=tuple(slot.key for slot in slots),
            sampling=shape,
            attention=attention.name,
        )
        shared = [tokens, positions, *self._tables(), *sampling]
        step = StepInputs(positions, {})
        arrays = shared + [
            array
            for cache, plan in zip(self._caches, plans, strict=True)
            for array in cache.decode_inputs(plan, step)
        ]
        outputs, compiled = self._call(bucket, slots, attention, len(sampling), arrays, may_trace)
        del arrays
        return self._commit(slots, shape, outputs), compiled

    def _tables(self) -> list[mx.array]:
        """Page tables on the device, uploaded anew only where the host's changed."""
        arrays: list[mx.array] = []
        for group in self._groups:
            if group.changed or group.spec.name not in self._device_tables:
                self._device_tables[group.spec.name] = mx.array(group.table), mx.array(group.start)
                group.changed = False
            arrays += self._device_tables[group.spec.name]
        return arrays

    def _call(
        self,
        bucket: Bucket,
        slots: Sequence[DecodeSlot],
        attention: DecodeVariant,
        num_sampling: int,
        arrays: Sequence[mx.array],
        may_trace: bool,
    ) -> tuple[tuple[mx.array, ...], bool]:
        specs = [group.spec for group in self._groups]
        body = _body(self._model, specs, slots, attention, bucket.sampling, num_sampling)
        if self.mode == "on" and bucket not in self._retired:
            graph = self._graphs.get(bucket)
            if graph is None and may_trace:
                graph = self._compile(bucket, body)
            if graph is not None:
                try:
                    outputs = graph.function(*arrays)
                except (RuntimeError, TypeError, ValueError) as error:
                    self._retire(bucket, error)
                else:
                    self.compiled_steps += 1
                    return outputs, True
            else:
                self._wanted[bucket] = None
        self.eager_steps += 1
        return body(*arrays), False

    def _compile(self, bucket: Bucket, body: StepFunction) -> _Graph:
        def traced(*arrays: mx.array) -> tuple[mx.array, ...]:
            graph.traces += 1
            return body(*arrays)

        graph = _Graph(mx.compile(traced))
        self._graphs[bucket] = graph
        self._wanted.pop(bucket, None)
        return graph

    def _retire(self, bucket: Bucket, error: Exception) -> None:
        self._retired.add(bucket)
        self._graphs.pop(bucket, None)
        logger.warning("compiled step retired, running eagerly bucket=%s error=%s", bucket, error)

    def _commit(
        self, slots: Sequence[DecodeSlot], shape: SamplingShape, outputs: tuple[mx.array, ...]
    ) -> Sampled:
        num_cache = sum(slot.num_outputs for slot in slots)
        sampled = Sampled.from_arrays(shape, outputs[: len(outputs) - num_cache])
        at = len(outputs) - num_cache
        for cache, slot in zip(self._caches, slots, strict=True):
            cache.commit_decode_step(slot, outputs[at : at + slot.num_outputs])
            at += slot.num_outputs
        return sampled
