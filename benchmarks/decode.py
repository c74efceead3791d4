"""Decoding with mlxd against mlx-lm's BatchGenerator: one model, one BLAS, one process.

    python benchmarks/decode.py --model smollm2 --rows 1,8,32 --context 256
    python benchmarks/decode.py --model 1b,8b --rows 1,8,32,128 --context 512,4096 --lengths aligned,ragged

First both are compared with float32 on the same prompts; a wrong step ends the benchmark. Then both hold the
same full batch and take turns, a block of steps each, the first to go alternating. Beside each figure is the
floor: what a step reads, weights and live keys and values, at the rate at which MLX reads in the same run.
`by_cpu_time` is the ratio of processor time, which on the CPU device tells more where others use the machine.
Cases without room in memory are skipped, and named; a model without room ends the benchmark. Prints JSON
lines, or with `--table` a table.
"""

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import entry
from decode_table import print_table
from figures import Line, Record, of_case, read_lines, record
from options import Parser, add_output, add_page_size, models, number_from, numbers, some_of

from mlxd.batching.blas import ensure_blas

if TYPE_CHECKING:
    from models import BenchModel
    from sides import Side

_WARM_STEPS = 2
"""Steps at a block's start that are not counted: an engine that is pipelined has none in flight there."""
_COPIES = 3
"""Of the keys and values: ours, mlx-lm's, and those that mlx-lm makes of its own where rows join."""
_WEIGHTS = 4
"""Copies of the weights at most: mlx-lm's, those joined for us, and float32 ones to compare with."""
_MOST_OF_MEMORY = 0.9
_SHORTEST = 2
_LM_CHUNK = 2048
"""Positions of a prompt that mlx-lm computes between two steps."""
_LM_PROMPTS = 2 * 16384
"""Positions of prompts that it may compute together: its mask makes scores of them all in memory."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of a batch that decode. `lengths`: their tokens half way through, none over `context`."""

    rows: int
    context: int
    shape: str

    @property
    def lengths(self) -> list[int]:
        """All of `context`, or ragged: evenly from half of it to all of it."""
        if self.shape == "aligned" or self.rows == 1:
            return [self.context] * self.rows
        return [self.context - (self.context // 2) * row // (self.rows - 1) for row in range(self.rows)]

    @property
    def line(self) -> Line:
        return {"rows": self.rows, "context": self.context, "lengths": self.shape}


def main() -> None:
    options = _options()
    lines = read_lines(options.plot_from, "steady") if options.plot_from else _measure(options)
    if options.table:
        print_table(lines)
    if options.plot:
        from plots import draw_decode

        draw_decode(lines, options.plot)


def _measure(options: argparse.Namespace) -> list[Line]:
    os.environ.setdefault("MLX_ENABLE_TF32", "0")  # what is compared with is float32
    # Whatever imports mlx comes after the BLAS that it is to use.
    blas = ensure_blas()
    from floor import read_rate
    from machine import describe
    from models import load

    rate = read_rate()
    lines: list[Line] = []

    def keep(line: Line) -> None:
        lines.append(line)
        record(line, options.out, quiet=options.table)

    keep(describe(blas, rate))
    for name in options.model:
        bench = load(name)
        for case in _cases(options):
            if options.table:
                said = f"{name}: rows {case.rows}, context {case.context}, {case.shape} ..."
                print(said, file=sys.stderr, flush=True)
            _steady(bench, case, rate, options, of_case(keep, {"model": name}))
            _free()
        del bench
        _free()
    return lines


def _cases(options: argparse.Namespace) -> Iterable[Case]:
    for context in options.context:
        for rows in options.rows:
            for shape in options.lengths:
                if shape == "aligned" or rows > 1:
                    yield Case(rows, context, shape)


def _grown(options: argparse.Namespace) -> int:
    """Tokens that each row draws."""
    return int(options.blocks * (options.steps + _WARM_STEPS))


def _free() -> None:
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()


def _steady(
    bench: "BenchModel", case: Case, rate: float, options: argparse.Namespace, record: Record
) -> None:
    from floor import live_bytes, weights_bytes

    from mlxd.batching.device import device_memory_bytes
    from mlxd.batching.memory import layers_of

    layers = layers_of(bench.model)
    grown = _grown(options)
    prompts = [length - grown // 2 for length in case.lengths]
    # Rows of mlx-lm do not all join at one step.
    num_tokens = grown + 2 * _WARM_STEPS + case.rows * -(-case.context // _LM_CHUNK)
    weights = weights_bytes(bench.model)
    needed = _WEIGHTS * weights + _COPIES * live_bytes(layers, [max(prompts) + num_tokens] * case.rows)
    if needed > (most := _MOST_OF_MEMORY * device_memory_bytes()):
        reason = f"needs {needed / 1e9:.0f} GB of memory, {most / 1e9:.0f} may be used"
        record({"kind": "skipped", **case.line, "reason": reason})
        return
    sides = _full_sides(bench, case, prompts, num_tokens, options, record)
    times: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    cpu_s = dict.fromkeys(times, 0.0)
    for block in range(options.blocks):
        for side in sides if block % 2 == 0 else sides[::-1]:
            begun = time.process_time()
            times[side.name].append(_block_s(side, options.steps))
            cpu_s[side.name] += time.process_time() - begun
    floor_s = (weights + live_bytes(layers, [length + grown / 2 for length in prompts])) / rate
    for name, blocks in times.items():
        cpu_ms = round(1e3 * cpu_s[name] / grown, 3)
        figures = {"cpu_ms_per_step": cpu_ms} | _figures(case.rows, blocks, floor_s)
        record({"kind": "steady", **case.line, "side": name, **figures})
    medians = {name: [statistics.median(block) for block in blocks] for name, blocks in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(medians["mlxd"], medians["mlx-lm"], strict=True)]
    ratio, by_cpu_time = _rounded([statistics.median(ratios), cpu_s["mlx-lm"] / cpu_s["mlxd"]])
    found = {"mlxd_over_mlx_lm": ratio, "by_cpu_time": by_cpu_time, "blocks": _rounded(ratios)}
    record({"kind": "ratio", **case.line, **found})


def _full_sides(
    bench: "BenchModel",
    case: Case,
    lengths: Sequence[int],
    num_tokens: int,
    options: argparse.Namespace,
    record: Record,
) -> list["Side"]:
    """Both engines, right and holding all rows of the case, nothing in flight."""
    from models import make_runner
    from reference import check
    from sides import PROMPTS_AT_ONCE, Mlxd, MlxLm

    runner = make_runner(
        bench,
        max_rows=case.rows,
        max_model_len=max(case.context, max(lengths) + num_tokens) + _SHORTEST,
        page_size=options.page_size,
        attention=options.attention,
        compile=options.compile,
        join=options.join,
        multiply=options.multiply,
    )
    record({"kind": "choices", **case.line, **runner.info.notes})
    if options.check:
        record({**case.line, **check(bench, runner, case.rows, case.context)})
    at_once = max(1, min(PROMPTS_AT_ONCE, _LM_PROMPTS // case.context))
    sides: list[Side] = [Mlxd(runner, case.rows), MlxLm(bench, case.rows, at_once)]
    rng = random.Random(0)
    prompts = [[rng.randrange(bench.vocab_size) for _ in range(length)] for length in lengths]
    for side in sides:
        for request, prompt in enumerate(prompts):
            side.add(request, prompt, num_tokens)
        while len(side.step()) < case.rows:
            pass
        side.drain()
    return sides


def _figures(rows: int, blocks: Sequence[Sequence[float]], floor_s: float) -> Line:
    """The median step is what to expect here; the best one is free of what else ran on the machine."""
    steps = [seconds for block in blocks for seconds in block]
    median_s, best_s = statistics.median(steps), min(steps)
    ms, best_ms, floor_ms, tokens_per_s = _rounded(
        [median_s * 1e3, best_s * 1e3, floor_s * 1e3, rows / median_s]
    )
    return {
        "steps": len(steps),
        "ms_per_step": ms,
        "best_ms_per_step": best_ms,
        "tokens_per_s": tokens_per_s,
        "floor_ms": floor_ms,
        "share_of_floor": round(floor_s / median_s, 3),
    }


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


def _options() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--model",
        type=models,
        default=["smollm2"],
        help="several of smollm2, tiny, 1b, 8b, gemma3-tiny, gemma3-4b (random weights; with -4bit: packed), "
        "or a model folder",
    )
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32], help="rows of the batch, as 1,8,32")
    parser.add_argument(
        "--context", type=numbers, default=[256], help="tokens of the longest row, half way through the steps"
    )
    parser.add_argument(
        "--lengths",
        type=some_of("aligned", "ragged"),
        default=["aligned"],
        help="aligned, ragged (evenly from half the context to all of it), or both",
    )
    parser.add_argument("--steps", type=number_from(1), default=12, help="steps a block")
    parser.add_argument("--blocks", type=number_from(1), default=6, help="blocks an engine")
    add_page_size(parser)
    parser.add_argument("--attention", choices=("auto", "in_place", "gathered", "kernel"), default="auto")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument(
        "--join", action=argparse.BooleanOptionalAction, default=True, help="join projections of one input"
    )
    parser.add_argument(
        "--multiply",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="products of our own, on CUDA",
    )
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare with float32 first"
    )
    parser.add_argument("--table", action="store_true", help="print a table at the end, no JSON lines")
    add_output(parser, "decode", "table")
    parser.checks.append(_check_context)
    return parser.options()


def _check_context(options: argparse.Namespace) -> str | None:
    """Rows are so long half way through the steps: half of these come before."""
    for case in _cases(options):
        if (shortest := min(case.lengths)) < (needed := _grown(options) // 2 + _SHORTEST):
            return (
                f"--context is {case.context}, with a row of {shortest} tokens half way through --blocks "
                f"times --steps; it must be {needed} at least"
            )
    return None


if __name__ == "__main__":
    entry.run(main)
