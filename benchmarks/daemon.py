"""`mlxd serve` as a process of its own, and a client of it."""

import asyncio
import hashlib
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import msgspec
from entry import BenchmarkError

from mlxd.scheduler import AsyncClient
from mlxd.scheduler.config import (
    CacheConfig,
    Config,
    DecodeConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    TenantConfig,
)

PAGE_SIZE = 64
_TOKEN = "benchmark"
_START_S = 300.0
"""A first start on CUDA compiles kernels for minutes."""
_LOOK_INTERVAL_S = 0.1


def make_config(folder: Path, model: str, max_rows: int, cache: CacheConfig) -> Config:
    """One tenant; sockets in `folder`, a metrics port that nobody else has.

    What a start would time is fixed, so that all daemons of a benchmark run the same.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Config(
        version=1,
        tenants=(TenantConfig(name="bench", token_sha256=hashlib.sha256(_TOKEN.encode()).hexdigest()),),
        server=ServerConfig(
            submit=f"ipc://{folder}/submit", control=f"ipc://{folder}/control", metrics=f"127.0.0.1:{port}"
        ),
        model=ModelConfig(path=model),
        scheduler=SchedulerConfig(max_rows=max_rows, prefill_chunk=PAGE_SIZE),
        cache=cache,
        decode=DecodeConfig(compile="off", attention="in_place", warmup_s=1),
    )


class Daemon:
    """Serves from `start` to `end`, and may be started again."""

    def __init__(self, folder: Path, config: Config) -> None:
        """`folder`: where its YAML goes."""
        self.config = config
        path = folder / "daemon.yaml"
        path.write_bytes(msgspec.json.encode(config))
        self._command = (sys.executable, "-m", "mlxd.scheduler", "serve", str(path), "--log-level", "warning")
        self._process: asyncio.subprocess.Process | None = None
        self._client: AsyncClient | None = None

    @property
    def client(self) -> AsyncClient:
        assert self._client is not None
        return self._client

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns when it takes requests."""
        # Ctrl-C is for the benchmark, which then ends the daemon.
        self._process = await asyncio.create_subprocess_exec(*self._command, start_new_session=True)
        self._client = AsyncClient(
            self.config.server.submit, token=_TOKEN, timeout_s=_START_S, wait_s=_START_S
        )
        ended = asyncio.ensure_future(self._process.wait())
        running = asyncio.ensure_future(_running(self._client))
        try:
            await asyncio.wait((ended, running), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise BenchmarkError(f"mlxd serve ended with {ended.result()}; what it said is above")
            await running
        finally:
            ended.cancel()
            running.cancel()

    async def end(self, by: signal.Signals = signal.SIGTERM) -> None:
        """A second call does nothing."""
        process, client = self._process, self._client
        self._process = self._client = None
        if process is not None and process.returncode is None:
            process.send_signal(by)
            await process.wait()
        if client is not None:
            await client.close()

    def metrics(self) -> dict[str, float]:
        """Series, named as on the page, and their values now."""
        with urllib.request.urlopen(f"http://{self.config.server.metrics}/metrics", timeout=5) as reply:
            lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def _running(client: AsyncClient) -> None:
    while await client.ping() != "running":
        await asyncio.sleep(_LOOK_INTERVAL_S)
