"""What durability costs: time and requests a second, without a journal and with each fsync policy.

    python benchmarks/journal.py [--requests 300] [--clients 1 16] [--folder DIR] [--out FILE]

Requests of one token over real sockets to a runner without a model, so that the journal is all there is to
see. The settings take turns, three rounds each. Prints a JSON line for each number of requests that are under
way at once: medians over the rounds. `--folder` says on which disk the journal lies; `fsync_ms` is its own.
"""

import asyncio
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import entry
from figures import record
from options import Parser, add_out, number_from
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from mlxd.batching.fake_runner import FakeRunner
from mlxd.batching.sampling_params import SamplingParams
from mlxd.batching.text import Tokenizer
from mlxd.scheduler.async_client import AsyncClient
from mlxd.scheduler.config import Config, JournalConfig, ServerConfig, TenantConfig
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.server import Server

SETTINGS = {
    "none": JournalConfig(),
    "accepted, fsync never": JournalConfig(durability="accepted", path="journal", fsync="never"),
    "accepted, fsync always": JournalConfig(durability="accepted", path="journal", fsync="always"),
}
ROUNDS = 3
TOKEN = "benchmark"


def tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return Tokenizer(raw, special_tokens={})


def make_config(folder: Path, journal: JournalConfig) -> Config:
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    path = journal.path and str(folder / journal.path)
    return Config(
        version=1,
        tenants=(TenantConfig(name="acme", token_sha256=digest, max_waiting=1024),),
        server=ServerConfig(
            submit=f"ipc://{folder}/s", control=f"ipc://{folder}/c", metrics="127.0.0.1:0", drain_timeout_s=1
        ),
        journal=JournalConfig(durability=journal.durability, path=path, fsync=journal.fsync),
    )


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[None]:
    text = tokenizer()
    engine = Engine(config, runner_factory=lambda config, progress: FakeRunner(vocab_size=text.vocab_size))
    server = Server(config, engine=engine, tokenizer=text)
    task = asyncio.create_task(server.serve(handle_signals=False))
    try:
        yield
    finally:
        server.request_drain()
        await task


async def measure(config: Config, num_requests: int, num_clients: int) -> tuple[list[float], float]:
    """Milliseconds of each request, and requests a second, with `num_clients` under way at once."""
    times_ms: list[float] = []
    left = iter(range(num_requests))
    sampling = SamplingParams(max_tokens=1, seed=1)
    async with (
        serving(config),
        AsyncClient(config.server.submit, token=TOKEN, retries=50, wait_s=10) as client,
    ):
        while await client.ping() != "running":
            await asyncio.sleep(0.01)

        async def work() -> None:
            for _ in left:
                begun = time.perf_counter()
                await client.generate("a prompt of some words", sampling)
                times_ms.append((time.perf_counter() - begun) * 1000)

        begun = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(num_clients)))
        return times_ms, num_requests / (time.perf_counter() - begun)


def fsync_ms(folder: Path) -> float:
    """Median of 50 appends of 4 KiB, each synced."""
    times = []
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(50):
            begun = time.perf_counter()
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


def compare(folder: Path, num_requests: int, num_clients: int) -> dict[str, object]:
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SETTINGS}
    for number in range(ROUNDS):
        for name, journal in SETTINGS.items():
            place = Path(tempfile.mkdtemp(dir=folder, prefix=f"{number}-"))
            times_ms, per_s = asyncio.run(measure(make_config(place, journal), num_requests, num_clients))
            centiles = statistics.quantiles(times_ms, n=100)
            rounds[name].append((centiles[49], centiles[98], per_s))
    medians = {
        name: [statistics.median(values) for values in zip(*runs, strict=True)]
        for name, runs in rounds.items()
    }
    return {
        "clients": num_clients,
        "requests": num_requests,
        "fsync_ms": round(fsync_ms(folder), 3),
        "settings": {
            name: {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "requests_per_s": round(per_s)}
            for name, (p50, p99, per_s) in medians.items()
        },
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--requests", type=number_from(2), default=300)
    parser.add_argument("--clients", type=number_from(1), nargs="+", default=[1, 16])
    parser.add_argument("--folder", type=Path)
    add_out(parser, "journal")
    arguments = parser.options()
    for num_clients in arguments.clients:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            line = compare(Path(folder), arguments.requests, num_clients)
        record(line, arguments.out)


if __name__ == "__main__":
    entry.run(main)
