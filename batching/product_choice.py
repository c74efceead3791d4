"""Whose products serve a step, MLX's or our own: chosen by timing whole steps at start."""

from collections.abc import Callable
from functools import partial

from mlxd.batching.decode import DecodeStep
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import Progress, ignore_progress
from mlxd.batching.sampling_params import GREEDY
from mlxd.batching.tuning import TimeBox, outside_in, row_buckets, typical_widths
from mlxd.caches.sizing import MemoryPlan

_TURNS = 8


def choose_products(
    runner: MlxRunner, memory: MemoryPlan, box: TimeBox, progress: Progress = ignore_progress
) -> dict[int, dict[str, float]]:
    """Leave our own products to those row buckets where steps are the faster by them.

    Steps are measured as they will run, compiled or not. Buckets are visited from the outside in; those not
    reached in time do as the nearest one measured, and have our own where none was.

    Returns:
        Seconds a step, by row bucket and by whose products, of the buckets measured.
    """
    step = runner.step
    buckets = [rows for rows in row_buckets(runner.info.max_batch) if rows in step.own_products]
    times: dict[int, dict[str, float]] = {}
    for rows in outside_in(buckets) if buckets else ():
        if box.is_over:
            break
        progress("tune", 0.8)
        run = partial(runner.trace, rows, typical_widths(memory, rows), GREEDY)
        times[rows] = _step_times(step, rows, run, box)
    if times:
        nearest = {rows: times[min(times, key=lambda measured: abs(measured - rows))] for rows in buckets}
        step.own_products = frozenset(rows for rows, by in nearest.items() if by["kernel"] <= by["mlx"])
    return dict(sorted(times.items()))


def _step_times(step: DecodeStep, rows: int, run: Callable[[], float], box: TimeBox) -> dict[str, float]:
    """Least seconds of steps by either, by turns; a first one each, which may compile, does not count."""
    times: dict[str, list[float]] = {"kernel": [], "mlx": []}
    for turn in range(1 + _TURNS):
        for name, seconds in times.items():
            step.own_products = frozenset([rows] if name == "kernel" else [])
            seconds.append(run())
        if turn and box.is_over:
            break
    return {name: min(seconds[1:]) for name, seconds in times.items()}
