"""Where a decode step's time goes, on the host and on the device, and how many operations it has.

    python benchmarks/breakdown.py --model smollm2 --rows 1,8,32 --context 256
    python benchmarks/breakdown.py --model 1b,8b --rows 1,32,128 --context 512 --attention kernel --one-graph

Whole: steps launched one ahead, as the engine runs them; then one step at a time from an idle device, divided
into building its graph, launching it (`mx.async_eval` returns) and waiting. Parts, each alone at the step's
shapes, all layers at once: attention with its write, products, sampling; and on the host scheduling and text.
With `--one-graph` CUDA gets a step as one graph, launched when it is complete: launching is then host time
alone, waiting device time alone. Without it MLX's own settings serve, and the two overlap. `cpu_ms` is
processor time of all threads: on the CPU device that is what a part takes. Prints JSON lines.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import entry
from figures import Line, Record, of_case, read_lines, record
from options import Parser, add_output, add_page_size, models, number_from, numbers, tokenizer_folder

from mlxd.batching.blas import ensure_blas

if TYPE_CHECKING:
    import mlx.core as mx
    from models import BenchModel

    from mlxd.batching.driver import Driver
    from mlxd.batching.mlx_runner import MlxRunner

_WARM_STEPS = 3
_NO_LIMIT = "1000000"


def main() -> None:
    options = _options()
    lines = read_lines(options.plot_from, "whole") if options.plot_from else _measure(options)
    if options.plot:
        from plots import draw_breakdown

        draw_breakdown(lines, options.plot)


def _measure(options: argparse.Namespace) -> list[Line]:
    if options.one_graph:
        os.environ |= {"MLX_MAX_OPS_PER_BUFFER": _NO_LIMIT, "MLX_MAX_MB_PER_BUFFER": _NO_LIMIT}
    blas = ensure_blas()  # before anything imports mlx
    import mlx.core as mx
    from machine import describe
    from models import load

    if options.one_graph and not mx.cuda.is_available():
        raise entry.BenchmarkError(
            "--one-graph is of CUDA graphs, and this machine has no CUDA device for MLX"
        )
    lines: list[Line] = []

    def keep(line: Line) -> None:
        lines.append(line)
        record(line, options.out)

    keep(describe(blas))
    for name in options.model:
        bench = load(name)
        for rows in options.rows:
            case = {"model": name, "rows": rows, "context": options.context, "one_graph": options.one_graph}
            _break_down(bench, rows, options, of_case(keep, case))
    return lines


def _break_down(bench: "BenchModel", rows: int, options: argparse.Namespace, record: Record) -> None:
    from host_parts import schedule_ms, text_ms
    from models import make_runner
    from operations import by_layer, of_step
    from step_parts import parts_of

    from mlxd.batching.tuning import typical_widths

    num_tokens = 2 * (options.steps + _WARM_STEPS) + 2
    runner = make_runner(
        bench,
        max_rows=rows,
        max_model_len=options.context + num_tokens,
        page_size=options.page_size,
        attention=options.attention,
        join=options.join,
        multiply=options.multiply,
    )
    record({"kind": "choices", **runner.info.notes})
    record({"kind": "whole", **_whole(bench, runner, rows, options)})
    for name, build in parts_of(runner, [options.context] * rows, options.attention).items():
        record({"kind": "part", "part": name, **_apart(build, options.steps)})
    counts = of_step(runner, rows, typical_widths(runner.info.memory, rows))
    record({"kind": "operations", **by_layer(counts, len(bench.model.layers))})
    record({"kind": "host", "schedule_ms": schedule_ms(rows), "text_ms": text_ms(rows, options.tokenizer)})


def _whole(bench: "BenchModel", runner: "MlxRunner", rows: int, options: argparse.Namespace) -> Line:
    from mlxd.batching.driver import Driver

    apart = _full(Driver(runner, runner.info.memory), bench, rows, options.context)
    splits = []
    for _ in range(_WARM_STEPS + options.steps):
        with _launches() as launches:
            begun = time.perf_counter()
            apart.decode()
            ended = time.perf_counter()
        launched, returned = launches[-1]
        splits.append((launched - begun, returned - launched, ended - returned))
    _empty(apart)
    pipelined = _full(Driver(runner, runner.info.memory, pipelined=True), bench, rows, options.context)
    times, cpu = [], []
    for _ in range(_WARM_STEPS + options.steps):
        begun, cpu_begun = time.perf_counter(), time.process_time()
        pipelined.decode()
        times.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - cpu_begun)
    pipelined.flush()
    _empty(pipelined)
    build, launch, wait = (statistics.median(part) for part in zip(*splits[_WARM_STEPS:], strict=True))
    found = {
        "step_ms": statistics.median(times[_WARM_STEPS:]),
        "cpu_ms": statistics.mean(cpu[_WARM_STEPS:]),
        "build_ms": build,
        "launch_ms": launch,
        "wait_ms": wait,
    }
    return _ms(found)


def _full(driver: "Driver", bench: "BenchModel", rows: int, context: int) -> "Driver":
    """With all rows prefilled."""
    for row in range(rows):
        driver.join([(7 * row + i) % bench.vocab_size for i in range(context)])
    driver.prefill()
    return driver


def _empty(driver: "Driver") -> None:
    for row in list(driver.rows):
        driver.leave(row)
    driver.clean()


@contextmanager
def _launches() -> Iterator[list[tuple[float, float]]]:
    """When `mx.async_eval` was called and when it returned, each time that somebody did."""
    import mlx.core as mx

    original, times = mx.async_eval, list[tuple[float, float]]()

    def timed(*arrays: Any) -> None:
        begun = time.perf_counter()
        original(*arrays)  # type: ignore[no-untyped-call]
        times.append((begun, time.perf_counter()))

    mx.async_eval = timed
    try:
        yield times
    finally:
        mx.async_eval = original


def _apart(build: Callable[[], "Sequence[mx.array]"], repeats: int) -> Line:
    """Medians of building, launching and waiting for a graph, from an idle device; processor time of all."""
    import mlx.core as mx

    splits, cpu = [], []
    for _ in range(_WARM_STEPS + repeats):
        begun, cpu_begun = time.perf_counter(), time.process_time()
        arrays = build()
        built = time.perf_counter()
        mx.async_eval(arrays)
        launched = time.perf_counter()
        mx.eval(arrays)
        splits.append((built - begun, launched - built, time.perf_counter() - launched))
        cpu.append(time.process_time() - cpu_begun)
        del arrays
    medians = [statistics.median(part) for part in zip(*splits[_WARM_STEPS:], strict=True)]
    found = dict(zip(("build_ms", "launch_ms", "wait_ms"), medians, strict=True))
    return _ms(found | {"cpu_ms": statistics.mean(cpu[_WARM_STEPS:])})


def _ms(seconds: dict[str, float]) -> Line:
    return {name: round(1e3 * value, 4) for name, value in seconds.items()}


def _options() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=models, default=["smollm2"])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32], help="rows of the batch, as 1,8,32")
    parser.add_argument("--context", type=number_from(1), default=256, help="prompt tokens of each row")
    parser.add_argument("--steps", type=number_from(1), default=20, help="that each figure is the median of")
    add_page_size(parser)
    parser.add_argument(
        "--join", action=argparse.BooleanOptionalAction, default=True, help="join projections of one input"
    )
    parser.add_argument(
        "--multiply",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="products of our own, on CUDA",
    )
    parser.add_argument("--attention", choices=("in_place", "gathered", "kernel"), default="in_place")
    parser.add_argument(
        "--tokenizer", type=tokenizer_folder, help="its folder; the built-in model's by default"
    )
    parser.add_argument(
        "--one-graph", action="store_true", help="a CUDA graph a step, launched when complete"
    )
    add_output(parser, "breakdown")
    return parser.options()


if __name__ == "__main__":
    entry.run(main)
