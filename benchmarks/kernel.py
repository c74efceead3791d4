"""The kernels for decode attention and for writing chunks: right first, then fast. Needs MLX's CUDA build.

    python benchmarks/kernel.py --draws 8 --out kernel.jsonl

Right: a table of cases, each over batches with random tables and lengths from 1 to 20,000, against float32.
Cells that no row looks at hold NaN, and so do outputs before they are written; chunks are written into pools
of NaN, which are compared cell by cell. Fast: microseconds a layer,
rows of one length, launched many at once; beside it `in_place`, `gathered` and the time that reading the keys
and values alone takes, at the read rate measured in the same run. Prints JSON lines, and ends with an error
where something is wrong.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # the reference multiplies in float32

import entry
import mlx.core as mx
from floor import read_rate
from options import Parser, add_out, number_from

from mlxd.batching import attention_kernel
from mlxd.batching.attention import DecodeVariant, InPlace, Kernel, variant
from mlxd.batching.attention_kernel import KernelCase
from mlxd.batching.attention_quantized import attend_packed_pages
from mlxd.batching.chunk_check import random_chunk
from mlxd.batching.chunk_kernel import ChunkCase
from mlxd.batching.cuda_kernel import Launch
from mlxd.batching.kernel_check import LIMITS, RandomStep, is_written, random_step, relative_errors
from mlxd.batching.rotation import Rotary
from mlxd.caches.paged import PagedStandIn
from mlxd.caches.paged_view import PagedView
from mlxd.caches.quantization import Quantization
from mlxd.caches.quantized import QuantizedStandIn

SHAPES = {"1b": (8, 4, 64), "8b": (8, 4, 128)}
"""KV heads, query heads of each, width: Llama 3.2 1B and Llama 3.1 8B."""
BATCHES = ((1, 512), (1, 16384), (8, 16384), (32, 512), (32, 4096), (128, 512))
"""Rows and columns."""
PACKINGS = (
    Quantization(bits=8, group_size=64),
    Quantization(bits=4, group_size=32),
    Quantization(bits=4, group_size=64),
)

CASES = (
    KernelCase(8, 4, 64, 64, mx.bfloat16, 64, None, 64**-0.5, rotary=Rotary(64, neighbours=False)),  # llama
    KernelCase(8, 4, 128, 128, mx.bfloat16, 64, None, 128**-0.5, rotary=Rotary(128, neighbours=False)),
    KernelCase(8, 4, 128, 128, mx.bfloat16, 64, None, 128**-0.5),  # qwen3
    KernelCase(8, 8, 64, 64, mx.bfloat16, 64, 128, 64**-0.5, sinks=mx.bfloat16),  # gpt_oss, sliding
    KernelCase(8, 8, 64, 64, mx.bfloat16, 64, None, 64**-0.5, sinks=mx.bfloat16),
    KernelCase(1, 4, 256, 256, mx.bfloat16, 32, 512, 256**-0.5),  # gemma3
    KernelCase(
        4, 2, 256, 256, mx.float16, 128, 4096, 256**-0.5, soft_cap=50.0, rotary=Rotary(256, neighbours=False)
    ),
    KernelCase(2, 7, 128, 128, mx.bfloat16, 256, None, 128**-0.5),  # qwen2
    KernelCase(4, 16, 128, 128, mx.bfloat16, 64, None, 128**-0.5),  # qwen3 moe
    KernelCase(1, 24, 64, 64, mx.float16, 16, 1, 64**-0.5, soft_cap=5.0, sinks=mx.float32),
    KernelCase(4, 1, 96, 96, mx.float16, 64, 1000, 96**-0.5, rotary=Rotary(96, neighbours=False)),  # phi3
    KernelCase(4, 8, 128, 128, mx.float16, 64, None, 128**-0.5, rotary=Rotary(64, neighbours=True)),  # glm4
    KernelCase(8, 12, 192, 128, mx.bfloat16, 64, 128, 192**-0.5, sinks=mx.bfloat16),  # mimo_v2
    KernelCase(8, 4, 128, 128, mx.bfloat16, 64, None, 128**-0.5, quantization=PACKINGS[0]),
    KernelCase(
        8,
        4,
        64,
        64,
        mx.bfloat16,
        64,
        None,
        64**-0.5,
        quantization=PACKINGS[1],
        rotary=Rotary(64, neighbours=False),
    ),
    KernelCase(2, 10, 128, 64, mx.float16, 32, 900, 128**-0.5, sinks=mx.float16, quantization=PACKINGS[2]),
    KernelCase(3, 3, 64, 64, mx.float32, 64, None, 64**-0.5, rotary=Rotary(64, neighbours=True)),  # smollm2
    KernelCase(2, 12, 128, 96, mx.float32, 16, 700, 128**-0.5, soft_cap=30.0, sinks=mx.float32),
    KernelCase(1, 8, 256, 256, mx.float32, 64, None, 256**-0.5),
)
CHUNK_CASES = tuple(
    ChunkCase(key_dim, value_dim, dtype, page_size)
    for key_dim, value_dim, page_size in ((64, 64, 64), (128, 128, 64), (256, 256, 32), (192, 128, 16))
    for dtype in (mx.bfloat16, mx.float16, mx.float32)
)
PACKED_BATCHES = ((8, 16384), (32, 4096), (128, 512))
Layer = Callable[[], list[mx.array]]
Record = Callable[[dict[str, object]], None]


def random_lengths(rng: random.Random) -> list[int]:
    """Up to 12 rows, most short, some long, edges of tiles and pages among them."""
    edges = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513]
    longest = rng.choice([600, 2_500, 20_000])
    return [rng.choice([rng.choice(edges), rng.randint(1, longest)]) for _ in range(rng.randint(1, 12))]


def reference(step: RandomStep) -> mx.array:
    """Softmax attention in float32, each row over its live columns in order: [B, heads, value_dim]."""
    case, rows = step.case, []
    pools = step.numbers()
    for row, last in enumerate(step.positions.tolist()):
        first = 0 if case.window is None else max(0, last + 1 - case.window)
        keys, values = (_in_order(pool, step.table[row])[:, first : last + 1] for pool in pools)
        queries = (
            step.rotated_queries[row].astype(mx.float32).reshape(case.kv_heads, case.group, case.key_dim)
        )
        scores = case.scale * (queries @ keys.swapaxes(1, 2))
        if case.soft_cap is not None:
            scores = case.soft_cap * mx.tanh(scores / case.soft_cap)
        if step.sinks is not None:
            sinks = step.sinks.astype(mx.float32).reshape(case.kv_heads, case.group, 1)
            scores = mx.concatenate([scores, sinks], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., : values.shape[1]]
        rows.append((weights @ values).reshape(-1, case.value_dim))
    return mx.stack(rows)


def _in_order(pool: mx.array, table: mx.array) -> mx.array:
    """float32 [kv_heads, columns, dim]."""
    pages = pool[table].astype(mx.float32)
    return pages.swapaxes(0, 1).reshape(pool.shape[1], -1, pool.shape[3])


def poison_outputs(kernel: Callable[..., Launch]) -> Callable[..., Launch]:
    """The kernels, whose outputs hold NaN until they are written."""

    def poisoned(role: str, **options: bool) -> Launch:
        # A part without columns writes no sums, and nobody reads them: there NaN stays, and does no harm.
        return partial(kernel(role, **options), init_value=math.nan)

    return poisoned


def check(cases: Sequence[KernelCase], draws: int, record: Record) -> bool:
    """Whether the kernel is right in all cases, each with so many random batches."""
    rng = random.Random(0)
    mx.random.seed(0)
    all_right = True
    for case in cases:
        errors, are_written = [], []
        for draw in range(draws):
            lengths = random_lengths(rng)
            width = -(-max(lengths) // case.page_size) + rng.randint(0, 3)
            step = random_step(case, lengths, width)
            expected, written = reference(step), step.written()
            mx.eval(expected, written)
            out = step.run(case.block_sizes[draw % len(case.block_sizes)])
            errors += relative_errors(out, expected)
            are_written.append(is_written(step, written))
        is_right = all(are_written) and all(error <= LIMITS[case.dtype] / 2 for error in errors)
        all_right &= is_right
        figures = {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)}
        record({"kind": "error", "case": str(case), "right": is_right} | figures)
    return all_right


def check_chunks(draws: int, record: Record) -> bool:
    """Whether chunks of prompts, alone and several at once, go where built-in operations put them."""
    rng = random.Random(0)
    all_right = True
    for case in CHUNK_CASES:
        are_written = []
        for draw in range(draws):
            page, several = case.page_size, draw % 2
            start = 0 if several else page * rng.randint(0, 20)
            lengths = [rng.randint(1, 5 * page) for _ in range(rng.randint(2, 9) if several else 1)]
            padding = rng.randint(0, 3) if several else 0, rng.randint(0, 2 * page)
            chunk = random_chunk(case, rng.choice([1, 3, 8]), start, lengths, padding)
            expected = chunk.expected()
            chunk.run()
            are_written.append(chunk.is_written(expected))
        all_right &= all(are_written)
        record({"kind": "chunk", "case": str(case), "draws": draws, "right": all(are_written)})
    return all_right


def median_s(steps: Sequence[Layer], repeats: int = 9) -> float:
    """Seconds of one of these, all launched at once."""
    mx.eval([step() for step in steps])
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        mx.eval([step() for step in steps])
        times.append(time.perf_counter() - begun)
    return statistics.median(times) / len(steps)


def layers(name: str, step: RandomStep, copies: int) -> Iterator[Layer]:
    """A layer's write and attention over each of `copies` sets of pages: more than a cache holds."""
    for _ in range(copies):
        pools = [pool + 0 if pool.dtype != step.case.dtype else mx.nan_to_num(pool) for pool in step.pools]
        mx.eval(pools)
        yield partial(attend, variant(name), step, pools)


