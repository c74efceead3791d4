"""How long running rows wait for their tokens while a long prompt is prefilled beside them.

    python benchmarks/long_prompt.py --model smollm2 --rows 4 --context 64 --prompt 2000
    python benchmarks/long_prompt.py --model 1b --rows 31 --context 512 --prompt 60000 --chunk 1024

Our scheduler and runner in the engine's order. Rows decode alone for a while; then the prompt comes, and gaps
between the tokens of every row are taken until its first token is there. The bound is what the configuration
promises: the longest gap alone, and `--prefill-ms` of prompt work or, where that takes longer, one chunk; the
slowest one is taken, as the engine sees it. Prints JSON lines.
"""

import argparse
import random
import statistics
import time

from mlxd.batching.blas import ensure_blas

blas = ensure_blas()  # before anything imports mlx

import entry  # noqa: E402
from figures import Line, quantile, record  # noqa: E402
from machine import describe  # noqa: E402
from models import load, make_runner, warm_up  # noqa: E402
from options import Parser, add_out, add_prefill, model, number_from  # noqa: E402
from sides import Scheduled  # noqa: E402

_STEPS_ALONE = 200
_STEPS_UNMEASURED = 20
_STEPS_SPARE = 8


class Gaps:
    """Milliseconds between the tokens of each row."""

    def __init__(self, before: "Gaps | None" = None) -> None:
        """`before`: the first gaps begin where its last ones ended."""
        self._last: dict[int, float] = {} if before is None else dict(before._last)
        self.ms: list[float] = []

    def note(self, rows: list[int]) -> None:
        now = time.perf_counter()
        self.ms += [1e3 * (now - self._last[row]) for row in rows if row in self._last]
        self._last |= dict.fromkeys(rows, now)

    def figures(self) -> Line:
        return {
            "gaps": len(self.ms),
            "gap_p50_ms": round(statistics.median(self.ms), 2),
            "gap_p99_ms": round(quantile(self.ms, 0.99), 2),
            "gap_max_ms": round(max(self.ms), 2),
        }


def main() -> None:
    options = _options()
    record(describe(blas), options.out)
    bench = load(options.model)
    runner = make_runner(
        bench,
        max_rows=options.rows + 1,
        max_model_len=max(options.context + _most_steps(options), options.prompt + 1),
        page_size=options.page_size,
        chunk=options.chunk,
        attention=options.attention,
    )
    warm_up(runner)
    side = Scheduled(runner, options.rows + 1, options.prefill_ms)
    case = {"model": options.model, "rows": options.rows, "context": options.context}
    alone, beside, seconds = _measure(side, bench.vocab_size, options)
    record(case | {"kind": "alone"} | alone.figures(), options.out)
    chunk_ms = 1e3 * side.slowest_chunk_s
    bound_ms = max(alone.ms) + max(options.prefill_ms, chunk_ms)
    line = {"kind": "beside", "prompt": options.prompt, "first_token_s": round(seconds, 3)}
    line |= {"slowest_chunk_ms": round(chunk_ms, 2), "bound_ms": round(bound_ms, 2)}
    line |= {"kept": max(beside.ms) <= bound_ms}
    record(case | line | beside.figures(), options.out)


def _most_steps(options: argparse.Namespace) -> int:
    """Tokens that a row may draw until the long prompt has its first one: a step a chunk, and those alone."""
    chunks = options.rows * -(-options.context // options.chunk) + -(-options.prompt // options.chunk)
    return int(_STEPS_UNMEASURED + _STEPS_ALONE + chunks + _STEPS_SPARE)


def _measure(side: Scheduled, vocab_size: int, options: argparse.Namespace) -> tuple[Gaps, Gaps, float]:
    """Gaps of rows that run alone, those of the same rows beside the prompt, and how long that one took."""
    rng = random.Random(0)
    long = options.rows
    for row in range(options.rows):
        prompt = [rng.randrange(vocab_size) for _ in range(options.context)]
        side.add(row, prompt, _most_steps(options))
    started: set[int] = set()
    while len(started) < options.rows:
        started.update(side.step())
    for _ in range(_STEPS_UNMEASURED):
        side.step()
    alone = Gaps()
    for _ in range(_STEPS_ALONE):
        alone.note(side.step())
    beside = Gaps(alone)
    side.slowest_chunk_s = 0.0
    begun = time.perf_counter()
    side.add(long, [rng.randrange(vocab_size) for _ in range(options.prompt)], 1)
    rows: list[int] = []
    while long not in rows:
        rows = side.step()
        beside.note(rows)
    seconds = time.perf_counter() - begun
    side.drain()
    return alone, beside, seconds


def _options() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=model, default="smollm2")
    parser.add_argument("--rows", type=number_from(1), default=4, help="that run")
    parser.add_argument("--context", type=number_from(1), default=64, help="their prompt tokens")
    parser.add_argument("--prompt", type=number_from(1), default=2000, help="tokens of the long one")
    add_prefill(parser, chunk=64, prefill_ms=100.0)
    parser.add_argument("--attention", choices=("auto", "in_place", "gathered", "kernel"), default="auto")
    add_out(parser, "long_prompt")
    return parser.options()


if __name__ == "__main__":
    entry.run(main)
