"""Requests that all come at once: our scheduler and runner against continuous batching of `transformers`.

    python benchmarks/transformers_batching.py --model 1b --requests 128 --prompt 512 --output 128
    python benchmarks/transformers_batching.py --side mlxd --model tiny --requests 4 --prompt 48 --output 16

Both get the same random prompts, decode greedily to the full length, and may have all requests in one batch.
Weights are random, of one shape, bfloat16 on a GPU. One engine after the other, each in a process of its own
and warmed up with other prompts of the same length first. Tokens a second are from the first request to the
last token, prefill included; memory is the most that arrays took while requests ran, weights included.

The side of `transformers` needs torch and a CUDA device. It chooses its attention ("paged|sdpa" without
flash-attn), CUDA graphs and the size of its cache, which the line "choices" tells. Options override that:
`--attn-implementation`, and `--set use_cuda_graph=true --set num_blocks=400`. With graphs, warm up with whole
answers (`--warm-tokens`), since they are captured at each new size. Prints JSON lines.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import entry
from figures import Line, of_case, read_lines, record
from options import Parser, add_out, add_prefill, number_from
from shapes import LLAMAS, SHAPES
from traffic import Arrival, Served, wave
from transformers_side import (
    TransformersError,
    Workload,
    choices,
    continuous_batching,
    in_one_line,
    keep_logs,
    machine,
    serve_wave,
)

_BOTH = "both"


def main() -> None:
    options = _options()
    if options.side != "mlxd":
        entry.require("torch", "transformers")
    if options.side == _BOTH:
        lines = [line for side in _SIDES for line in _in_a_process(side, options)]
        record(_sum_up(lines), options.out)
        return
    case = {name: getattr(options, name) for name in ("model", "requests", "prompt", "output", "side")}
    keep = of_case(partial(record, out=options.out), case)
    try:
        for line in _SIDES[options.side](options):
            keep(line)
    except TransformersError as error:
        raise SystemExit(f"transformers: {error}") from error


def _in_a_process(side: str, options: argparse.Namespace) -> list[Line]:
    """The lines of one side, which that process prints; what there is of them is kept if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.jsonl"
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--out", str(out)]
        ended = subprocess.run(command, check=False)
        lines = read_lines([out]) if out.exists() else []
    for line in lines:
        record(line, options.out, quiet=True)
    if ended.returncode:
        raise SystemExit(f"the side of {side} ended with {ended.returncode}")
    return lines


def _sum_up(lines: Sequence[Line]) -> Line:
    def median(side: str, name: str) -> float:
        return statistics.median(line[name] for line in lines if line["side"] == side and name in line)

    ratio = median("mlxd", "tokens_per_s") / median("transformers", "tokens_per_s")
    return {"kind": "ratio", "mlxd_over_transformers": round(ratio, 3)}


def _mlxd(options: argparse.Namespace) -> Iterator[Line]:
    from mlxd.batching.blas import ensure_blas

    blas = ensure_blas()  # before anything imports mlx
    import mlx.core as mx
    from machine import describe
    from models import load, make_runner, warm_up
    from sides import Scheduled
    from traffic import serve

    yield describe(blas)
    runner = make_runner(
        load(options.model),
        max_rows=options.requests,
        max_model_len=options.prompt + max(options.output, options.warm_tokens),
        page_size=options.page_size,
        chunk=options.chunk,
        attention=options.attention,
    )
    warm_up(runner)
    yield {"kind": "choices", **runner.info.notes}
    side = Scheduled(runner, options.requests, options.prefill_ms)

    def run(arrivals: Sequence[Arrival]) -> Served:
        return serve(side, arrivals, options.requests)

    mx.clear_cache()
    yield from _rounds(run, mx.reset_peak_memory, mx.get_peak_memory, options)


def _transformers(options: argparse.Namespace) -> Iterator[Line]:
    workload = Workload(options.requests, options.prompt, options.output)
    shape, settings = SHAPES[options.model], dict(options.set)
    keep_logs(quiet=not options.verbose)
    attention = options.attn_implementation
    with in_one_line(), continuous_batching(shape, workload, attention, settings) as manager:
        import torch

        yield machine()
        yield choices(manager)
        reset_peak, peak_bytes = torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated
        yield from _rounds(partial(serve_wave, manager), reset_peak, peak_bytes, options)


_SIDES: dict[str, Callable[[argparse.Namespace], Iterator[Line]]] = {
    "mlxd": _mlxd,
    "transformers": _transformers,
}


def _rounds(
    run: Callable[[Sequence[Arrival]], Served],
    reset_peak: Callable[[], None],
    peak_bytes: Callable[[], int],
    options: argparse.Namespace,
) -> Iterator[Line]:
    """A line a wave, of equal ones for either side, after one that is not measured: buffers are made."""
    vocab_size = SHAPES[options.model]["vocab_size"]

    def requests(num_tokens: int, seed: int) -> list[Arrival]:
        return wave(options.requests, options.prompt, num_tokens, vocab_size, seed)

    run(requests(options.warm_tokens, seed=0))
    for number in range(options.rounds):
        arrivals = requests(options.output, seed=1 + number)
        reset_peak()
        figures = run(arrivals).figures(arrivals)
        line = {name: value for name, value in figures.items() if not name.startswith("full_")}
        peak_gb = round(peak_bytes() / 1e9, 3)
        yield {"kind": "wave", "round": number, **line, "peak_memory_gb": peak_gb}


def _setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as JSON or else a word."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _options() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--side", choices=(_BOTH, *_SIDES), default=_BOTH)
    parser.add_argument("--model", choices=LLAMAS, default="1b", help="a shape, with random weights")
    parser.add_argument("--requests", type=number_from(1), default=128, help="at once, and rows of the batch")
    parser.add_argument("--prompt", type=number_from(1), default=512, help="prompt tokens")
    parser.add_argument("--output", type=number_from(2), default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=number_from(1), default=2, help="measured waves")
    parser.add_argument(
        "--warm-tokens", type=number_from(1), default=4, help="of an answer in the wave that is not measured"
    )
    add_prefill(parser, chunk=1024, prefill_ms=250.0)
    parser.add_argument("--attention", choices=("auto", "in_place", "gathered", "kernel"), default="auto")
    parser.add_argument(
        "--attn-implementation", help="of transformers, as 'paged|sdpa'; it chooses by default"
    )
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], help="KEY=VALUE of its ContinuousBatchingConfig"
    )
    parser.add_argument("--verbose", action="store_true", help="show what its continuous batching logs")
    add_out(parser, "transformers_batching")
    return parser.options()


if __name__ == "__main__":
    entry.run(main)