def attend(attention: DecodeVariant, step: RandomStep, pools: list[mx.array]) -> list[mx.array]:
    """The result and the pools; `pools` holds them from then on, so that the next write may be in place."""
    case, queries = step.case, step.queries
    view = PagedView(step.view.spec, step.table, mx.zeros_like(step.positions), step.positions, attention)
    stand_in = _stand_in(case, pools, view)
    pools.clear()
    keys, values = stand_in.update_and_fetch(*step.new)
    if isinstance(stand_in, QuantizedStandIn):
        attend_packed = attention.attend_packed if isinstance(attention, Kernel) else attend_packed_pages
        out = attend_packed(stand_in, queries, case.scale, None)
    elif isinstance(attention, InPlace):
        out = attention.attend(queries, keys, values, stand_in, case.scale, None)
    else:
        mask = attention.mask(view)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=case.scale, mask=mask)
    pools.extend(stand_in.outputs)
    return [out, *pools]


def _stand_in(case: KernelCase, pools: list[mx.array], view: PagedView) -> PagedStandIn | QuantizedStandIn:
    if case.quantization is not None:
        return QuantizedStandIn(pools, view, case.quantization)
    return PagedStandIn(pools[0], pools[1], view)


def measure(record: Record) -> None:
    rate = read_rate()
    record({"kind": "rate", "read_gb_per_s": round(rate / 1e9)})
    for shape, (kv_heads, group, dim) in SHAPES.items():
        dense = KernelCase(kv_heads, group, dim, dim, mx.bfloat16, 64, None, 1 / math.sqrt(dim))
        for rows, columns in BATCHES:
            compare(shape, dense, rows, columns, rate, record)
            if (rows, columns) in PACKED_BATCHES:
                for packing in PACKINGS[::2]:
                    compare(shape, replace(dense, quantization=packing), rows, columns, rate, record)


