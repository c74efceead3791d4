"""Two tenants, one daemon, eighteen prompts at once: what `make demo` runs."""

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import msgspec
from demo_show import QUESTIONS, Show, Stream
from rich.console import Console
from rich.live import Live

from mlxd.scheduler import AsyncClient, Config, SamplingParams, errors
from mlxd.scheduler.messages import StatusReply

CONFIG = Path(__file__).resolve().parent.parent / "deploy" / "demo.yaml"
TOKENS = {"acme": "demo-acme-token", "beta": "demo-beta-token"}
METRICS = (
    "mlxd_requests_total",
    "mlxd_generation_tokens_total",
    "mlxd_steps_total",
    'mlxd_kv_bytes{state="capacity"}',
)
MAX_METRICS = 8
MAX_TOKENS = 48
HEAD_START_S = 0.2  # enough for a tenant's questions to queue
READY_TIMEOUT_S = 280.0
STOP_TIMEOUT_S = 40.0
LOOK_INTERVAL_S = 0.2


def private_config(folder: Path) -> Config:
    """deploy/demo.yaml with sockets and a port that nobody else has."""
    config = Config.load(CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = msgspec.structs.replace(
        config.server,
        submit=f"ipc://{folder}/submit",
        control=f"ipc://{folder}/control",
        metrics=f"127.0.0.1:{port}",
    )
    return msgspec.structs.replace(config, server=server)


@contextmanager
def daemon(config: Config, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`mlxd serve` with its progress on our terminal; ended in any case. `path`: where its YAML goes."""
    path.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "mlxd.scheduler", "serve", str(path), "--log-level", "warning"]
    process = subprocess.Popen(command, process_group=0)  # a Ctrl-C is for us; we end it then
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def wait_until_ready(client: AsyncClient, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"demo: the daemon ended with code {process.returncode}")
        try:
            if (await client.status()).state != "starting":
                return
        except (errors.ConnectionLostError, errors.ClientTimeoutError):
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"demo: the daemon was not ready within {READY_TIMEOUT_S:.0f} s")


async def ask(client: AsyncClient, stream: Stream, show: Show) -> None:
    messages = [{"role": "user", "content": stream.question}]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    stream.asked_at = time.monotonic()
    async for chunk in client.stream(messages=messages, sampling=sampling):
        stream.add(chunk)
        show.advanced(stream)
    show.ended(stream)


async def ask_all(clients: dict[str, AsyncClient], show: Show) -> None:
    """Each tenant asks all it has at once; the second one does so while the first one's questions wait."""
    show.streams = [Stream(tenant, question) for tenant in clients for question in QUESTIONS[tenant]]
    asked: list[asyncio.Task[None]] = []
    try:
        for tenant, client in clients.items():
            asked += [asyncio.create_task(ask(client, stream, show)) for stream in show.of(tenant)]
            await asyncio.sleep(HEAD_START_S)
        await asyncio.gather(*asked)
    finally:
        await ended(asked)


async def ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what still runs and wait for it; whatever it raises then is nobody's news."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def look_on(operator: AsyncClient, show: Show) -> None:
    """Note what rows hold, until cancelled."""
    while True:
        for tenant, at in (await operator.status()).tenants.items():
            show.kv_peaks[tenant] = max(show.kv_peaks[tenant], at.kv_reserved_bytes)
        await asyncio.sleep(LOOK_INTERVAL_S)


async def watch_all(clients: dict[str, AsyncClient], show: Show, weights: dict[str, float]) -> None:
    started = time.monotonic()
    live = Live(show, console=show.console, refresh_per_second=10) if show.console.is_terminal else None
    with live or nullcontext():
        looking = asyncio.create_task(look_on(clients["acme"], show))
        try:
            await ask_all(clients, show)
        finally:
            await ended([looking])
    took = time.monotonic() - started
    for tenant in clients:
        longest = max(show.of(tenant), key=lambda stream: stream.num_tokens)
        print(f"\n{tenant} asked: {longest.question}\n{longest.text.strip()}")
    total = sum(show.num_tokens(tenant) for tenant in clients)
    print(f"\n{total} tokens in {took:.1f} s, {total / took:.0f} a second")
    show.console.print(show.summary(weights))


def print_metrics(address: str) -> None:
    print(f"from http://{address}/metrics:")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        samples = [line.rpartition(" ") for line in reply.read().decode().splitlines()]
    shown = [(name, float(value)) for name, _, value in samples if name.startswith(METRICS)]
    for name, value in [(name, value) for name, value in shown if value][:MAX_METRICS]:
        print(f"  {name} {value:,.0f}")


def introduce(status: StatusReply, config: Config) -> None:
    tenants = ", ".join(f"{tenant.name} (weight {tenant.weight:g})" for tenant in config.tenants)
    questions = sum(map(len, QUESTIONS.values()))
    print(
        f"{status.model} on {status.notes['device']}: {questions} questions of {tenants} "
        f"share {config.scheduler.max_rows} rows\n",
        flush=True,
    )


async def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mlxd-demo-") as folder, ExitStack() as stack:
        config = private_config(Path(folder))
        process = stack.enter_context(daemon(config, Path(folder) / "demo.yaml"))
        async with (
            AsyncClient(config.server.submit, token=TOKENS["acme"], retries=10) as acme,
            AsyncClient(config.server.submit, token=TOKENS["beta"], retries=10) as beta,
        ):
            for client in (acme, beta):
                await wait_until_ready(client, process)
            introduce(await acme.status(), config)
            weights = {tenant.name: tenant.weight for tenant in config.tenants}
            await watch_all({"acme": acme, "beta": beta}, Show(Console()), weights)
            await asyncio.to_thread(print_metrics, config.server.metrics)
            await acme.drain()
        code = await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        print(f"\ndrained; the daemon ended with code {code}")
        return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(asyncio.run(main()))
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the daemon was stopped", file=sys.stderr)
        sys.exit(130)
    except errors.MlxdError as error:
        sys.exit(f"demo: {error}")
