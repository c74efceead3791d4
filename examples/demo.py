"""Two tenants, one daemon, eighteen prompts at once: what `make demo` runs."""

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
        "What is the capital of France?",
        "List five fruits.",
        "Write one sentence about honey.",
        "List five countries in Asia.",
        "Write one sentence about a cat.",
        "List five programming languages.",
        "List the four directions.",
        "Write one sentence about bees.",
        "What is the largest ocean on Earth?",
        "List three primary colours.",
        "Write one sentence about snow.",
        "Write one sentence about trees.",
    ),
    "beta": (
        "List five countries in Europe.",
        "Write one sentence about the moon.",
        "List five colors.",
        "Write one sentence about a dog.",
        "List the five senses.",
        "List five countries in South America.",
    ),
}
METRICS = (
    "mlxd_requests_total",
    "mlxd_prompt_tokens_total",
    "mlxd_generation_tokens_total",
    "mlxd_time_to_first_token_seconds_sum",
    "mlxd_steps_total",
    "mlxd_kv_bytes",
)
MAX_TOKENS = 48
HEAD_START_S = 0.2  # enough for a tenant's questions to queue
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
    """The streams on the screen: a live table on a terminal, a line at each end elsewhere.

    Attributes:
        shares: tokens of each tenant up to when the first of them had no more question waiting.
    """

    console: Console
    streams: list[Stream] = field(default_factory=list)
    shares: dict[str, int] = field(default_factory=dict)

    def __rich__(self) -> Table:
        table = Table("tenant", "question", "answer", "tokens", expand=True, show_edge=False)
        for stream in self.streams:
            answer = Text(" ".join(stream.text.split()), no_wrap=True, overflow="ellipsis")
            tokens = f"{stream.num_tokens}{'' if stream.finish_reason else ' ...'}"
            table.add_row(stream.tenant, stream.question, answer, tokens, style=COLOURS[stream.tenant])
        return table

    def advanced(self, stream: Stream) -> None:
        if not self.shares and all(s.num_tokens for s in self.streams if s.tenant == stream.tenant):
            self.shares = {tenant: self.num_tokens(tenant) for tenant in QUESTIONS}

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
        show.advanced(stream)
    show.ended(stream)


async def ask_all(clients: dict[str, AsyncClient], show: Show) -> None:
    """Each tenant asks all it has at once; the second one does so while the first one's questions wait."""
    show.streams = [Stream(tenant, question) for tenant in clients for question in QUESTIONS[tenant]]
    asked: list[asyncio.Task[None]] = []
    for tenant, client in clients.items():
        streams = [stream for stream in show.streams if stream.tenant == tenant]
        asked += [asyncio.create_task(ask(client, stream, show)) for stream in streams]
        await asyncio.sleep(HEAD_START_S)
    await asyncio.gather(*asked)


async def watch_all(clients: dict[str, AsyncClient], show: Show, weights: dict[str, float]) -> None:
    started = time.monotonic()
    with (
        Live(show, console=show.console, refresh_per_second=10) if show.console.is_terminal else nullcontext()
    ):
        await ask_all(clients, show)
    took = time.monotonic() - started
    total = sum(show.num_tokens(tenant) for tenant in clients)
    print(f"\n{total} tokens in {took:.1f} s, {total / took:.0f} a second")
    for tenant, share in show.shares.items():
        named = f"{tenant} (weight {weights[tenant]:g})"
        print(f"{named}: {share} tokens while both had questions waiting, {show.num_tokens(tenant)} in all")


def print_metrics(address: str) -> None:
    print(f"\nfrom http://{address}/metrics:")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        for line in reply.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(METRICS) and float(value):
                print(f"  {name} {float(value):g}")


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
        sys.exit(130)
    except errors.MlxdError as error:
        sys.exit(f"demo: {error}")
