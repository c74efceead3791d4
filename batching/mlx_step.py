"""A step that the device computes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        decode_s: of the latest step that decoded alone and had to be waited for.
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


class LaunchedForward(NamedTuple):
    """A prefill forward: a scalar that stands for all that it writes, and when it was launched.

    The first of a step runs while the others are built.
    """

    root: mx.array
    at: float


class MlxStep:
    """A launched step: what to wait for, and how long it took."""

    def __init__(
        self,
        clock: StepClock,
        launch: Launch,
        plan: StepPlan,
        draw: Draw | None,
        forwards: list[LaunchedForward],
        compiled: bool,
        *,
        prefill_first: bool = False,
    ) -> None:
        """
        Args:
            clock: of its runner.
            draw: what it samples, if it decodes.
            forwards: of its prefill.
            prefill_first: whether decoding is its second part.
        """
        self.plan = plan
        self._clock = clock
        self._launch = launch
        self._draw = draw
        self._forwards = forwards
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
        roots = [forward.root for forward in self._forwards]
        parts: list[Sequence[mx.array]] = [() if self._draw is None else self._draw.arrays, roots]
        if self._prefill_first:
            parts.reverse()
        with allocating():
            mx.eval(*parts[0])
            between = time.perf_counter()
            mx.eval(*parts[1])
            done = time.perf_counter()
            rows = self._draw.results() if self._draw is not None else ()
        decode_s, prefill_s = self._parts_s(begun, between, done)
        self._forwards.clear()
        decodes_alone = self._draw is not None and not self.plan.prefill
        if decodes_alone and not self._launch.traced and done - begun > _AT_ONCE_S:
            self._clock.decode_s = decode_s
        return StepResult(
            rows=rows,
            decode_s=decode_s if self._draw is not None else 0.0,
            prefill_s=prefill_s if self.plan.prefill else 0.0,
            compiled=self._compiled,
            traced=self._launch.traced,
        )

    def _parts_s(self, begun: float, between: float, done: float) -> tuple[float, float]:
        """Seconds of decoding and of prefill, from when the wait began and when each part was there.

        The device runs one step after another, so a part begins where the one before it ended. A part that is
        alone has all. Where launching blocks, a part takes what launching and waiting for it take.
        """
        launch, before = self._launch, self._clock.done_at
        if done - begun > _AT_ONCE_S:
            self._clock.done_at = done
        if self._clock.launch_blocks:
            first_s = launch.second_at - launch.begun_at + between - begun
            second_s = launch.returned_at - launch.second_at + done - between
            return (second_s, first_s) if self._prefill_first else (first_s, second_s)
        if self._draw is None or not self._forwards:
            alone_s = done - max(self._prefill_at(done - begun), before)
            return alone_s, alone_s
        if self._prefill_first:
            decode_s = done - between
            prefill_s = between - max(self._prefill_at(between - begun), before)
            return decode_s if decode_s > _AT_ONCE_S else 0.0, prefill_s
        start = max(launch.second_at, before)
        if between - begun <= _AT_ONCE_S:
            between = self._unseen_end(start, between, done)
        return between - start, done - between

    def _unseen_end(self, start: float, latest: float, done: float) -> float:
        """When decoding ended, which began at `start` and was there when somebody looked, at `latest`.

        It took as long as it takes alone, if that may be; else as long as it may have, or no time where
        prefill was there, too: told too short, that would fill the steps to come.
        """
        earliest = max(start, self._prefill_at(done - latest))
        ended = max(start + self._clock.decode_s, earliest)
        if ended <= latest:
            return ended
        return latest if done - latest > _AT_ONCE_S else earliest

    def _prefill_at(self, waited_s: float) -> float:
        """When prefill began, as far as its launch goes; where there is none, when the launch returned.

        Where it was waited for, its first forward ran while the others were built. Where it was there at
        once, nobody saw when it ended: the time since its launch stands for that of the launch.
        """
        if self._forwards and waited_s > _AT_ONCE_S:
            return self._forwards[0].at
        return self._launch.second_at if self._forwards and self._prefill_first else self._launch.returned_at
