"""The daemon against `mlx_lm.server`: processes of their own, the same prompts at the same times.

    python benchmarks/serve.py --model smollm2 --clients 4 --requests 24 --prompt 48 --output 24
    python benchmarks/serve.py --model 1b --clients 32 --requests 256 --prompt 512 --output 128 \\
        --trace ../shared/traces/azure-llm-2023-conv.csv --time-scale 0.1 --length-scale 0.5

Both load one folder with unpacked weights (random ones for a shape), whose end of text is a token that is
never drawn, and serve one after the other; both must count the tokens that were asked for. Alone: one client.
Closed loop: so many clients, each sending its next request when its last one ended. Open loop (`--trace`):
requests when they were recorded, scaled in time and length. Greedy. Prints JSON lines: tokens a second from
the first request to the last token, first token and gaps between pieces of text as clients see them, memory,
and how many answers were the same.

The recording is AzureLLMInferenceTrace_conv.csv of the Azure Public Dataset, CC-BY 4.0 (Patel et al.,
Splitwise, ISCA 2024).
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from azure import recorded
from figures import Line, add_output_options, read_lines, record
from lm_server import LmServer
from server_load import Answer, Ask, WrongCountError, closed_loop, figures, open_loop, same
from servers import MlxdServer, Server

from mlxd.batching.blas import ensure_blas
from mlxd.scheduler.config import DecodeConfig

Record = Callable[[Line], None]

_NUM_ALONE = 4
_WARM_TOKENS = 8
_SPARE_POSITIONS = 64


def resident_bytes(pid: int) -> int:
    """The most that the process ever had in main memory."""
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith("VmHWM:"):
            return 1024 * int(text.split()[1])
    return 0


class Load(NamedTuple):
    """`num_clients`: of a closed loop; None: requests are sent when they are due."""

    asks: list[Ask]
    num_clients: int | None


async def run(server: Server, loads: dict[str, Load], record: Record) -> dict[str, list[Answer]]:
    """All answers by load; the server has ended."""
    answers: dict[str, list[Answer]] = {}
    await server.start()
    try:
        for name, (asks, num_clients) in loads.items():
            # Once unmeasured: graphs are compiled and buffers are made.
            at_once = num_clients or max(1, len(asks) // 4)
            await closed_loop(server, [_other(what) for what in asks[:at_once]], at_once)
            if num_clients is not None:
                answers[name] = await closed_loop(server, asks, num_clients)
            else:
                answers[name] = await open_loop(server, asks)
            record({"kind": name, "side": server.name, **figures(answers[name])})
        resident = resident_bytes(server.pid)
    finally:
        peak = await server.end()
    memory = {"peak_mlx_gb": round(peak / 1e9, 3), "peak_resident_gb": round(resident / 1e9, 3)}
    record({"kind": "memory", "side": server.name, **memory})
    return answers


def _other(what: Ask) -> Ask:
    """A prompt of the same length that shares no beginning with it, and a short answer."""
    words = what.prompt.split(" ")[1:]
    prompt = "".join(f" {word}" for word in reversed(words))
    return Ask(0.0, prompt, what.prompt_tokens, min(_WARM_TOKENS, what.num_tokens))


def make_loads(options: argparse.Namespace, text: Callable[[int, int], str]) -> dict[str, Load]:
    """`text`: of a seed and so many tokens."""

    def asks(sizes: Iterable[tuple[float, int, int]], seed: int) -> list[Ask]:
        return [
            Ask(at_s, text(seed + number, prompt), prompt, output)
            for number, (at_s, prompt, output) in enumerate(sizes)
        ]

    size = (0.0, options.prompt, options.output)
    loads = {
        "alone": Load(asks([size] * _NUM_ALONE, 0), 1),
        "closed": Load(asks([size] * options.requests, 1_000), options.clients),
    }
    if options.trace:
        rows = recorded(options.trace, options.time_scale, options.length_scale)
        loads["open"] = Load(asks(itertools.islice(rows, options.requests), 1_000_000), None)
    return loads


async def compare(folder: Path, options: argparse.Namespace, record: Record) -> None:
    from served_model import Words, make_folder

    model = folder / "model"
    model.mkdir()
    make_folder(options.model, options.tokenizer, model)
    loads = make_loads(options, Words(model).text)
    longest = max(what.prompt_tokens + what.num_tokens for each in loads.values() for what in each.asks)
    decode = DecodeConfig(attention=options.attention, warmup_s=options.warmup)
    ours = MlxdServer(
        folder,
        model,
        options.rows or options.clients,
        max_model_len=longest + _SPARE_POSITIONS,
        budget=options.budget,
        decode=decode,
    )
    theirs = LmServer(folder, model, options.rows or options.clients)
    answers = [await run(server, loads, record) for server in (ours, theirs)]
    for name, found in answers[0].items():
        record({"kind": "same", "load": name, "requests": len(found), **same(found, answers[1][name])})


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, or a Llama shape: tiny, 1b, 8b")
    parser.add_argument("--tokenizer", type=Path, help="its folder; the built-in model's by default")
    parser.add_argument("--clients", type=int, default=4, help="of the closed loop")
    parser.add_argument("--rows", type=int, help="most rows in a batch; as many as clients by default")
    parser.add_argument("--requests", type=int, default=24, help="of each load")
    parser.add_argument("--prompt", type=int, default=48, help="closed loop: tokens of a prompt")
    parser.add_argument("--output", type=int, default=24, help="closed loop: tokens of an answer")
    parser.add_argument("--trace", type=Path, help="the recording of the open loop")
    parser.add_argument("--time-scale", type=float, default=10.0, help="above 1 spreads arrivals")
    parser.add_argument("--length-scale", type=float, default=1 / 16, help="below 1 shortens")
    parser.add_argument("--budget", default="1GiB", help="cache.budget of mlxd")
    parser.add_argument("--attention", choices=("auto", "in_place", "gathered", "kernel"), default="auto")
    parser.add_argument("--warmup", type=float, default=20.0, help="decode.warmup_s of mlxd")
    add_output_options(parser, "serve")
    options = parser.parse_args()
    lines = read_lines(options.plot_from) if options.plot_from else measure(options)
    if options.plot:
        from plots import draw_serve

        draw_serve(lines, options.plot)


if __name__ == "__main__":
    main()
