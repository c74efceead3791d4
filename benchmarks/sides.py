"""The engines under one interface: rows in, tokens out, step by step."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
from entry import BenchmarkError
from mlx_lm.generate import BatchGenerator
from models import BenchModel

from mlxd.batching.driver import Driver
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.row import Row
from mlxd.batching.runner import PendingStep
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config import CacheConfig, Config, SchedulerConfig, TenantConfig
from mlxd.scheduler.events import Event, Finished, Rejected, RequestKey, Submission, Tokens
from mlxd.scheduler.scheduler import Scheduler

_TENANT = "bench"
_QUEUE = 10_000
PROMPTS_AT_ONCE = 8
"""mlx-lm's own number."""


class Side(Protocol):
    """Greedy decoding of requests that always run to their full length."""

    @property
    def name(self) -> str: ...

    def add(self, request: int, prompt: Sequence[int], num_tokens: int) -> None:
        """Queue a request; it joins the batch when there is room."""
        ...

    def step(self) -> list[int]:
        """One step of the engine; the requests that got a token, which the host has now read."""
        ...

    def drain(self) -> None:
        """Wait for what is still in flight, so that nothing of this side runs in the other's time."""
        ...


class MlxLm:
    """mlx-lm's BatchGenerator."""

    name = "mlx-lm"

    def __init__(self, bench: BenchModel, max_rows: int, prompts_at_once: int = PROMPTS_AT_ONCE) -> None:
        """`prompts_at_once`: computed in one forward."""
        self._generator = BatchGenerator(
            bench.model, completion_batch_size=max_rows, prefill_batch_size=min(prompts_at_once, max_rows)
        )
        self._requests: dict[int, int] = {}

    def add(self, request: int, prompt: Sequence[int], num_tokens: int) -> None:
        (uid,) = self._generator.insert([list(prompt)], max_tokens=[num_tokens])
        self._requests[uid] = request

    def step(self) -> list[int]:
        _, responses = self._generator.next()
        return [self._requests[response.uid] for response in responses]

    def drain(self) -> None:
        mx.synchronize(self._generator.stream)

    def close(self) -> None:
        self._generator.close()


class Mlxd:
    """Our runner alone, pipelined by one step; all that waits is prefilled before the batch goes on."""

    name = "mlxd"

    def __init__(self, runner: MlxRunner, max_rows: int) -> None:
        self._max_rows = max_rows
        self._driver = Driver(runner, runner.info.memory, pipelined=True)
        self._waiting: deque[tuple[int, Sequence[int], int]] = deque()
        self._requests: dict[int, int] = {}
        self._steps_left: dict[int, int] = {}
        self._early: list[int] = []

    def add(self, request: int, prompt: Sequence[int], num_tokens: int) -> None:
        self._waiting.append((request, prompt, num_tokens))

    def step(self) -> list[int]:
        for row in [row for row in self._driver.rows if not self._steps_left[row.row_id]]:
            self._driver.leave(row)
        joined = self._join()
        if joined:
            self.drain()
            self._driver.prefill(joined)
        for row in self._driver.rows:
            self._steps_left[row.row_id] -= 1
        results = self._driver.decode() if self._driver.rows else self._driver.flush()
        got, self._early = self._early + [self._requests[r.row_id] for r in results], []
        return got

    def _join(self) -> list[Row]:
        joined = []
        while self._waiting and len(self._driver.rows) < self._max_rows:
            request, prompt, num_tokens = self._waiting.popleft()
            row = self._driver.join(prompt)
            self._requests[row.row_id] = request
            self._steps_left[row.row_id] = num_tokens
            joined.append(row)
        return joined

    def drain(self) -> None:
        self._early += [self._requests[result.row_id] for result in self._driver.flush()]


class Scheduled:
    """Our scheduler and runner in the engine's order, without its thread, sockets and text.

    Attributes:
        slowest_chunk_s: of the prefill chunks so far; those of one step count alike.
    """

    name = "mlxd"

    def __init__(self, runner: MlxRunner, max_rows: int, prefill_ms: float) -> None:
        """`prefill_ms`: most milliseconds of prefill between two decode steps."""
        config = Config(
            version=1,
            tenants=(
                TenantConfig(name=_TENANT, token_sha256="0" * 64, max_running=max_rows, max_waiting=_QUEUE),
            ),
            scheduler=SchedulerConfig(max_rows=max_rows, max_waiting=_QUEUE, prefill_ms=prefill_ms),
            cache=CacheConfig(prefix=False),
        )
        self._runner = runner
        self._scheduler = Scheduler(config, runner.info)
        self._launched: deque[PendingStep] = deque()
        self._events: list[Event] = []
        self.slowest_chunk_s = 0.0

    def add(self, request: int, prompt: Sequence[int], num_tokens: int) -> None:
        key = RequestKey(_TENANT, str(request))
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        submission = Submission(key, tuple(prompt), sampling, time.monotonic())
        submission.check(self._runner.info.vocab_size)
        event = self._scheduler.submit(submission)
        if isinstance(event, Rejected):
            raise BenchmarkError(f"{event.reason}: {event.message}")

    def step(self) -> list[int]:
        plan = self._scheduler.schedule(time.monotonic(), self._events)
        if plan is not None:
            self._launched.append(self._runner.launch(plan))
        if self._launched and (len(self._launched) > 1 or plan is None):
            self._read_oldest()
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, Finished) and event.outcome != "length":
                raise BenchmarkError(
                    f"request {event.key.request_id}: {event.outcome} {event.error}".rstrip()
                )
        return [int(event.key.request_id) for event in events if isinstance(event, Tokens)]

    def drain(self) -> None:
        while self._launched:
            self._read_oldest()

    def _read_oldest(self) -> None:
        step = self._launched.popleft()
        result = step.wait()
        size = self._runner.info.memory.chunk
        if chunks := sum(-(-part.num_tokens // size) for part in step.plan.prefill):
            self.slowest_chunk_s = max(self.slowest_chunk_s, result.prefill_s / chunks)
        self._scheduler.postprocess(step.plan, result, time.monotonic(), self._events)
