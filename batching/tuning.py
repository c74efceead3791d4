"""Choices made by timing at start: chunk size, attention by row bucket; and what is planned and traced."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.device import compiles_kernels, plans_by_shape
from mlxd.batching.driver import Driver
from mlxd.batching.errors import SettingError
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import Progress, RunnerInfo, ignore_progress
from mlxd.batching.sampling_params import GREEDY, SamplingParams
from mlxd.batching.timing import TimeBox, best_s, nearest_measured, outside_in
from mlxd.caches.kinds import Layer, group_specs, native_caches
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of
from mlxd.caches.row_group import row_bucket, width_bucket
from mlxd.caches.sizing import MemoryPlan, plan_memory

_SMALLEST_CHUNK = 64
_LARGEST_CHUNK = 2048
_KERNEL_LEAD = 0.75
"""Of the kernel's time counts: eager steps cost the host more than compiled ones, and noise is as large."""
_LONGEST_CONTEXT = 0.5
"""Of the largest context: what a row is timed with, where that many pages a row there are."""
DRAWN = SamplingParams(temperature=1.0)


def choose_chunk(
    chunk_s: Callable[[int], float],
    prefill_ms: float,
    page_size: int,
    max_model_len: int,
    box: TimeBox,
    progress: Progress,
) -> int:
    """Tokens of a prefill chunk: the largest power of two that runs within `prefill_ms`, at least one page.

    Args:
        chunk_s: seconds of a prompt's first chunk of so many tokens; deeper ones of a long prompt cost more.
    """
    smallest = max(page_size, _SMALLEST_CHUNK)
    chunk = smallest
    chunk_s(chunk)
    while chunk < min(_LARGEST_CHUNK, max_model_len) and not box.is_over:
        progress("tune", 0.0)
        if compiles_kernels():
            chunk_s(chunk)
        seconds = chunk_s(chunk)
        if 2.2 * seconds * 1000 > prefill_ms:
            break
        chunk *= 2
    return chunk


def native_chunk_s(model: nn.Module, num_tokens: int) -> float:
    """Of a prompt's first chunk, on the model's own caches."""
    caches = native_caches(model)
    begun = time.perf_counter()
    model(mx.zeros((1, num_tokens), mx.int32), cache=caches)
    mx.eval([cache.state for cache in caches])
    return time.perf_counter() - begun


def packed_chunk_s(model: nn.Module, layers: Sequence[Layer], page_size: int, num_tokens: int) -> float:
    """Of a prompt's first chunk, on packed layers in pools for one row.

    Raises:
        SettingError: the model does not go through a chunk on such layers.
    """
    specs = group_specs(layers, page_size)
    memory = plan_memory(
        specs,
        budget_bytes=sum(spec.pages_for(num_tokens, num_tokens) * spec.page_bytes for spec in specs),
        weights_bytes=0,
        max_rows=1,
        max_model_len=num_tokens,
        chunk=num_tokens,
    )
    info = RunnerInfo("chunk", 1, memory, 1, frozenset(), str(mx.default_device()), compiled=False)
    runner = MlxRunner(model, layers, memory, info)
    driver = Driver(runner, memory)
    driver.join((0,) * (num_tokens + 1))
    begun = time.perf_counter()
    try:
        driver.prefill()
    except MODEL_FAULTS as error:
        raise cannot_be_packed(summary_of(error)) from error
    return time.perf_counter() - begun


def cannot_be_packed(reason: str) -> SettingError:
    """`cache.quantization` is wrong for a model that passes its attention by."""
    sentence = f"does not go with this model, whose attention does not read it: {reason}"
    return SettingError(("cache", "quantization"), sentence)


def plan_prompts(runner: MlxRunner, memory: MemoryPlan, box: TimeBox) -> None:
    """Where attention is planned, have it planned for the chunks of prompts.

    First ones alone, then those of several short prompts, then deeper ones.
    """
    if not plans_by_shape():
        return
    driver = Driver(runner, memory)
    for num_rows, length in _first_chunks(runner.info.max_batch, memory):
        if box.is_over:
            break
        rows = [driver.join((0,) * (length + 1)) for _ in range(num_rows)]
        driver.prefill()
        for row in rows:
            driver.leave(row)
    longest = min([memory.max_model_len, *_most_positions(memory)])
    row = driver.join((0,) * longest)
    while not box.is_over and driver.prefill_step():
        pass
    driver.leave(row)
    driver.clean()


