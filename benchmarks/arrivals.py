"""What it costs that rows come and go: Poisson arrivals against waves of equal rows, and joins and leaves.

    python benchmarks/arrivals.py --model smollm2 --rows 8 --prompt 64 --output 32 --loads 0.7,1.3
    python benchmarks/arrivals.py --model 1b --rows 32 --prompt 512 --output 128 --waves 4

Waves: so many times `--rows` requests of one length, all there at the start, so that rows join and leave
together. Poisson: as many requests, half to one and a half times as long, at a load that is a part of what
our first waves carried; both engines get the same ones at the same times, by turns. `full_tokens_per_s` is of
the time while the batch was full; `share_of_waves`, that over the waves', tells what joins and leaves cost.
Then a short row joins and leaves full batches of `--lengths` (benchmarks/join_leave.py). Prints JSON lines.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence

import entry
from figures import Line, Record, of_case, read_lines, record
from join_leave import MlxLm as JoinLeaveMlxLm
from join_leave import Ours, blas, measure
from machine import describe
from models import BenchModel, load, make_runner, warm_up
from options import Parser, add_output, add_prefill, amounts, models, number_from, numbers
from sides import MlxLm, Scheduled, Side
from traffic import Arrival, poisson, serve, wave

_WAVES = 0.0
"""Stands for a load where lines are told apart by it."""
_WARM_TOKENS = 4
_FEWEST_SIBLINGS = 1
_ROUNDS = 20
_STEPS = _ROUNDS * 8 + 2


def main() -> None:
    options = _options()
    lines = read_lines(options.plot_from, "waves") if options.plot_from else _measure(options)
    if options.plot:
        from plots import draw_arrivals

        draw_arrivals(lines, options.plot)


def _measure(options: argparse.Namespace) -> list[Line]:
    lines: list[Line] = []

    def keep(line: Line) -> None:
        lines.append(line)
        record(line, options.out)

    keep(describe(blas))
    for name in options.model:
        bench = load(name)
        for rows in options.rows:
            case = {"model": name, "rows": rows, "prompt": options.prompt, "output": options.output}
            _compare(bench, rows, options, of_case(keep, case))
        for length in options.lengths:
            case = {"model": name, "rows": max(options.rows), "length": length}
            _join_and_leave(bench, max(options.rows), length, options, of_case(keep, case))
    return lines


def _compare(bench: BenchModel, rows: int, options: argparse.Namespace, record: Record) -> None:
    """Waves, then each load, to one engine and to the other by turns; then medians over rounds."""
    runner = make_runner(
        bench,
        max_rows=rows,
        max_model_len=2 * (options.prompt + options.output),
        page_size=options.page_size,
        chunk=options.chunk,
        attention=options.attention,
    )
    warm_up(runner)
    record({"kind": "choices", **runner.info.notes})
    sides: list[Side] = [Scheduled(runner, rows, options.prefill_ms), MlxLm(bench, rows)]
    lines = []
    for line in _rounds(sides, rows, bench.vocab_size, options):
        record(line)
        lines.append(line)
    for load_share in (_WAVES, *options.loads):
        record(_sum_up([line for line in lines if line["load"] == load_share], lines))


def _rounds(sides: Sequence[Side], rows: int, vocab_size: int, options: argparse.Namespace) -> Iterator[Line]:
    """A line for each run of an engine."""
    sizes = options.prompt, options.output, vocab_size
    number_of_requests, capacity = options.waves * rows, 0.0
    for side in sides:
        # Once unmeasured: buffers are made.
        first = wave(number_of_requests, *sizes, seed=0)
        serve(side, [Arrival(0.0, each.prompt, _WARM_TOKENS) for each in first], rows)
    for number in range(options.rounds):
        turns = sides if number % 2 == 0 else sides[::-1]
        full: dict[str, float] = {}
        equal = wave(number_of_requests, *sizes, seed=1 + number)
        for side in turns:
            line = serve(side, equal, rows).figures(equal)
            full[side.name] = line["tokens_per_s"]
            yield {"kind": "waves", "load": _WAVES, "round": number, "side": side.name, **line}
        capacity = capacity or full["mlxd"]
        for load_share in options.loads:
            rate_per_s = load_share * capacity / options.output
            requests = poisson(number_of_requests, rate_per_s, *sizes, seed=100 + number)
            for side in turns:
                line = serve(side, requests, rows).figures(requests)
                line["share_of_waves"] = round(line["full_tokens_per_s"] / full[side.name], 3)
                yield {"kind": "poisson", "load": load_share, "round": number, "side": side.name, **line}


def _sum_up(runs: Sequence[Line], all_runs: Sequence[Line]) -> Line:
    """Medians over rounds: ours over mlx-lm's, and what is left of the waves' throughput."""

    def by_round(name: str, side: str, lines: Sequence[Line] = runs) -> list[float]:
        found = [line for line in lines if line["side"] == side]
        return [line.get(name, 0.0) for line in sorted(found, key=lambda line: line["round"])]

    def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
        return round(statistics.median(a / b for a, b in zip(over, under, strict=True)), 3)

    waves = [line for line in all_runs if line["kind"] == "waves"]
    summary = {
        "kind": "ratio",
        "load": runs[0]["load"],
        "mlxd_over_mlx_lm": median_ratio(
            by_round("tokens_per_s", "mlxd"), by_round("tokens_per_s", "mlx-lm")
        ),
        "by_cpu_time": median_ratio(by_round("cpu_s", "mlx-lm"), by_round("cpu_s", "mlxd")),
    }
    for side in ("mlxd", "mlx-lm"):
        shares = by_round("share_of_waves", side)
        if all(shares):  # else the batch was not full in some round
            summary[f"share_of_waves, {side}"] = round(statistics.median(shares), 3)
        name = "tokens_per_cpu_s"
        summary[f"share_by_cpu_time, {side}"] = median_ratio(
            by_round(name, side), by_round(name, side, waves)
        )
    return summary


def _join_and_leave(
    bench: BenchModel, rows: int, length: int, options: argparse.Namespace, record: Record
) -> None:
    runner = make_runner(
        bench,
        max_rows=rows,
        max_model_len=length + _STEPS,
        page_size=options.page_size,
        attention=options.attention,
    )
    for name, side in (("mlxd", Ours(runner)), ("mlx-lm", JoinLeaveMlxLm(bench, rows))):
        cost = measure(side, length, rows - 1, _ROUNDS, bench.vocab_size)
        figures = {"join_ms": cost.join_ms, "leave_ms": cost.leave_ms, "step_ms": cost.step_ms}
        record({"kind": "join_leave", "side": name} | {k: round(ms, 3) for k, ms in figures.items()})


def _options() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=models, default=["smollm2"])
    parser.add_argument("--rows", type=numbers, default=[8], help="rows of the batch, as 8,32")
    parser.add_argument("--prompt", type=number_from(2), default=64, help="prompt tokens, on average")
    parser.add_argument("--output", type=number_from(2), default=32, help="tokens of an answer, on average")
    parser.add_argument("--waves", type=number_from(1), default=3, help="requests of a run, in batches")
    parser.add_argument("--rounds", type=number_from(1), default=2, help="the engine that goes first changes")
    parser.add_argument(
        "--loads",
        type=amounts,
        default=[0.7, 1.3],
        help="requests a second, as parts of what our waves carried; the batch stays full above 1",
    )
    parser.add_argument("--lengths", type=numbers, default=[], help="of the rows that a row joins and leaves")
    add_prefill(parser, chunk=512, prefill_ms=250.0)
    parser.add_argument("--attention", choices=("auto", "in_place", "gathered", "kernel"), default="auto")
    add_output(parser, "arrivals")
    parser.checks.append(_check_lengths)
    return parser.options()


def _check_lengths(options: argparse.Namespace) -> str | None:
    if options.lengths and max(options.rows) < _FEWEST_SIBLINGS + 1:
        return "--lengths is of rows that one more joins: --rows must be 2 at least"
    return None


if __name__ == "__main__":
    entry.run(main)
