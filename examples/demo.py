"""Two tenants, one daemon, eighteen prompts at once: what `make demo` runs."""

import asyncio
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlxd.scheduler import AsyncClient, Config, SamplingParams, errors
from mlxd.scheduler.messages import StatusReply
from mlxd.scheduler.results import TextChunk

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
    "mlxd_generation_tokens_total",
    "mlxd_steps_total",
    'mlxd_kv_bytes{state="capacity"}',
)
MAX_METRICS = 8
MAX_TOKENS = 48
QUESTION_WIDTH = 38
HEAD_START_S = 0.2  # enough for a tenant's questions to queue
READY_TIMEOUT_S = 280.0
STOP_TIMEOUT_S = 40.0
LOOK_INTERVAL_S = 0.2


@dataclass
class Stream:
    """One request as it grows. Times of the monotonic clock, in seconds."""

    tenant: str
    question: str
    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    asked_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def line(self) -> str:
        return " ".join(self.text.split())

    def add(self, chunk: TextChunk) -> None:
        if chunk.token_ids and not self.num_tokens:
            self.first_token_at = time.monotonic()
        self.text += chunk.text
        self.num_tokens += len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason or ""


@dataclass
class Show:
    """The streams on the screen: a live table on a terminal, a line at each end elsewhere.

    Attributes:
        shares: tokens of each tenant up to when the first of them had no more question waiting.
        kv_peaks: most KV bytes that each tenant's rows had reserved.
    """

    console: Console
    streams: list[Stream] = field(default_factory=list)
    shares: dict[str, int] = field(default_factory=dict)
    kv_peaks: Counter[str] = field(default_factory=Counter)

    def __rich__(self) -> Table:
        table = Table(expand=True, show_edge=False)
        table.add_column("tenant", width=6)
        table.add_column("question", width=QUESTION_WIDTH, no_wrap=True)
        table.add_column("answer", ratio=1, no_wrap=True)
        table.add_column("tokens", width=6)
        for stream in self.streams:
            tokens = f"{stream.num_tokens}{'' if stream.finish_reason else ' ...'}"
            style = COLOURS[stream.tenant]
            table.add_row(stream.tenant, stream.question, Text(stream.line), tokens, style=style)
        return table

    def of(self, tenant: str) -> list[Stream]:
        return [stream for stream in self.streams if stream.tenant == tenant]

    def advanced(self, stream: Stream) -> None:
        if not self.shares and all(other.num_tokens for other in self.of(stream.tenant)):
            self.shares = {tenant: self.num_tokens(tenant) for tenant in QUESTIONS}

    def ended(self, stream: Stream) -> None:
        if not self.console.is_terminal:
            question = f"{stream.tenant:<6}{stream.question:<{QUESTION_WIDTH}}"
            print(f"{question} -> {stream.line} [{stream.num_tokens} tokens]", flush=True)

    def num_tokens(self, tenant: str) -> int:
        return sum(stream.num_tokens for stream in self.of(tenant))

    def summary(self, weights: dict[str, float]) -> Table:
        """What each tenant got, and what it should have."""
        table = Table(
            box=box.SIMPLE_HEAD,
            caption="tokens: while both had questions waiting; first token: mean",
            caption_justify="left",
        )
        for title in ("tenant", "weight", "tokens", "share", "by weight", "first token", "KV peak"):
            table.add_column(title, justify="left" if title == "tenant" else "right")
        for tenant, weight in weights.items():
            waits = [stream.first_token_at - stream.asked_at for stream in self.of(tenant)]
            share = self.shares[tenant] / sum(self.shares.values())
            fair = weight / sum(weights.values())
            table.add_row(
                tenant,
                f"{weight:g}",
                str(self.shares[tenant]),
                f"{share:.0%}",
                f"{fair:.0%}",
                f"{statistics.mean(waits):.1f} s",
                f"{self.kv_peaks[tenant] / 2**20:.0f} MiB",
            )
        return table


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
