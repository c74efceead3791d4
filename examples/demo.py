"""Two tenants, one daemon, a dozen prompts at once: what `make demo` runs."""

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlxd.scheduler import AsyncClient, Config, SamplingParams, errors

CONFIG = Path(__file__).resolve().parent.parent / "deploy" / "demo.yaml"
TOKENS = {"acme": "demo-acme-token", "beta": "demo-beta-token"}
COLOURS = {"acme": "cyan", "beta": "magenta"}
QUESTIONS = {
    "acme": (
        "Name three primary colours.",
        "What is the capital of France?",
        "Write one sentence about the sea.",
        "Why do cats purr?",
        "Who wrote Hamlet?",
        "Give a synonym of happy.",
    ),
    "beta": (
        "Name three large rivers.",
        "What is the capital of Italy?",
        "Write one sentence about the moon.",
        "Why is the sky blue?",
        "Who painted the Mona Lisa?",
        "Give a synonym of fast.",
    ),
}
METRICS = (
    "mlxd_requests_total",
    "mlxd_generation_tokens_total",
    "mlxd_tenant_service_total",
    "mlxd_kv_bytes",
    "mlxd_steps_total",
    "mlxd_graph_compiles_total",
    "mlxd_time_to_first_token_seconds_sum",
)
MAX_TOKENS = 48
READY_TIMEOUT_S = 280.0
STOP_TIMEOUT_S = 40.0


@dataclass
class Stream:
    """One request as it grows."""

    tenant: str
    question: str
    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""

    def add(self, text: str, num_tokens: int, finish_reason: str | None) -> None:
        self.text += text
        self.num_tokens += num_tokens
        self.finish_reason = finish_reason or ""


@dataclass
class Show:
    """The streams on the screen: a live table on a terminal, a line at each end elsewhere."""

    console: Console
    streams: list[Stream] = field(default_factory=list)

    def __rich__(self) -> Table:
        table = Table("tenant", "question", "answer", "tokens", expand=True, show_edge=False)
        for stream in self.streams:
            answer = Text(" ".join(stream.text.split()), no_wrap=True, overflow="ellipsis")
            tokens = f"{stream.num_tokens}{'' if stream.finish_reason else ' ...'}"
            table.add_row(stream.tenant, stream.question, answer, tokens, style=COLOURS[stream.tenant])
        return table

    def ended(self, stream: Stream) -> None:
        if not self.console.is_terminal:
            text = " ".join(stream.text.split())
            print(f"{stream.tenant}  {stream.question} -> {text} [{stream.num_tokens} tokens]", flush=True)

    def num_tokens(self, tenant: str) -> int:
        return sum(stream.num_tokens for stream in self.streams if stream.tenant == tenant)


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
    process = subprocess.Popen(command)
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
    async for chunk in client.stream(messages=messages, sampling=sampling):
        stream.add(chunk.text, len(chunk.token_ids), chunk.finish_reason)
    show.ended(stream)


async def ask_all(clients: dict[str, AsyncClient], show: Show) -> dict[str, int]:
    """Both tenants ask everything at once. Returns the tokens each had when the first was served in full."""
    show.streams = [Stream(tenant, question) for tenant in clients for question in QUESTIONS[tenant]]
    halves = [
        asyncio.gather(*(ask(client, stream, show) for stream in show.streams if stream.tenant == tenant))
        for tenant, client in clients.items()
    ]
    await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
    shares = {tenant: show.num_tokens(tenant) for tenant in clients}
    await asyncio.gather(*halves)
    return shares


async def watch_all(clients: dict[str, AsyncClient], show: Show) -> None:
    started = time.monotonic()
    with (
        Live(show, console=show.console, refresh_per_second=10) if show.console.is_terminal else nullcontext()
    ):
        shares = await ask_all(clients, show)
    took = time.monotonic() - started
    total = sum(show.num_tokens(tenant) for tenant in clients)
    print(f"\n{total} tokens in {took:.1f} s, {total / took:.0f} a second")
    for tenant, share in shares.items():
        print(f"{tenant}: {share} tokens when the first tenant was done, {show.num_tokens(tenant)} in all")


def print_metrics(address: str) -> None:
    print(f"\nfrom http://{address}/metrics:")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith(METRICS) and not line.endswith(" 0.0"):
                print(f"  {line}")


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
            await watch_all({"acme": acme, "beta": beta}, Show(Console()))
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
        sys.exit(130)
    except errors.MlxdError as error:
        sys.exit(f"demo: {error}")