def compare(shape: str, case: KernelCase, rows: int, columns: int, rate: float, record: Record) -> None:
    numbers = 2 * rows * columns * case.kv_heads * case.key_dim
    packing = case.quantization
    num_bytes = 2 * numbers if packing is None else numbers * (packing.bits / 8 + 4 / packing.group_size)
    copies = max(8, min(32, int(400_000_000 / num_bytes)))
    step = random_step(case, [columns] * rows, columns // case.page_size)
    figures = {"floor": num_bytes / rate}
    for name in ("kernel", "in_place", "gathered") if packing is None else ("kernel", "in_place"):
        figures[name] = median_s(list(layers(name, step, copies)))
    us = {name: round(seconds * 1e6, 1) for name, seconds in figures.items()}
    bits = 16 if packing is None else packing.bits
    record({"kind": "speed", "shape": shape, "bits": bits, "rows": rows, "columns": columns, "us": us})


def main() -> None:
    parser = Parser(__doc__)
    every = list(range(len(CASES)))
    parser.add_argument(
        "--cases", type=int, choices=every, nargs="*", default=every, help="which to check; none without"
    )
    parser.add_argument("--draws", type=number_from(1), default=8, help="random batches of each case")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True)
    add_out(parser, "kernel")
    options = parser.options()
    if not mx.cuda.is_available():
        sys.exit("benchmarks/kernel.py needs MLX's CUDA device")

    def record(line: dict[str, object]) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(text + "\n")

    kernel = attention_kernel.kernel
    attention_kernel.kernel = poison_outputs(kernel)
    all_right = check([CASES[i] for i in options.cases], options.draws, record)
    attention_kernel.kernel = kernel
    all_right &= check_chunks(options.draws, record)
    if options.speed:
        measure(record)
    if not all_right:
        sys.exit("the kernel is wrong")


if __name__ == "__main__":
    entry.run(main)
