"""A step that the device computes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd.batching.allocation import allocating
from mlxd.batching.plan import StepPlan, StepResult
from mlxd.batching.sampler_state import Draw

_AT_ONCE_S = 1e-4
"""Whoever asks for what is there waits for no longer."""


@dataclass(slots=True, eq=False)
class StepClock:
    """Of a runner's steps, by `time.perf_counter`.

    Attributes:
        launch_blocks: a launch returns when nearly all of it was computed, as on the CPU, where MLX lets only
            a few operations wait. What is then waited for was there before the next step was launched.
        done_at: when the latest step came that had to be waited for. One that was there already when it was
            asked for says nothing of when it came.
        decode_s: of the latest step that decoded alone.
    """

    launch_blocks: bool
    done_at: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Launch:
    """When the launch of a step's first part began, that of its second one, and when that returned.

    Attributes:
        traced: whether it made a graph.
    """

    begun_at: float
    second_at: float
    returned_at: float
    traced: bool = False


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
        *,
        prefill_first: bool = False,
    ) -> None:
        """
        Args:
            clock: of its runner.
            draw: what it samples, if it decodes.
            roots: one scalar a prefill forward, which stands for all that the forward writes.
            prefill_first: whether decoding is its second part.
        """
        self.plan = plan
        self._clock = clock
        self._launch = launch
        self._draw = draw
        self._roots = roots
        self._compiled = compiled
        self._prefill_first = prefill_first
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        """Block until the tokens and the prefill's writes are there.

        Raises:
            OutOfMemoryError: there will be none.
        """
        if self._result is None:
            self._result = self._wait()
        return self._result

    def _wait(self) -> StepResult:
        begun = time.perf_counter()
        parts: list[Sequence[mx.array]] = [() if self._draw is None else self._draw.arrays, self._roots]
        if self._prefill_first:
            parts.reverse()
        with allocating():
            mx.eval(*parts[0])
            between = time.perf_counter()
            mx.eval(*parts[1])
            done = time.perf_counter()
            rows = self._draw.results() if self._draw is not None else ()
        self._roots.clear()
        seconds = self._parts_s(begun, between, done)
        decode_s, prefill_s = reversed(seconds) if self._prefill_first else seconds
        if not self.plan.prefill and not self._launch.traced:
            self._clock.decode_s = decode_s
        return StepResult(
            rows=rows,
            decode_s=decode_s if self._draw is not None else 0.0,
            prefill_s=prefill_s if self.plan.prefill else 0.0,
            compiled=self._compiled,
            traced=self._launch.traced,
        )

    def _parts_s(self, begun: float, between: float, done: float) -> tuple[float, float]:
        """Seconds of the first part and of the second, from when the wait began and when each was there.

        The device runs one step after another, so a part begins where the one before it ended. Where nobody
        saw that, a first part that decodes took as long as it takes alone, and prefill has the rest. Where
        launching blocks, a part takes what launching and waiting for it take.
        """
        launch, before = self._launch, self._clock.done_at
        if done - begun > _AT_ONCE_S:
            self._clock.done_at = done
        if self._clock.launch_blocks:
            return (
                launch.second_at - launch.begun_at + between - begun,
                launch.returned_at - launch.second_at + done - between,
            )
        has_first = bool(self.plan.prefill) if self._prefill_first else self._draw is not None
        if not has_first:
            return 0.0, done - max(launch.returned_at, before)
        start = max(launch.second_at, before)
        if self._prefill_first:
            decode_s = done - between
            return between - start, decode_s if decode_s > _AT_ONCE_S else 0.0
        if self.plan.prefill and between - begun <= _AT_ONCE_S:
            between = min(between, max(start + self._clock.decode_s, launch.returned_at))
        return between - start, done - between
