"""The daemon against `mlx_lm.server`: processes of their own, the same prompts at the same times.

    python benchmarks/serve.py --model smollm2 --clients 4 --requests 24 --prompt 48 --output 24
    python benchmarks/serve.py --model 1b --clients 32 --requests 256 --prompt 512 --output 128 \\
        --trace examples/traces/AzureLLMInferenceTrace_conv.csv --time-scale 0.1 --length-scale 0.5

Both load one folder with unpacked weights (random ones for a shape), whose end of text is a token that is
never drawn, and take turns, a load each; both must count the tokens that were asked for. Alone: one client.
Closed loop: so many clients, each sending its next request when its last one ended. Open loop (`--trace`):
requests when they were recorded, scaled in time and length. Greedy. Prints JSON lines: tokens a second from
the first request to the last token, first token and gaps between pieces of text as clients see them, how many
answers were the same, processor time, and memory.

The recording is AzureLLMInferenceTrace_conv.csv of the Azure Public Dataset, CC-BY 4.0 (Patel et al.,
Splitwise, ISCA 2024).
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import entry
from azure import recorded
from figures import Line, Record, read_lines, record
from lm_server import LmServer
from options import SMOLLM2, Parser, add_output, amount, input_file, number_from, tokenizer_folder
from server_load import Answer, Ask, WrongCountError, closed_loop, figures, open_loop, same
from servers import MlxdServer, Server
from shapes import LLAMAS

from mlxd.batching.blas import ensure_blas
from mlxd.scheduler.config import DecodeConfig

_NUM_ALONE = 4
_WARM_TOKENS = 8
_SPARE_POSITIONS = 64


def resident_bytes(pid: int) -> int:
    """The most that the process ever had in main memory."""
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith("VmHWM:"):
            return 1024 * int(text.split()[1])
    return 0


def cpu_s(pid: int) -> float:
    """Processor time of all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Load(NamedTuple):
    """`num_clients`: of a closed loop; None: requests are sent when they are due."""

    asks: list[Ask]
    num_clients: int | None


async def send(server: Server, load: Load) -> list[Answer]:
    if load.num_clients is None:
        return await open_loop(server, load.asks)
    return await closed_loop(server, load.asks, load.num_clients)


