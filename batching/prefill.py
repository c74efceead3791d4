"""Prefill forwards: a chunk of one row, or several short prompts at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.own_forward import own_forward
from mlxd.batching.plan import PrefillChunk
from mlxd.caches.composite import Path, assemble
from mlxd.caches.contract import RowCache
from mlxd.caches.paged_view import PrefillView
from mlxd.caches.sizing import GroupSpec


def cohorts(chunks: Sequence[PrefillChunk], max_tokens: int, *, padded: bool) -> list[list[PrefillChunk]]:
    """Chunks that share a forward, in plan order of their first member.

    Only chunks that start at 0 may share: their rows are then plain causal prompts, padded on the right, and
    none reads a page. A cohort holds `max_tokens` padded tokens and pads no row to over twice its length.

    Args:
        padded: False where the model must not see padding; every chunk then goes alone.
    """
    alone = [[chunk] for chunk in chunks if chunk.start or not padded]
    shared: list[list[PrefillChunk]] = []
    fresh = [chunk for chunk in chunks if not chunk.start and padded]
    for chunk in sorted(fresh, key=lambda c: -c.num_tokens):
        last = shared[-1] if shared else None
        if (
            last
            and (len(last) + 1) * last[0].num_tokens <= max_tokens
            and 2 * chunk.num_tokens >= last[0].num_tokens
        ):
            last.append(chunk)
        else:
            shared.append([chunk])
    return alone + shared


@dataclass(frozen=True, slots=True)
class Padding:
    """Has forwards come in few lengths, where attention is planned anew for each.

    Whole pages; where there is a history, which makes each start another shape, a power of two of them.
    """

    page_size: int
    chunk: int

    def length(self, num_tokens: int, start: int) -> int:
        """Tokens of a forward that computes so many, at most a chunk."""
        pages = -(-num_tokens // self.page_size)
        if start:
            pages = 1 << (pages - 1).bit_length()
        return min(pages * self.page_size, max(self.chunk, num_tokens))


def prefill(
    model: nn.Module,
    caches: Sequence[RowCache],
    paths: Sequence[Path],
    groups: Sequence[tuple[int, GroupSpec]],
    layer_groups: Sequence[int],
    cohort: Sequence[PrefillChunk],
    padding: Padding | None,
) -> mx.array:
    """Build one prefill forward; the caches adopt its writes, nothing is evaluated.

    The logits are left unevaluated, so neither the head nor anything after the last layer's keys and values
    is ever computed: the row's last position goes through the decode step instead.

    Args:
        groups: (index into a row's tables, spec) of each group.
        paths: per cache, its place in the model's list.
        layer_groups: per cache, which of `groups` it belongs to.
        padding: on the right of all rows, beside what shorter ones get.
    Returns:
        A scalar whose evaluation runs the forward. It stands for the pools, which must not be held until the
        step is read: the next step's writes would then copy them.
    """
    start = cohort[0].start
    ends = [chunk.end for chunk in cohort]
    length = max(chunk.num_tokens for chunk in cohort)
    if padding is not None:
        length = padding.length(length, start)
    views = {
        spec.name: PrefillView(spec, [chunk.row.tables[index] for chunk in cohort], start, ends, length)
        for index, spec in groups
        if spec.serves(start)
    }
    specs = [spec for _, spec in groups]
    serving = [spec.name if spec.serves(start) else spec.successor for spec in specs]
    maintained = [m for cache in caches if (m := cache.prefill_maintenance) is not None]
    tokens = mx.array([chunk.tokens + (0,) * (length - chunk.num_tokens) for chunk in cohort], dtype=mx.int32)
    for cache in maintained:
        cache.begin_prefill()
    stand_ins = [
        cache.prefill(views[name])
        for cache, group in zip(caches, layer_groups, strict=True)
        if (name := serving[group]) is not None
    ]
    with own_forward():
        model(tokens, cache=assemble(paths, stand_ins))
    for stand_in in stand_ins:
        stand_in.finish()
    for cache in maintained:
        cache.commit_prefill(range(len(cohort)))
        cache.end_prefill()
    done: mx.array = mx.depends(mx.zeros(()), [array for cache in caches for array in cache.state()])
    return done
