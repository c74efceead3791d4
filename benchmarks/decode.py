"""Decoding with mlxd against mlx-lm's BatchGenerator: one model, one BLAS, one process.

    python benchmarks/decode.py --model smollm2 --rows 1,8,32 --context 256 --steps 32
    python benchmarks/decode.py --model smollm2 --arrivals 40 --rate 2

Steady: both engines hold the same full batch and take turns, a block of steps each, the first to go
alternating. Arrivals: the same Poisson arrivals are served by one engine, then by the other. Prints JSON
lines, or with `--table` one table; `--out` adds the lines to a file.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mlxd.batching.blas import ensure_blas

if TYPE_CHECKING:
    from models import BenchModel
    from sides import Side

_WARM_STEPS = 2
"""Steps at a block's start that are not counted: an engine that is pipelined has none in flight there."""

Record = Callable[[dict[str, object]], None]


def main() -> None:
    options = _options()
    # Whatever imports mlx comes after the BLAS that it is to use.
    blas = ensure_blas()
    from models import load

    bench = load(options.model)
    common = {"model": options.model, "blas": blas.name}
    lines: list[dict[str, object]] = []

    def record(line: dict[str, object]) -> None:
        lines.append(line)
        text = json.dumps(common | line)
        if not options.table:
            print(text, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(text + "\n")

    for rows in options.rows:
        if options.arrivals:
            _arrivals(bench, rows, options, record)
        else:
            _steady(bench, rows, options, record)
    if options.table:
        _print_table(f"{bench.name}, {blas.name}, {options.context} prompt tokens", lines)


def _print_table(title: str, lines: list[dict[str, object]]) -> None:
    """A row of the table for each number of rows in the batch."""
    table = Table(
        "rows", "mlxd tokens/s", "mlx-lm tokens/s", "mlxd over mlx-lm", title=title, show_edge=False
    )
    speeds: dict[str, object] = {}
    for line in lines:
        if "side" in line:
            speeds[str(line["side"])] = line["tokens_per_s"]
        elif "mlxd_over_mlx_lm" in line:
            values = (line["rows"], speeds["mlxd"], speeds["mlx-lm"], line["mlxd_over_mlx_lm"])
            table.add_row(*map(str, values))
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, tiny, 1b, 8b (random weights), or a model folder"
    )
    parser.add_argument("--rows", type=_numbers, default=[1, 8, 32], help="rows of the batch, as 1,8,32")
    parser.add_argument("--context", type=int, default=256, help="prompt tokens (of arrivals: the average)")
    parser.add_argument(
        "--steps", type=int, default=12, help="steps a block (of arrivals: average output tokens)"
    )
    parser.add_argument("--blocks", type=int, default=6, help="blocks an engine")
    parser.add_argument(
        "--arrivals", type=int, default=0, help="number of Poisson arrivals; 0 measures steady decode"
    )
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals a second")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--attention", choices=("auto", "in_place", "gathered", "kernel"), default="auto")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--table", action="store_true", help="print a table at the end, no JSON lines")
    parser.add_argument("--out", type=Path, help="file to append the JSON lines to")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _sides(
    bench: "BenchModel", rows: int, longest: int, options: argparse.Namespace, record: Record
) -> list["Side"]:
    from models import make_runner
    from sides import Mlxd, MlxLm

    runner = make_runner(
        bench,
        max_rows=rows,
        max_model_len=longest,
        page_size=options.page_size,
        attention=options.attention,
        compile=options.compile,
    )
    record({"kind": "choices", "rows": rows} | runner.info.notes)
    return [Mlxd(runner, rows), MlxLm(bench, rows)]


def _steady(bench: "BenchModel", rows: int, options: argparse.Namespace, record: Record) -> None:
    rng = random.Random(0)
    num_tokens = (options.blocks + 1) * (options.steps + _WARM_STEPS) + rows
    sides = _sides(bench, rows, options.context + num_tokens + 1, options, record)
    for side in sides:
        for request in range(rows):
            side.add(request, [rng.randrange(bench.vocab_size) for _ in range(options.context)], num_tokens)
        while len(side.step()) < rows:
            pass
        side.drain()
    times: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for block in range(options.blocks):
        for side in sides if block % 2 == 0 else sides[::-1]:
            times[side.name].append(_block_s(side, options.steps))
    case: dict[str, object] = {"kind": "steady", "rows": rows, "context": options.context}
    for name, blocks in times.items():
        record(case | {"side": name} | _figures(rows, blocks))
    medians = {name: [statistics.median(block) for block in blocks] for name, blocks in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(medians["mlxd"], medians["mlx-lm"], strict=True)]
    record(case | {"mlxd_over_mlx_lm": round(statistics.median(ratios), 3), "blocks": _rounded(ratios)})


def _figures(rows: int, blocks: list[list[float]]) -> dict[str, object]:
    """The median step is what to expect here; the best one is free of what else ran on the machine."""
    steps = [seconds for block in blocks for seconds in block]
    median_s, best_s = statistics.median(steps), min(steps)
    ms, best_ms, tokens_per_s = _rounded([median_s * 1e3, best_s * 1e3, rows / median_s])
    return {"ms_per_step": ms, "best_ms_per_step": best_ms, "tokens_per_s": tokens_per_s}


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _block_s(side: "Side", steps: int) -> list[float]:
    """Seconds of each step; the side is idle before and after."""
    for _ in range(_WARM_STEPS):
        side.step()
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        side.step()
        times.append(time.perf_counter() - begun)
    side.drain()
    return times


def _arrivals(bench: "BenchModel", rows: int, options: argparse.Namespace, record: Record) -> None:
    from arrivals import poisson, serve

    sides = _sides(bench, rows, 2 * (options.context + options.steps), options, record)
    case: dict[str, object] = {
        "kind": "arrivals",
        "rows": rows,
        "number": options.arrivals,
        "rate": options.rate,
    }
    requests = poisson(
        options.arrivals, options.rate, options.context, options.steps, bench.vocab_size, seed=1
    )
    speeds: dict[str, float] = {}
    for side in sides:
        # Once unmeasured: graphs are compiled and buffers are made.
        serve(side, [type(request)(0.0, request.prompt, 4) for request in requests[: 2 * rows]])
        figures = serve(side, requests)
        speeds[side.name] = figures["tokens_per_s"]
        record(case | {"side": side.name} | {name: round(value, 3) for name, value in figures.items()})
    record(case | {"mlxd_over_mlx_lm": round(speeds["mlxd"] / speeds["mlx-lm"], 3)})


if __name__ == "__main__":
    main()
