"""What it costs that rows come and go: Poisson arrivals against waves of equal rows, and joins and leaves.

    python benchmarks/arrivals.py --model smollm2 --rows 8 --prompt 64 --output 32 --loads 0.7,1.3
    python benchmarks/arrivals.py --model 1b --rows 32 --prompt 512 --output 128 --waves 4

Waves: so many times `--rows` requests of one length, all there at the start, so that rows join and leave
together. Poisson: as many requests, half to one and a half times as long, at a load that is a part of what
our waves carried; both engines get the same ones at the same times. `full_tokens_per_s` counts the time
while the batch was full; over that of the waves it tells what joins and leaves cost. Then a short row joins
and leaves full batches of `--lengths` (benchmarks/join_leave.py). Prints JSON lines.
"""

import argparse
from collections.abc import Callable

from figures import Line, add_output_options, numbers, read_lines, record
from join_leave import MlxLm as JoinLeaveMlxLm
from join_leave import Ours, blas, measure
from machine import describe
from models import BenchModel, load, make_runner
from sides import MlxLm, Scheduled, Side
from traffic import Arrival, Served, poisson, serve, wave

_WARM_TOKENS = 4
_ROUNDS = 20
_STEPS = _ROUNDS * 8 + 2

Record = Callable[[Line], None]


def main() -> None:
    options = _options()
    lines = read_lines(options.plot_from) if options.plot_from else _measure(options)
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
            _compare(bench, rows, options, lambda line, case=case: keep(case | line))
        for length in options.lengths:
            case = {"model": name, "rows": max(options.rows), "length": length}
            _join_and_leave(
                bench, max(options.rows), length, options, lambda line, case=case: keep(case | line)
            )
    return lines


def _compare(bench: BenchModel, rows: int, options: argparse.Namespace, record: Record) -> None:
    """Waves of both engines, then each load."""
    runner = make_runner(
        bench,
        max_rows=rows,
        max_model_len=2 * (options.prompt + options.output),
        page_size=options.page_size,
        chunk=options.chunk,
        attention=options.attention,
    )
    record({"kind": "choices", **runner.info.notes})
    sides: list[Side] = [Scheduled(runner, rows, options.prefill_ms), MlxLm(bench, rows)]
    equal = wave(options.waves * rows, options.prompt, options.output, bench.vocab_size, seed=1)
    waves = {}
    for side in sides:
        # Once unmeasured: graphs are compiled and buffers are made.
        serve(side, [Arrival(0.0, each.prompt, _WARM_TOKENS) for each in equal[: 2 * rows]], rows)
        waves[side.name] = _serve(side, equal, rows, record, "waves")
    per_request_s = options.output / waves["mlxd"].tokens_per_s
    for load_share in options.loads:
        requests = poisson(
            options.waves * rows,
            load_share / per_request_s,
            options.prompt,
            options.output,
            bench.vocab_size,
            seed=2,
        )
        for side in sides:
            full = waves[side.name].tokens_per_s
            _serve(side, requests, rows, record, "poisson", load=load_share, wave_tokens_per_s=round(full, 3))


def _serve(
    side: Side, arrivals: list[Arrival], rows: int, record: Record, kind: str, **more: float
) -> Served:
    served = serve(side, arrivals, rows)
    figures = served.figures(arrivals)
    if "wave_tokens_per_s" in more:
        more["share_of_waves"] = round(figures["full_tokens_per_s"] / more["wave_tokens_per_s"], 3)
    record({"kind": kind, "side": side.name, "number": len(arrivals), **more, **figures})
    return served


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=lambda text: text.split(","), default=["smollm2"])
    parser.add_argument("--rows", type=numbers, default=[8], help="rows of the batch, as 8,32")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens, on average")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer, on average")
    parser.add_argument("--waves", type=int, default=3, help="requests of a run, in batches")
    parser.add_argument(
        "--loads",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.7, 1.3],
        help="requests a second, as parts of what our waves carried; the batch stays full above 1",
    )
    parser.add_argument("--lengths", type=numbers, default=[], help="of the rows that a row joins and leaves")
    parser.add_argument("--prefill-ms", type=float, default=250.0, help="scheduler.prefill_ms")
    parser.add_argument("--chunk", type=int, default=512, help="scheduler.prefill_chunk")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--attention", choices=("auto", "in_place", "gathered", "kernel"), default="auto")
    add_output_options(parser, "arrivals")
    return parser.parse_args()


if __name__ == "__main__":
    main()
