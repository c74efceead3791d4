"""The two engines under one interface: rows in, tokens out, step by step."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from models import BenchModel

from mlxd.batching.driver import Driver
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.row import Row


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

    def __init__(self, bench: BenchModel, max_rows: int) -> None:
        self._generator = BatchGenerator(
            bench.model, completion_batch_size=max_rows, prefill_batch_size=min(8, max_rows)
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
    """Our runner, driven as the engine drives it: pipelined by one step, without sockets and tenants."""

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
