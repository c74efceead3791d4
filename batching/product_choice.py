"""Whose products serve a step, MLX's or our own: chosen by timing whole steps at start."""

from collections.abc import Callable
from functools import partial

from mlxd.batching.decode import DecodeStep
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import Progress, ignore_progress
from mlxd.batching.sampling_params import GREEDY
from mlxd.batching.timing import TimeBox, by_rows, nearest_measured
from mlxd.batching.tuning import row_buckets, typical_widths
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

    def runs_at(rows: int) -> dict[str, Callable[[], float]]:
        run = partial(_step_s, step, rows, partial(runner.trace, rows, typical_widths(memory, rows), GREEDY))
        return {"kernel": partial(run, are_own=True), "mlx": partial(run, are_own=False)}

    times = by_rows(buckets, runs_at, _TURNS, box, lambda done: progress("tune", 0.75 + done / 4))
    if times:
        measured = nearest_measured(times, buckets)
        step.own_products = frozenset(rows for rows, by in measured.items() if by["kernel"] <= by["mlx"])
    return times


def _step_s(step: DecodeStep, rows: int, run: Callable[[], float], *, are_own: bool) -> float:
    step.own_products = frozenset([rows] if are_own else [])
    return run()
