"""Executes step plans on MLX: one compiled decode step over all rows, prefill beside it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.allocation import allocating
from mlxd.batching.attention import DecodeVariant, install_seam, variant
from mlxd.batching.batch import Batch
from mlxd.batching.decode import DecodeStep
from mlxd.batching.device import on_cpu
from mlxd.batching.mlx_step import Launch, LaunchedForward, MlxStep, StepClock
from mlxd.batching.parameters import main_dtype
from mlxd.batching.plan import DecodeEntry, PrefillChunk, RestoredPage, StepPlan
from mlxd.batching.prefill import Prefill
from mlxd.batching.row import Row
from mlxd.batching.runner import RunnerInfo
from mlxd.batching.sampler_state import Draw
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.composite import Composite
from mlxd.caches.contract import PageStorage
from mlxd.caches.kinds import Layer
from mlxd.caches.page_io import PageArrays
from mlxd.caches.persistence import PageFormat
from mlxd.caches.row_group import RowGroup, row_bucket, row_groups
from mlxd.caches.sizing import MemoryPlan
from mlxd.metrics.stats import RunnerCounters


class MlxRunner:
    """One model, its page pools and its decode step. Made, used and closed on one thread.

    Args:
        trace_bound_s: a bucket met in service is traced at once where the longest trace so far took no
            longer; else it runs eagerly until `maintain` is called.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        memory: MemoryPlan,
        info: RunnerInfo,
        *,
        trace_bound_s: float = float("inf"),
    ) -> None:
        self.model = model
        self.info = info
        self._memory = memory
        self._groups = row_groups(memory.groups)
        place: dict[int, int] = {}
        for g, group in enumerate(memory.groups):
            place |= {index: g for index in group.spec.layers if index not in place}
        self._layer_groups = [place[layer.shape.index] for layer in layers]
        self._caches = [
            layer.kind.make(layer.shape, self._groups[g], memory.groups[g].num_pages)
            for layer, g in zip(layers, self._layer_groups, strict=True)
        ]
        self._storages = self._storages_by_group()
        paths = [layer.path for layer in layers]
        self._whole = Composite(self._caches, paths)
        self._page_arrays = [PageArrays(storages) for storages in self._storages]
        self._whole.signature()  # raises before any row runs where a kind cannot say what it is
        self._prefill = Prefill(model, self._caches, paths, memory, self._layer_groups)
        self.step = DecodeStep(model, self._caches, paths, self._groups)
        self._trace_bound_s = trace_bound_s
        self._trace_s = 0.0
        self._clock = StepClock(launch_blocks=on_cpu())
        self._launched: MlxStep | None = None
        install_seam(model)
        self.set_attention("gathered")
        self.reset()

    def _storages_by_group(self) -> list[list[PageStorage]]:
        storages: dict[str, list[PageStorage]] = {group.spec.name: [] for group in self._groups}
        for cache, g in zip(self._caches, self._layer_groups, strict=True):
            group: RowGroup | None = self._groups[g]
            for storage in cache.storages:
                assert group is not None, f"{cache.signature()} has more storages than groups"
                storages[group.spec.name].append(storage)
                group = group.successor
        return list(storages.values())

    def reset(self) -> None:
        """Empty pools, no row known, and no graph to trace: as new, also after a step that failed.

        Raises:
            OutOfMemoryError: there is no memory for the pools, though the old ones and what MLX keeps for
                reuse were given back first.
        """
        self._batch = Batch(self.info.vocab_size)
        self._launched = None
        self.step.wanted.clear()
        with allocating():
            self._whole.reset()
            mx.clear_cache()
            mx.eval(self._whole.state())

    @property
    def dtype(self) -> mx.Dtype:
        """Of most parameters, so of activations."""
        return main_dtype(self.model)

    @property
    def signature(self) -> str:
        """Identity of the whole model's state."""
        return self._whole.signature()

    @property
    def attention(self) -> DecodeVariant:
        """The decode attention variant of row buckets for which none was chosen."""
        return self._default_attention

    def set_attention(self, default: str, by_rows: Mapping[int, str] | None = None) -> None:
        """Choose the decode attention variant, by row bucket where they differ."""
        self._default_attention = variant(default)
        self._attention = {rows: variant(name) for rows, name in (by_rows or {}).items()}
        variants = self._default_attention, *self._attention.values()
        keep_pools = [chosen.keeps_pools for chosen in variants]
        self._keeps_pools = any(keep_pools)
        writer = self._default_attention.writer if all(keep_pools) else None
        self._writer = writer if writer is not None and self._prefill.keeps_pools(writer) else None

    def describe(self, *, max_batch: int | None = None, compiled: bool | None = None, **notes: str) -> None:
        """Change what `info` says."""
        self.info = replace(
            self.info,
            max_batch=self.info.max_batch if max_batch is None else max_batch,
            compiled=self.info.compiled if compiled is None else compiled,
            notes={**self.info.notes, **notes},
        )

    def launch(self, plan: StepPlan) -> MlxStep:
        """Start a step.

        Raises:
            IndexError: a row's position is outside its pages. Nothing was launched for it.
            OutOfMemoryError: part of it may have run; see `Runner.launch`.
        """
        num_traces, prefill_first = self.step.num_traces, self._keeps_pools and self._writer is None
        replaces_pools = plan.replaces_pages or (prefill_first and bool(plan.prefill))
        with allocating():
            begun_at = time.perf_counter()
            if (plan.prefill and self._prefill.evaluates) or not (plan.prefill or plan.decode):
                self._finish_launched()  # pools are replaced before the step is built, or by a later one
            self._copy(plan.copies)
            self._scrub(plan.scrub)
            self._restore(plan.restored)
            if prefill_first:
                forwards, second_at = self._run_prefill(plan.prefill, replaces_pools), time.perf_counter()
                draw, compiled = self._decode(plan.decode, replaces_pools)
            else:
                (draw, compiled), second_at = self._decode(plan.decode, replaces_pools), time.perf_counter()
                forwards = self._run_prefill(plan.prefill, replaces_pools)
        launch = Launch(begun_at, second_at, time.perf_counter(), self.step.num_traces > num_traces)
        step = MlxStep(self._clock, launch, plan, draw, forwards, compiled, prefill_first=prefill_first)
        self._launched = step if self._keeps_pools else None
        return step

    def _evaluate(self, arrays: Sequence[mx.array], replaces_pools: bool) -> None:
        """Begin to; where pools that are kept are replaced, once no step in flight holds them."""
        if replaces_pools:
            self._finish_launched()
        mx.async_eval(*arrays)

    def _finish_launched(self) -> None:
        """Wait for the step in flight, where it holds pools that are kept."""
        if self._launched is not None:
            self._launched.wait()
            self._launched = None

    def _scrub(self, pages: Sequence[tuple[int, ...]]) -> None:
        for storages, dirty in zip(self._storages, pages, strict=False):
            if dirty:
                index = mx.array(dirty, dtype=mx.int32)
                for storage in storages:
                    storage.scrub(index)

    def _copy(self, copies: Sequence[Sequence[tuple[int, int]]]) -> None:
        for arrays, pairs in zip(self._page_arrays, copies, strict=False):
            if pairs:
                arrays.copy([origin for origin, _ in pairs], [page for _, page in pairs])

    def _restore(self, restored: Sequence[RestoredPage]) -> None:
        for group, arrays in enumerate(self._page_arrays):
            pages = [page for page in restored if page.group == group]
            if pages:
                arrays.write([page.page for page in pages], [page.payload for page in pages])

    def _decode(self, entries: Sequence[DecodeEntry], replaces_pools: bool) -> tuple[Draw | None, bool]:
        if not entries:
            return None, False
        # A graph is shared by all batches of its bucket; an eager step need not pay for idle rows.
        exact = not self.step.compiles_at(len(entries))
        bucket = row_bucket(len(entries))
        num_rows = len(entries) if exact else bucket
        offsets = [e.position for e in entries]
        for index, group in enumerate(self._groups):
            group.bind([e.row.tables[index] for e in entries], offsets, num_rows, exact=exact)
        tokens, positions, sampling = self._batch.arrange(entries, num_rows)
        drawn, compiled = self.step.run(
            tokens,
            positions,
            self._attention.get(bucket, self._default_attention),
            sampling.shape,
            sampling.inputs(entries),
            may_trace=self._trace_s <= self._trace_bound_s,
        )
        draw = sampling.commit(entries, drawn)
        self._batch.adopt(entries, draw)
        self._evaluate(draw.arrays, replaces_pools)
        return draw, compiled

    def _run_prefill(self, chunks: Sequence[PrefillChunk], replaces_pools: bool) -> list[LaunchedForward]:
        launched: list[LaunchedForward] = []
        for root in self._prefill.forwards(chunks, self._writer, together=self.info.max_batch > 1):
            self._evaluate([root], replaces_pools)
            launched.append(LaunchedForward(root, time.perf_counter()))
        return launched

    def trace(self, num_rows: int, widths: Sequence[int], sampling: SamplingParams) -> float:
        """Run a step of idle rows, which compiles its bucket where it was not yet; seconds it took.

        It costs what full rows of `widths` pages would.
        """
        begun = time.perf_counter()
        pools = [group.num_pages for group in self._memory.groups]
        position = max(
            group.bind_idle(num_rows, width, num_pages)
            for group, width, num_pages in zip(self._groups, widths, pools, strict=True)
        )
        for group in self._groups:
            group.shift_idle(position)
        entry = DecodeEntry(Row(0, sampling, 0, (0,), [], ()), 0, 0, 0)
        batch = Batch(self.info.vocab_size)
        tokens, _, state = batch.arrange([entry] * num_rows, num_rows)
        positions = mx.full((num_rows,), position, mx.int32)
        attention = self._attention.get(row_bucket(num_rows), self._default_attention)
        drawn, _ = self.step.run(
            tokens, positions, attention, state.shape, state.inputs([entry] * num_rows), may_trace=True
        )
        mx.eval(drawn)
        seconds = time.perf_counter() - begun
        self._trace_s = max(self._trace_s, seconds if self.step.compiles_at(num_rows) else 0.0)
        return seconds

    def maintain(self) -> bool:
        """Trace the oldest bucket that ran eagerly for want of a trace."""
        for bucket in list(self.step.wanted)[:1]:
            with allocating():
                self.trace(bucket.num_rows, bucket.widths, bucket.sampling.example())
            self.step.wanted.pop(bucket, None)
        return bool(self.step.wanted)

    @property
    def page_formats(self) -> tuple[PageFormat, ...]:
        return tuple(
            PageFormat(
                model=self.info.fingerprint,
                signature=self.signature,
                page_size=self._memory.page_size,
                floor=group.spec.since,
                planes=arrays.planes,
            )
            for group, arrays in zip(self._memory.groups, self._page_arrays, strict=True)
        )

    def export_pages(self, pages: Sequence[tuple[int, int]]) -> list[bytes]:
        """Payloads of these pages, (group, page id); waits for the steps that were launched."""
        payloads: dict[tuple[int, int], bytes] = {}
        with allocating():
            for group, arrays in enumerate(self._page_arrays):
                if wanted := [page for page in pages if page[0] == group]:
                    payloads |= zip(wanted, arrays.read([page for _, page in wanted]), strict=True)
        return [payloads[page] for page in pages]

    def counters(self) -> RunnerCounters:
        step = self.step
        return RunnerCounters(
            graph_compiles=step.compiles,
            graph_retraces=step.retraces,
            graph_failures=step.failures,
            compiled_steps=step.compiled_steps,
            eager_steps=step.eager_steps,
            buckets=step.buckets,
            memory_active_bytes=mx.get_active_memory(),
            memory_peak_bytes=mx.get_peak_memory(),
            memory_cache_bytes=mx.get_cache_memory(),
        )

    def close(self) -> None:
        """Give back the arrays and this thread's streams; without it the process may abort at exit."""
        self._whole.dispose()
        mx.clear_cache()
        mx.clear_streams()
