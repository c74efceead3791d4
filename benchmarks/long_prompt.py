"""How long running rows wait for their tokens while a long prompt is prefilled beside them.

    python benchmarks/long_prompt.py --model smollm2 --rows 4 --context 64 --prompt 2000
    python benchmarks/long_prompt.py --model 1b --rows 31 --context 512 --prompt 60000 --chunk 1024

Our scheduler and runner in the engine's order. Rows decode alone for a while; then the prompt comes, and gaps
between the tokens of every row are taken until its first token is there. The bound is the longest gap alone
and `--prefill-ms`, the time that prefill may take between two decode steps. Prints JSON lines.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from mlxd.batching.blas import ensure_blas

blas = ensure_blas()  # before anything imports mlx

from figures import Line, quantile, record  # noqa: E402
from machine import describe  # noqa: E402
from models import load, make_runner, warm_up  # noqa: E402
from sides import Scheduled  # noqa: E402

_STEPS_ALONE = 200
_STEPS_UNMEASURED = 20


class Gaps:
    """Milliseconds between the tokens of each row."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
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
        max_model_len=options.prompt + _STEPS_ALONE,
        page_size=options.page_size,
        chunk=options.chunk,
        attention=options.attention,
    )
    warm_up(runner)
    side = Scheduled(runner, options.rows + 1, options.prefill_ms)
    case = {"model": options.model, "rows": options.rows, "context": options.context}
    alone, beside, seconds = _measure(side, bench.vocab_size, options)
    record(case | {"kind": "alone"} | alone.figures(), options.out)
    bound_ms = max(alone.ms) + options.prefill_ms
    line = {"kind": "beside", "prompt": options.prompt, "first_token_s": round(seconds, 3)}
    line |= {"bound_ms": round(bound_ms, 2), "kept": max(beside.ms) <= bound_ms}
    record(case | line | beside.figures(), options.out)


def _measure(side: Scheduled, vocab_size: int, options: argparse.Namespace) -> tuple[Gaps, Gaps, float]:
    """Gaps of rows that run alone, those of the same rows beside the prompt, and how long that one took."""
    rng = random.Random(0)
    long = options.rows
    for row in range(options.rows):
        prompt = [rng.randrange(vocab_size) for _ in range(options.context)]
        side.add(row, prompt, options.prompt + _STEPS_ALONE - options.context)
    started: set[int] = set()
    while len(started) < options.rows:
        started.update(side.step())
    for _ in range(_STEPS_UNMEASURED):
        side.step()
    alone, beside = Gaps(), Gaps()
    for _ in range(_STEPS_ALONE):
        alone.note(side.step())
    begun = time.perf_counter()
    side.add(long, [rng.randrange(vocab_size) for _ in range(options.prompt)], 1)
    while long not in (rows := side.step()):
        beside.note(rows)
    seconds = time.perf_counter() - begun
    side.drain()
    return alone, beside, seconds


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=4, help="that run")
    parser.add_argument("--context", type=int, default=64, help="their prompt tokens")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the long one")
    parser.add_argument("--prefill-ms", type=float, default=100.0, help="scheduler.prefill_ms")
    parser.add_argument("--chunk", type=int, default=64, help="scheduler.prefill_chunk")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--attention", choices=("auto", "in_place", "gathered", "kernel"), default="auto")
    parser.add_argument("--out", type=Path, help="file to append the JSON lines to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