def _first_chunks(max_rows: int, memory: MemoryPlan) -> Iterator[tuple[int, int]]:
    """Rows and tokens of each, of the shapes in which prompts begin.

    Several rows are two, four ... or all there may be, which are padded to as many.
    """
    share = not any(group.spec.state_bytes for group in memory.groups)
    for bucket in row_buckets(max_rows if share else 1):
        num_rows = min(bucket, max_rows)
        for length in range(memory.page_size, memory.chunk // bucket + 1, memory.page_size):
            if length < memory.max_model_len and _have_room(memory, num_rows, length + 1):
                yield num_rows, length


def _have_room(memory: MemoryPlan, num_rows: int, num_tokens: int) -> bool:
    return all(
        num_rows * group.spec.pages_for(num_tokens, memory.chunk) <= group.num_pages
        for group in memory.groups
    )


def _most_positions(memory: MemoryPlan) -> list[int]:
    """That one row may have, by each group that grows with it."""
    growing = [group for group in memory.groups if not group.spec.is_bounded]
    return [group.num_pages * group.spec.page_size for group in growing]


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, ... up to the bucket that holds `max_rows`."""
    return [1 << i for i in range(row_bucket(max_rows).bit_length())]


def reachable_widths(memory: MemoryPlan) -> list[tuple[int, ...]]:
    """Page-table widths a batch goes through while its longest row grows, one tuple a stage."""
    most = [group.spec.pages_for(memory.max_model_len, memory.chunk) for group in memory.groups]
    seen: dict[tuple[int, ...], None] = {}
    for pages in range(1, max(most) + 1):
        widths = _widths(memory, most, pages)
        seen[widths] = None
        if any(width and group.spec.since for width, group in zip(widths, memory.groups, strict=True)):
            seen[tuple(width_bucket(min(pages, limit)) for limit in most)] = None  # beside shorter rows
    return list(seen)


def _widths(memory: MemoryPlan, most: Sequence[int], pages: int) -> tuple[int, ...]:
    """Page-table widths of rows of so many pages; 0 for groups that do not serve them."""
    return tuple(
        width_bucket(min(pages, limit)) if group.spec.serves(pages * group.spec.page_size - 1) else 0
        for group, limit in zip(memory.groups, most, strict=True)
    )


def typical_widths(memory: MemoryPlan, num_rows: int) -> tuple[int, ...]:
    """Page-table widths to time a step of `num_rows` with: as long as rows get, and as all of them can."""
    limits = [group.spec.pages_for(memory.max_model_len, memory.chunk) for group in memory.groups]
    growing = [group.num_pages // num_rows for group in memory.groups if not group.spec.is_bounded]
    pages = max(1, min([int(_LONGEST_CONTEXT * max(limits)), *growing]))
    return _widths(memory, limits, pages)


def choose_attention(
    runner: MlxRunner,
    memory: MemoryPlan,
    right: Sequence[str],
    box: TimeBox,
    progress: Progress = ignore_progress,
) -> dict[int, dict[str, float]]:
    """Time the variants that passed the self-test and let the fastest serve each row bucket.

    Measured eagerly. Buckets are visited from the outside in; those not reached in time do as the nearest
    one measured.

    Returns:
        Seconds a step, by row bucket and variant, of the buckets measured.
    """
    times: dict[int, dict[str, float]] = {}
    buckets = row_buckets(runner.info.max_batch)
    for rows in outside_in(buckets):
        if times and box.is_over:
            break
        times[rows], widths = {}, typical_widths(memory, rows)
        for name in right:
            progress("tune", len(times) / len(buckets) / 2)
            runner.set_attention(name)
            run = partial(runner.trace, rows, widths, GREEDY)
            if compiles_kernels():
                run()
            beat_s = min(times[rows].values(), default=math.inf)
            times[rows][name] = best_s(run, box, beat_s)
    best = {
        rows: min(right, key=lambda name: by[name] * (_KERNEL_LEAD if name == "kernel" else 1.0))
        for rows, by in nearest_measured(times, buckets).items()
    }
    runner.set_attention(right[0], best)
    return dict(sorted(times.items()))


def trace_buckets(runner: MlxRunner, memory: MemoryPlan, box: TimeBox, progress: Progress) -> tuple[int, int]:
    """Trace what the configuration can reach, short contexts first, while the next one fits into the time,
    and into what is kept.

    Returns:
        Buckets traced, and buckets there are (greedy and drawn; filters and penalties are traced when first
        met).
    """
    buckets = list(_buckets(runner, memory))
    took_s = 0.0
    for done, (widths, rows, sampling) in enumerate(buckets):
        if box.left_s <= took_s or not runner.step.has_room:
            progress("trace", 1.0)
            return done, len(buckets)
        progress("trace", done / len(buckets))
        took_s = runner.trace(rows, widths, sampling)
    progress("trace", 1.0)
    return len(buckets), len(buckets)


def _buckets(runner: MlxRunner, memory: MemoryPlan) -> Iterator[tuple[tuple[int, ...], int, SamplingParams]]:
    compiled = [rows for rows in row_buckets(runner.info.max_batch) if runner.step.compiles_at(rows)]
    yield from product(reachable_widths(memory), compiled, (GREEDY, DRAWN))
