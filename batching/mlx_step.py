"""A step that the device computes."""

import time
from dataclasses import dataclass

import mlx.core as mx

from mlxd.batching.allocation import allocating
from mlxd.batching.plan import RowResult, StepPlan, StepResult
from mlxd.batching.sampler_state import Draw


@dataclass(slots=True, eq=False)
class StepClock:
    """`done_at`: when the latest step was there that was waited for, by `time.perf_counter`."""

    done_at: float = 0.0


class MlxStep:
    """A launched step: what to wait for, and how long it took."""

    def __init__(
        self, clock: StepClock, plan: StepPlan, draw: Draw | None, roots: list[mx.array], compiled: bool
    ) -> None:
        """
        Args:
            clock: of its runner.
            draw: what it samples, if it decodes.
            roots: one scalar a prefill forward, which stands for all that the forward writes.
        """
        self.plan = plan
        self._clock = clock
        self._draw = draw
        self._roots = roots
        self._compiled = compiled
        self._launched_at = time.perf_counter()

    def wait(self) -> StepResult:
        """Block until the tokens and the prefill's writes are there.

        The device runs one step after another, so a part's time begins where the part before it ended.

        Raises:
            OutOfMemoryError: there will be none.
        """
        begun = max(self._launched_at, self._clock.done_at)
        rows: tuple[RowResult, ...] = ()
        with allocating():
            if self._draw is not None:
                mx.eval(*self._draw.arrays)
                rows = self._draw.results()
            decoded = time.perf_counter()
            if self._roots:
                mx.eval(*self._roots)
                self._roots.clear()
        done = self._clock.done_at = time.perf_counter()
        return StepResult(
            rows=rows,
            decode_s=decoded - begun if self._draw is not None else 0.0,
            prefill_s=done - (decoded if self._draw is not None else begun) if self.plan.prefill else 0.0,
            compiled=self._compiled,
        )
