"""Whether a step is compiled or eager: chosen by timing whole steps at start."""

from collections.abc import Callable
from functools import partial

from mlxd.batching.device import on_cpu
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import Progress, ignore_progress
from mlxd.batching.sampling_params import GREEDY
from mlxd.batching.timing import TimeBox, by_rows, nearest_measured
from mlxd.batching.tuning import row_buckets, typical_widths
from mlxd.caches.sizing import MemoryPlan

_TURNS = 3


def choose_compiled(
    runner: MlxRunner, memory: MemoryPlan, box: TimeBox, progress: Progress = ignore_progress
) -> dict[int, dict[str, float]]:
    """Have steps of each row bucket compiled, or run them eagerly, whichever is the faster.

    A compiled step pays for its whole bucket, an eager one for the rows there are: those half way between
    this bucket and the one below. Buckets are visited from the outside in; those not reached in time do as
    the nearest one measured, and where none was they are compiled, on the CPU eager.

    Returns:
        Seconds a step, by row bucket and by how it ran, of the buckets measured.
    """
    step = runner.step
    buckets = row_buckets(runner.info.max_batch)

    def runs_at(rows: int) -> dict[str, Callable[[], float]]:
        run = partial(_step_s, runner, memory, bucket=rows)
        return {
            "compiled": partial(run, rows, compiled=True),
            "eager": partial(run, usual_rows(rows), compiled=False),
        }

    times = by_rows(buckets, runs_at, _TURNS, box, lambda done: progress("tune", 0.5 + done / 4))
    measured = nearest_measured(times, buckets if times else ())
    step.eager_at = frozenset(rows for rows, by in measured.items() if by["eager"] < by["compiled"])
    step.enabled = len(step.eager_at) < len(buckets) if times else not on_cpu()
    return times


def usual_rows(bucket: int) -> int:
    """Of steps in a bucket: it holds more than half of its places."""
    return max(bucket // 2 + 1, 3 * bucket // 4)


def _step_s(runner: MlxRunner, memory: MemoryPlan, num_rows: int, *, bucket: int, compiled: bool) -> float:
    runner.step.enabled, runner.step.eager_at = compiled, frozenset()
    return runner.trace(num_rows, typical_widths(memory, bucket), GREEDY)
