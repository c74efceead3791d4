"""Prefill forwards: a chunk of one row, or several short prompts at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.device import plans_by_shape
from mlxd.batching.own_forward import own_forward
from mlxd.batching.plan import PrefillChunk
from mlxd.caches.composite import Path, assemble
from mlxd.caches.contract import PrefillStandIn, RowCache
from mlxd.caches.paged_view import ChunkWriter, PrefillView
from mlxd.caches.row_group import row_bucket
from mlxd.caches.sizing import MemoryPlan


@dataclass(frozen=True, slots=True)
class Padding:
    """Has forwards come in few shapes, where attention is planned anew for each.

    Lengths are whole pages; where there is a history, which makes each start another shape, a power of two of
    them. Rows are a power of two.
    """

    page_size: int
    chunk: int

    def length(self, num_tokens: int, start: int) -> int:
        """Tokens of a forward that computes so many, at most a chunk."""
        pages = -(-num_tokens // self.page_size)
        if start:
            pages = 1 << (pages - 1).bit_length()
        return min(pages * self.page_size, max(self.chunk, num_tokens))

    def rows(self, num_rows: int) -> int:
        """Rows of a forward of so many."""
        return row_bucket(num_rows)


def cohorts(
    chunks: Sequence[PrefillChunk], max_tokens: int, *, padded: bool, padding: Padding | None = None
) -> list[list[PrefillChunk]]:
    """Chunks that share a forward, in plan order of their first member.

    Only chunks that start at 0 may share: their rows are then plain causal prompts, padded on the right, and
    none reads a page. A cohort holds `max_tokens` padded tokens and pads no row to over twice its length.

    Args:
        padded: False where the model must not see padding; every chunk then goes alone.
        padding: of the forwards, beside what shorter rows get.
    """
    alone = [[chunk] for chunk in chunks if chunk.start or not padded]

    def fit(num_rows: int, num_tokens: int) -> bool:
        if padding is not None:
            num_rows, num_tokens = padding.rows(num_rows), padding.length(num_tokens, 0)
        return num_rows * num_tokens <= max_tokens

    shared: list[list[PrefillChunk]] = []
    fresh = [chunk for chunk in chunks if not chunk.start and padded]
    for chunk in sorted(fresh, key=lambda c: -c.num_tokens):
        last = shared[-1] if shared else None
        if last and fit(len(last) + 1, last[0].num_tokens) and 2 * chunk.num_tokens >= last[0].num_tokens:
            last.append(chunk)
        else:
            shared.append([chunk])
    return alone + shared


class Prefill:
    """Builds prefill forwards; the caches adopt their writes.

    The logits are left unevaluated, so neither the head nor anything after the last layer's keys and values
    is ever computed: the row's last position goes through the decode step instead.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: Sequence[RowCache],
        paths: Sequence[Path],
        memory: MemoryPlan,
        layer_groups: Sequence[int],
    ) -> None:
        """
        Args:
            paths: per cache, its place in the model's list.
            memory: whose groups are those of a row's tables, in order.
            layer_groups: per cache, which group it belongs to.
        """
        self._model = model
        self._caches = caches
        self._paths = paths
        self._specs = [group.spec for group in memory.groups]
        self._layer_groups = layer_groups
        self._chunk = memory.chunk
        self._padding = Padding(memory.page_size, memory.chunk)
        self._may_pad = not any(spec.state_bytes for spec in self._specs)
        self._maintained = [m for cache in caches if (m := cache.prefill_maintenance) is not None]

    @property
    def evaluates(self) -> bool:
        """Whether caches evaluate a part of a forward while it is built."""
        return bool(self._maintained)

    def keeps_pools(self, writer: ChunkWriter) -> bool:
        """Whether all pools stay the arrays they are where this writer is used."""
        return all(cache.keeps_pools(writer) for cache in self._caches)

    def forwards(
        self, chunks: Sequence[PrefillChunk], writer: ChunkWriter | None, *, together: bool
    ) -> Iterator[mx.array]:
        """The forwards that compute these chunks, each built when it is asked for; nothing is evaluated.

        Args:
            writer: by which all pools are kept; None: they are replaced.
            together: whether rows may share one.
        Yields:
            A scalar whose evaluation runs the forward. It stands for the pools, which must not be held until
            the step is read: the next step's writes would then copy them.
        """
        padded = self._may_pad and together
        padding = self._padding if padded and plans_by_shape() else None
        for cohort in cohorts(chunks, self._chunk, padded=padded, padding=padding):
            yield self._forward(cohort, padding, writer)

    def _forward(
        self, cohort: Sequence[PrefillChunk], padding: Padding | None, writer: ChunkWriter | None
    ) -> mx.array:
        start = cohort[0].start
        num_rows, length = len(cohort), max(chunk.num_tokens for chunk in cohort)
        if padding is not None:
            num_rows, length = padding.rows(num_rows), padding.length(length, start)
        rows = [chunk.tokens + (0,) * (length - chunk.num_tokens) for chunk in cohort]
        tokens = mx.array(rows + [(0,) * length] * (num_rows - len(rows)), dtype=mx.int32)
        for cache in self._maintained:
            cache.begin_prefill()
        stand_ins = self._stand_ins(self._views(cohort, num_rows, length, writer), start)
        with own_forward():
            self._model(tokens, cache=assemble(self._paths, stand_ins))
        written = [stand_in.finish() for stand_in in stand_ins]
        for cache in self._maintained:
            cache.commit_prefill(range(len(cohort)))
            cache.end_prefill()
        pools = [array for cache in self._caches for array in cache.state()]
        done: mx.array = mx.depends(mx.zeros(()), [*pools, *(x for x in written if x is not None)])
        return done

    def _views(
        self, cohort: Sequence[PrefillChunk], num_rows: int, length: int, writer: ChunkWriter | None
    ) -> dict[str, PrefillView]:
        """Of the groups that serve the cohort, by name."""
        start, ends = cohort[0].start, [chunk.end for chunk in cohort]
        return {
            spec.name: PrefillView(
                spec,
                [chunk.row.tables[index] for chunk in cohort],
                start,
                ends,
                length,
                num_rows=num_rows,
                writer=writer,
            )
            for index, spec in enumerate(self._specs)
            if spec.serves(start)
        }

    def _stand_ins(self, views: Mapping[str, PrefillView], start: int) -> list[PrefillStandIn]:
        """Of the caches that the forward writes, in their order."""
        serving = [spec.name if spec.serves(start) else spec.successor for spec in self._specs]
        return [
            cache.prefill(views[name])
            for cache, group in zip(self._caches, self._layer_groups, strict=True)
            if (name := serving[group]) is not None
        ]