async def warm(server: Server, loads: Iterable[Load]) -> None:
    """Graphs are compiled and buffers are made before anything is timed."""
    for asks, num_clients in loads:
        at_once = num_clients or max(1, len(asks) // 4)
        await closed_loop(server, [_other(what) for what in asks[:at_once]], at_once)


async def take_turns(servers: Sequence[Server], rounds: Sequence[dict[str, Load]], record: Record) -> None:
    """Every load of every round to one server, then to the other; which is first changes."""
    for server in servers:
        await warm(server, rounds[0].values())
    ratios: dict[str, list[float]] = {}
    for number, loads in enumerate(rounds):
        for name, load in loads.items():
            answers, speeds = {}, {}
            for server in servers if number % 2 == 0 else servers[::-1]:
                cpu_begun_s = cpu_s(server.pid)
                found = answers[server.name] = await send(server, load)
                line = figures(found) | {"cpu_s": round(cpu_s(server.pid) - cpu_begun_s, 2)}
                speeds[server.name] = line["tokens_per_s"]
                record({"kind": "load", "load": name, "round": number, "side": server.name, **line})
            ours, theirs = (server.name for server in servers)
            record({"kind": "same", "load": name, "round": number, **same(answers[ours], answers[theirs])})
            ratios.setdefault(name, []).append(round(speeds[ours] / speeds[theirs], 3))
    for name, by_round in ratios.items():
        ratio = round(statistics.median(by_round), 3)
        record({"kind": "ratio", "load": name, "mlxd_over_mlx_lm": ratio, "rounds": by_round})


def _other(what: Ask) -> Ask:
    """A prompt of the same length that shares no beginning with it, and a short answer."""
    words = what.prompt.split(" ")[1:]
    prompt = "".join(f" {word}" for word in reversed(words))
    return Ask(0.0, prompt, what.prompt_tokens, min(_WARM_TOKENS, what.num_tokens))


def make_loads(options: argparse.Namespace, text: Callable[[int, int], str], number: int) -> dict[str, Load]:
    """Of a round. `text`: of a seed and so many tokens."""

    def asks(sizes: Iterable[tuple[float, int, int]], seed: int) -> list[Ask]:
        return [
            Ask(at_s, text(seed + 10_000 * number + index, prompt), prompt, output)
            for index, (at_s, prompt, output) in enumerate(sizes)
        ]

    size = (0.0, options.prompt, options.output)
    loads = {
        "alone": Load(asks([size] * _NUM_ALONE, 0), 1),
        "closed": Load(asks([size] * options.requests, 10**8), options.clients),
    }
    if options.trace:
        rows = recorded(options.trace, options.time_scale, options.length_scale)
        loads["open"] = Load(asks(itertools.islice(rows, options.requests), 2 * 10**8), None)
    return loads


async def compare(folder: Path, options: argparse.Namespace, record: Record) -> None:
    from served_model import Words, make_folder

    model = folder / "model"
    model.mkdir()
    make_folder(options.model, options.tokenizer, model)
    words = Words(model)
    rounds = [make_loads(options, words.text, number) for number in range(options.rounds)]
    asks = [what for loads in rounds for load in loads.values() for what in load.asks]
    max_rows = options.rows or options.clients
    ours = MlxdServer(
        folder,
        model,
        max_rows,
        max_model_len=max(what.prompt_tokens + what.num_tokens for what in asks) + _SPARE_POSITIONS,
        budget=options.budget,
        decode=DecodeConfig(attention=options.attention, warmup_s=options.warmup),
    )
    servers: list[Server] = [ours, LmServer(folder, model, max_rows)]
    async with AsyncExitStack() as started:
        for server in servers:
            await started.enter_async_context(serving(server, record))
        await take_turns(servers, rounds, record)


@asynccontextmanager
async def serving(server: Server, record: Record) -> AsyncIterator[None]:
    """Tells at the end how much memory it took."""
    resident = 0
    try:
        await server.start()
        yield
        resident = resident_bytes(server.pid)
    finally:
        peak = await server.end()
    memory = {"peak_mlx_gb": round(peak / 1e9, 3), "peak_resident_gb": round(resident / 1e9, 3)}
    record({"kind": "memory", "side": server.name, **memory})


def measure(options: argparse.Namespace) -> list[Line]:
    lines: list[Line] = []
    sizes = {"prompt": options.prompt, "output": options.output, "clients": options.clients}
    scales = {"time_scale": options.time_scale, "length_scale": options.length_scale} if options.trace else {}

    def keep(line: Line) -> None:
        lines.append({"model": options.model, **sizes, **scales} | line)
        record(lines[-1], options.out)

    blas = ensure_blas()
    from machine import describe

    keep(describe(blas))
    with tempfile.TemporaryDirectory(prefix="mlxd-serve-") as folder:
        try:
            asyncio.run(compare(Path(folder), options, keep))
        except WrongCountError as error:
            sys.exit(str(error))
    return lines


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--model", choices=(SMOLLM2, *LLAMAS), default=SMOLLM2, help="a shape gets random weights"
    )
    parser.add_argument(
        "--tokenizer", type=tokenizer_folder, help="its folder; the built-in model's by default"
    )
    parser.add_argument("--clients", type=number_from(1), default=4, help="of the closed loop")
    parser.add_argument(
        "--rows", type=number_from(1), help="most rows in a batch; as many as clients by default"
    )
    parser.add_argument("--requests", type=number_from(1), default=24, help="of each load")
    parser.add_argument(
        "--rounds", type=number_from(1), default=2, help="of all loads, each with prompts of its own"
    )
    parser.add_argument("--prompt", type=number_from(1), default=48, help="closed loop: tokens of a prompt")
    parser.add_argument("--output", type=number_from(2), default=24, help="closed loop: tokens of an answer")
    parser.add_argument("--trace", type=input_file, help="the recording of the open loop")
    parser.add_argument("--time-scale", type=amount, default=10.0, help="above 1 spreads arrivals")
    parser.add_argument("--length-scale", type=amount, default=1 / 16, help="below 1 shortens")
    parser.add_argument("--budget", default="1GiB", help="cache.budget of mlxd")
    parser.add_argument("--attention", choices=("auto", "in_place", "gathered", "kernel"), default="auto")
    parser.add_argument("--warmup", type=amount, default=20.0, help="decode.warmup_s of mlxd")
    add_output(parser, "serve")
    options = parser.options()
    lines = read_lines(options.plot_from, "load") if options.plot_from else measure(options)
    if options.plot:
        from plots import draw_serve

        draw_serve(lines, options.plot)


if __name__ == "__main__":
    entry.run(main)
