"""What the sampler's parts cost a step, and its threshold search against sorting the vocabulary.

    python benchmarks/sampler.py --rows 32 --vocab 49152

Prints one JSON line a case: median milliseconds, eager, on the default device.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import entry
import mlx.core as mx
from figures import Record, record
from options import Parser, add_out, number_from

from mlxd.batching.plan import DecodeEntry
from mlxd.batching.row import Row
from mlxd.batching.sampler import SamplingShape, kept_weights, sample
from mlxd.batching.sampler_state import SamplingBatch
from mlxd.batching.sampling_params import SamplingParams

PARTS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, logprobs": SamplingParams(temperature=0.0, top_logprobs=5),
    "greedy, penalties": SamplingParams(temperature=0.0, frequency_penalty=0.5),
    "greedy, logit_bias": SamplingParams(temperature=0.0, logit_bias={1: 1.0}),
    "temperature": SamplingParams(temperature=1.0),
    "temperature, top_k": SamplingParams(temperature=1.0, top_k=50),
    "temperature, top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "temperature, top_k, top_p": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
}


def median_ms(call: Callable[[], Sequence[mx.array]], repeats: int) -> float:
    mx.eval(call())
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e3


def sorted_weights(logits: mx.array, top_k: int, top_p: float) -> mx.array:
    """What `kept_weights` gives at temperature 1, by sorting each row whole."""
    weights = mx.exp(logits - mx.max(logits, axis=-1, keepdims=True))
    rising = mx.sort(weights, axis=-1)
    mass = mx.cumsum(rising, axis=-1, reverse=True)
    kth = logits.shape[-1] - top_k
    goal = top_p * mass[:, kth : kth + 1]
    place = mx.sum(mass >= goal, axis=-1, keepdims=True) - 1
    least = mx.take_along_axis(rising, place, axis=-1)
    return mx.where(weights >= least, weights, 0.0)


def measure_parts(logits: mx.array, repeats: int, record: Record) -> None:
    rows, vocab = logits.shape
    fed = mx.zeros((rows,), mx.int32)
    for name, params in PARTS.items():
        entries = [DecodeEntry(Row(i, params, i, (1, 2, 3), [], ()), 0, 0, 1) for i in range(rows)]
        batch = SamplingBatch(entries, rows, vocab)

        def step(batch: SamplingBatch = batch, entries: list[DecodeEntry] = entries) -> list[mx.array]:
            return sample(batch.shape, logits, fed, batch.inputs(entries))

        record({"part": name, "rows": rows, "vocab": vocab, "ms": round(median_ms(step, repeats), 3)})


def measure_filters(logits: mx.array, repeats: int, record: Record) -> None:
    rows, vocab = logits.shape
    column = mx.ones((rows,))
    for top_k, top_p in ((50, 1.0), (0, 0.9), (50, 0.9)):
        shape = SamplingShape(draw=True, top_k=top_k > 0, top_p=top_p < 1)
        k = top_k or vocab
        given = {
            "temperature": column,
            "min_p": 0 * column,
            "top_k": mx.full((rows,), k),
            "top_p": top_p * column,
        }

        def search(shape: SamplingShape = shape, given: dict[str, mx.array] = given) -> list[mx.array]:
            return [kept_weights(shape, logits, mx.max(logits, axis=-1, keepdims=True), given)]

        def sort(k: int = k, top_p: float = top_p) -> list[mx.array]:
            return [sorted_weights(logits, k, top_p)]

        figures = {"search_ms": median_ms(search, repeats), "sort_ms": median_ms(sort, repeats)}
        case = {"top_k": top_k, "top_p": top_p, "rows": rows, "vocab": vocab}
        record(case | {name: round(ms, 3) for name, ms in figures.items()})


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rows", type=number_from(1), default=32)
    parser.add_argument("--vocab", type=number_from(64), default=49152)
    parser.add_argument("--repeats", type=number_from(1), default=10)
    add_out(parser, "sampler")
    options = parser.options()
    keep = partial(record, out=options.out)
    logits = 3 * mx.random.normal((options.rows, options.vocab), key=mx.random.key(0))
    mx.eval(logits)
    measure_parts(logits, options.repeats, keep)
    measure_filters(logits, options.repeats, keep)


if __name__ == "__main__":
    entry.run(main)
