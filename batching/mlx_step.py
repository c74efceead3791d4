"""A step that the device computes."""

import time
from dataclasses import dataclass

import mlx.core as mx

from mlxd.batching.allocation import allocating
from mlxd.batching.plan import RowResult, StepPlan, StepResult
from mlxd.batching.sampler_state import Draw


@dataclass(slots=True, eq=False)
class StepClock:
    """Of a runner's steps, by `time.perf_counter`.

    Attributes:
        launch_blocks: a launch returns when nearly all of it was computed, as on the CPU, where MLX lets only
            a few operations wait. What is then waited for was there before the next step was launched.
        done_at: when the latest step was there that was waited for.
    """

    launch_blocks: bool
    done_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Launch:
    """When the launch of a step's decode part began, that of its prefill, and when that returned."""

    begun_at: float
    decoded_at: float
    returned_at: float


class MlxStep:
    """A launched step: what to wait for, and how long it took."""

    def __init__(
        self,
        clock: StepClock,
        launch: Launch,
        plan: StepPlan,
        draw: Draw | None,
        roots: list[mx.array],
        compiled: bool,
    ) -> None:
        """
        Args:
            clock: of its runner.
            draw: what it samples, if it decodes.
            roots: one scalar a prefill forward, which stands for all that the forward writes.
        """
        self.plan = plan
        self._clock = clock
        self._launch = launch
        self._draw = draw
        self._roots = roots
        self._compiled = compiled

    def wait(self) -> StepResult:
        """Block until the tokens and the prefill's writes are there.

        Raises:
            OutOfMemoryError: there will be none.
        """
        begun = time.perf_counter()
        rows: tuple[RowResult, ...] = ()
        with allocating():
            if self._draw is not None:
                mx.eval(*self._draw.arrays)
                rows = self._draw.results()
            decoded = time.perf_counter()
            if self._roots:
                mx.eval(*self._roots)
                self._roots.clear()
        decode_s, prefill_s = self._parts_s(begun, decoded, time.perf_counter())
        return StepResult(
            rows=rows,
            decode_s=decode_s if self._draw is not None else 0.0,
            prefill_s=prefill_s if self.plan.prefill else 0.0,
            compiled=self._compiled,
        )

    def _parts_s(self, begun: float, decoded: float, done: float) -> tuple[float, float]:
        """Seconds of decode and of prefill, from when the wait began and when each part was there.

        The device runs one step after another, so a part begins where the one before it ended. Where
        launching blocks, a part takes what launching and waiting for it take.
        """
        launch, before = self._launch, self._clock.done_at
        self._clock.done_at = done
        if self._clock.launch_blocks:
            return (
                launch.decoded_at - launch.begun_at + decoded - begun,
                launch.returned_at - launch.decoded_at + done - decoded,
            )
        start = max(launch.returned_at, before)
        return decoded - start, done - (decoded if self._draw is not None else start)
