"""Choices made by timing at start: chunk size, attention by row bucket, compiled or eager."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import Progress, ignore_progress
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.kinds import native_caches
from mlxd.caches.row_group import row_bucket, width_bucket
from mlxd.caches.sizing import MemoryPlan

_SMALLEST_CHUNK = 64
_LARGEST_CHUNK = 2048
_REPEATS = 3
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0)


def choose_chunk(
    model: nn.Module, prefill_ms: float, page_size: int, max_model_len: int, progress: Progress
) -> int:
    """Tokens of a prefill chunk: the largest power of two that runs within `prefill_ms`, at least one page.

    Timed on the model's own caches, a prompt's first chunk; deeper chunks of a long prompt cost more.
    """
    smallest = max(page_size, _SMALLEST_CHUNK)
    chunk = smallest
    _prefill_s(model, chunk)
    while chunk < min(_LARGEST_CHUNK, max_model_len):
        progress("tune", 0.0)
        seconds = _prefill_s(model, chunk)
        if 2.2 * seconds * 1000 > prefill_ms:
            break
        chunk *= 2
    return chunk


def _prefill_s(model: nn.Module, num_tokens: int) -> float:
    caches = native_caches(model)
    begun = time.perf_counter()
    model(mx.zeros((1, num_tokens), mx.int32), cache=caches)
    mx.eval([cache.state for cache in caches])
    return time.perf_counter() - begun


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, ... up to the bucket that holds `max_rows`."""
    return [1 << i for i in range(row_bucket(max_rows).bit_length())]


def reachable_widths(memory: MemoryPlan) -> list[tuple[int, ...]]:
    """Page-table widths a batch goes through while its longest row grows, one tuple a stage."""
    most = [group.spec.pages_for(memory.max_model_len, memory.chunk) for group in memory.groups]
    seen: dict[tuple[int, ...], None] = {}
    for pages in range(1, max(most) + 1):
        seen[tuple(width_bucket(min(pages, limit)) for limit in most)] = None
    return list(seen)


def best_s(run: Callable[[], float], repeats: int = _REPEATS) -> float:
    """Least of a few runs: what other work on the machine adds is never negative."""
    return min(run() for _ in range(repeats))


def choose_attention(
    runner: MlxRunner,
    memory: MemoryPlan,
    right: Sequence[str],
    limit_s: float,
    progress: Progress = ignore_progress,
) -> dict[int, dict[str, float]]:
    """Time the variants that passed the self-test and let the fastest serve each row bucket.

    Measured eagerly, with every table at half of its largest width. Buckets are visited from the outside in;
    those not reached within `limit_s` do as the nearest one measured.

    Returns:
        Seconds a step, by row bucket and variant, of the buckets measured.
    """
    widths = reachable_widths(memory)
    width = widths[len(widths) // 2]
    times: dict[int, dict[str, float]] = {}
    begun = time.perf_counter()
    buckets = row_buckets(runner.info.max_batch)
    for rows in _outside_in(buckets):
        if times and time.perf_counter() - begun >= limit_s:
            break
        times[rows] = {}
        for name in right:
            progress("tune", len(times) / len(buckets) / 2)
            runner.set_attention(name)
            times[rows][name] = best_s(lambda rows=rows: runner.trace(rows, width, GREEDY))  # type: ignore[misc]
    best = {
        rows: min(right, key=times[min(times, key=lambda measured: abs(measured - rows))].__getitem__)
        for rows in buckets
    }
    runner.set_attention(right[0], best)
    return dict(sorted(times.items()))


def _outside_in(values: Sequence[int]) -> list[int]:
    """Last, first, then the middle: the most telling ones first."""
    ends = [values[-1], values[0]] if len(values) > 1 else [values[0]]
    return ends + list(values[1:-1])


def choose_compiled(
    runner: MlxRunner, memory: MemoryPlan, progress: Progress = ignore_progress
) -> tuple[bool, float, float]:
    """Whether the compiled step is the faster one, with both times in seconds.

    Three rows to four places: a compiled step pays for its whole bucket, an eager one for the rows there are.
    """
    bucket, widths = row_bucket(runner.info.max_batch), reachable_widths(memory)
    width = widths[len(widths) // 2]
    times = {}
    for enabled, rows in ((True, bucket), (False, max(1, bucket * 3 // 4))):
        runner.step.enabled = enabled
        runner.trace(rows, width, GREEDY)
        progress("tune", 0.75)
        times[enabled] = best_s(lambda rows=rows: runner.trace(rows, width, GREEDY))  # type: ignore[misc]
    runner.step.enabled = times[True] <= times[False]
    return runner.step.enabled, times[True], times[False]


def trace_buckets(
    runner: MlxRunner, memory: MemoryPlan, limit_s: float, progress: Progress
) -> tuple[int, int]:
    """Trace what the configuration can reach, short contexts first, for at most `limit_s`.

    Returns:
        Buckets traced, and buckets there are (greedy and drawn; filters and penalties are traced when first
        met).
    """
    buckets = list(_buckets(runner, memory))
    begun = time.perf_counter()
    for done, (widths, rows, sampling) in enumerate(buckets):
        if time.perf_counter() - begun >= limit_s:
            return done, len(buckets)
        progress("trace", done / len(buckets))
        runner.trace(rows, widths, sampling)
    progress("trace", 1.0)
    return len(buckets), len(buckets)


def _buckets(runner: MlxRunner, memory: MemoryPlan) -> Iterator[tuple[tuple[int, ...], int, SamplingParams]]:
    yield from product(reachable_widths(memory), row_buckets(runner.info.max_batch), (GREEDY, DRAWN))
