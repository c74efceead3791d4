"""Requests of every sort by the thousand, then clients killed by the hundred, on one daemon process.

    python tests/soak.py --requests 10000 --clients 200

Requests run to their end, stop at a string, are left halfway by a client that stays or goes, are refused as
too large or as no request at all. Memory must not grow, and when all is done the daemon must hold nothing: no
request, row, promise, page or client. Prints a line of JSON; the exit code is 1 where any of that is not so.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from crowd import seconds_to_rest
from daemon_process import DaemonProcess, daemon_process, process_config, write_tiny_model
from memory_trace import MemoryTrace
from scraping import is_at_rest, unbalanced
from wire_daemon import token, wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.async_client import AsyncClient
from mlxd.scheduler.config import Config
from mlxd.scheduler.errors import InvalidPromptError, ProtocolError, RejectedError, RequestFailedError

WORKERS = 12
KINDS = {"whole": 10, "stream": 10, "stop": 4, "leave": 4, "go": 2, "too_large": 2, "no_prompt": 2}
"""Sort of request: how many of 34 are of it."""
MAX_GROWTH_BYTES = 16 * 2**20
"""Over the later half of the requests. Of five thousand, that is 3 kB a request."""
MAX_REST_S = 2.0
_SAMPLES = 100


@dataclass(frozen=True)
class Report:
    """`kinds`: requests of each sort. `rest_s`: after the kill until nothing is held. `faults`: see above."""

    requests: int
    seconds: float
    kinds: dict[str, int]
    resident_mib: tuple[int, int]
    growth_bytes: int
    killed_clients: int
    rest_s: float
    faults: tuple[str, ...]


class Worker:
    """One client after another; each request is of a random sort and ends as its sort must."""

    def __init__(self, daemon: DaemonProcess, tenant: str, seed: int, done: Counter[str]) -> None:
        self._endpoint = daemon.config.server.submit
        self._tenant = tenant
        self._random = random.Random(seed)
        self._done = done
        self._client = self._connect()

    def _connect(self) -> AsyncClient:
        return AsyncClient(self._endpoint, token=token(self._tenant), timeout_s=60.0, retries=100)

    async def run(self, num_requests: int) -> None:
        for _ in range(num_requests):
            kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            await self._ask(kind, "Hello there. " * self._random.choice((1, 1, 1, 5, 30)))
            self._done[kind] += 1
        await self._client.close()

    async def _ask(self, kind: str, prompt: str) -> None:
        sampling = self._sampling()
        match kind:
            case "whole":
                await self._client.generate(prompt, sampling)
            case "stop":
                await self._client.generate(prompt, msgspec.structs.replace(sampling, stop=("e", "0")))
            case "stream":
                async for _ in self._client.stream(prompt, sampling):
                    pass
            case "too_large":
                await self._refused(prompt, SamplingParams(max_tokens=10**6))
            case "no_prompt":
                await self._refused("", sampling)
            case _:
                await self._leave(prompt, and_go=kind == "go")

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self._random.randint(1, 24),
            temperature=self._random.choice((0.0, 1.0)),
            seed=self._random.getrandbits(32),
            repetition_penalty=self._random.choice((1.0, 1.2)),
            top_logprobs=self._random.choice((None, None, 5)),
            ignore_eos=True,
        )

    async def _refused(self, prompt: str, sampling: SamplingParams) -> None:
        try:
            await self._client.generate(prompt, sampling)
        except (RejectedError, RequestFailedError, InvalidPromptError, ProtocolError):
            return
        raise AssertionError("a request that cannot be served was answered")

    async def _leave(self, prompt: str, *, and_go: bool) -> None:
        """Read the beginning of a long answer."""
        sampling = SamplingParams(max_tokens=1_000, ignore_eos=True)
        async with aclosing(self._client.stream(prompt, sampling)) as chunks:
            await anext(chunks)
            if and_go:
                await self._client.close()
                self._client = self._connect()


def soak(
    folder: Path, num_requests: int, num_clients: int, seed: int, max_rest_s: float = MAX_REST_S
) -> Report:
    """Start a daemon of a tiny model, soak it, then kill so many clients."""
    write_tiny_model(folder)
    with daemon_process(folder, _config(folder, max(num_clients, WORKERS))) as daemon:
        memory, done = MemoryTrace(daemon.process.pid), Counter[str]()
        begun = time.monotonic()
        asyncio.run(_soak(daemon, num_requests, seed, memory, done))
        seconds = time.monotonic() - begun
        faults = list(_held(daemon))
        rest_s = seconds_to_rest(daemon, num_clients)
        faults += _held(daemon)
    growth = round(memory.slope() * num_requests / 2)
    if growth > MAX_GROWTH_BYTES:
        faults.append(f"memory grew by {growth} bytes; the limit is {MAX_GROWTH_BYTES}")
    if rest_s > max_rest_s:
        faults.append(f"something was held until {rest_s:.1f} s after the kill; the limit is {max_rest_s}")
    return Report(
        requests=done.total(),
        seconds=round(seconds, 1),
        kinds=dict(done),
        resident_mib=(memory.samples[0][1] // 2**20, memory.samples[-1][1] // 2**20),
        growth_bytes=growth,
        killed_clients=num_clients,
        rest_s=round(rest_s, 2),
        faults=tuple(faults),
    )


def _config(folder: Path, num_clients: int) -> Config:
    """A row for each client."""
    rows = {"max_rows": num_clients}
    server = {"retention_s": 2.0}
    config = process_config(
        folder, folder, server=server, scheduler=rows, budget="256MiB", max_model_len=4096
    )
    tenants = tuple(
        msgspec.structs.replace(tenant, max_running=num_clients, max_waiting=num_clients)
        for tenant in config.tenants
    )
    return msgspec.structs.replace(config, tenants=tenants)


async def _soak(
    daemon: DaemonProcess, num_requests: int, seed: int, memory: MemoryTrace, done: Counter[str]
) -> None:
    async def watch() -> None:
        while True:
            memory.sample(done.total())
            seen = done.total()
            while done.total() < seen + num_requests / _SAMPLES:
                await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    shares = [num_requests // WORKERS + (worker < num_requests % WORKERS) for worker in range(WORKERS)]
    async with asyncio.TaskGroup() as workers:
        for number, share in enumerate(shares):
            worker = Worker(daemon, ("acme", "beta")[number % 2], seed + number, done)
            workers.create_task(worker.run(share))
    watching.cancel()


def _held(daemon: DaemonProcess) -> Iterator[str]:
    """What is wrong with a daemon that nobody uses."""
    try:
        wait_until(lambda: is_at_rest(daemon.scrape()), 15.0)
    except AssertionError:
        yield "requests, rows, promises, pages or clients are left"
    if different := unbalanced(daemon.scrape()):
        yield f"accepted and accounted for differ: {different}"
    if "Traceback" in daemon.log:
        yield f"the log has a traceback: {daemon.log}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxd-soak-") as folder:
        report = soak(Path(folder), options.requests, options.clients, options.seed)
    print(json.dumps(asdict(report)))
    return bool(report.faults)


if __name__ == "__main__":
    sys.exit(main())
