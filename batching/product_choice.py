"""Whose products serve a step, MLX's or our own: chosen by timing whole steps at start."""

from functools import partial

from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import Progress, ignore_progress
from mlxd.batching.sampling_params import GREEDY
from mlxd.batching.tuning import TimeBox, best_s, outside_in, row_buckets, typical_widths
from mlxd.caches.sizing import MemoryPlan


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
        times[rows] = {}
        for name, own in (("kernel", frozenset(buckets)), ("mlx", frozenset())):
            step.own_products = own
            run()
            times[rows][name] = best_s(run, box)
    if times:
        nearest = {rows: times[min(times, key=lambda measured: abs(measured - rows))] for rows in buckets}
        step.own_products = frozenset(
            r for r, by_name in nearest.items() if by_name["kernel"] <= by_name["mlx"]
        )
    return dict(sorted(times.items()))
