"""Products of a few rows by the kernel of our own: right first, then fast. Needs MLX's CUDA build.

    python benchmarks/products.py --out products.jsonl

Right: odd and common layers, 1 to 32 rows, against float32; outputs hold NaN before they are written; a
row's numbers are the same to the bit whatever rows are beside it and however many. Fast: microseconds a
product, of the host alone and in all, in a chain of products with a weight and with one of the transposed
shape, by turns; more weights than a cache holds; beside it MLX's own. Prints JSON lines, and ends with an
error where a product is wrong.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # the reference multiplies in float32

import entry
import mlx.core as mx
from figures import Record, record
from options import Parser, add_out

from mlxd.batching import product_kernel
from mlxd.batching.kernel_check import relative_errors
from mlxd.batching.product_kernel import MOST_ROWS, Launch, ProductCase, multiply

CHECKED = (
    (32, 64, False),
    (48, 192, True),
    (528, 448, False),
    (1536, 576, False),  # smollm2
    (4864, 896, True),  # qwen2
    (2560, 2560, False),
    (8208, 128, True),  # not a multiple of two tiles
    (3072, 2048, False),
    (16384, 2048, True),
    (2048, 8192, False),
    (4096, 14336, False),
    (128256, 2048, False),
)
"""Outputs, inner numbers, and whether there is a bias."""
LIMITS = {mx.bfloat16: 3e-3, mx.float16: 4e-4}
"""Largest error of a row over its norm: results are rounded once."""
TIMED = {
    "1b o": (2048, 2048),
    "1b qkv": (3072, 2048),
    "1b gate+up": (16384, 2048),
    "1b down": (2048, 8192),
    "1b head": (128256, 2048),
    "8b qkv": (6144, 4096),
    "8b gate+up": (28672, 4096),
    "8b down": (4096, 14336),
}
ROWS = (2, 8, 16, 32)
_CHAIN_BYTES = 600_000_000
Product = Callable[[mx.array, mx.array], mx.array]


def poison_outputs(kernel: Callable[..., Launch]) -> Callable[..., Launch]:
    """The kernels, whose outputs hold NaN until they are written."""
    return lambda **options: partial(kernel(**options), init_value=math.nan)


def random_layer(case: ProductCase) -> tuple[mx.array, mx.array | None]:
    weight = mx.random.normal((case.outputs, case.inner)) / math.sqrt(case.inner)
    bias = mx.random.normal((case.outputs,)).astype(case.dtype) if case.has_bias else None
    return weight.astype(case.dtype), bias


def random_weight(outputs: int, inner: int) -> mx.array:
    return random_layer(ProductCase(outputs, inner, mx.bfloat16))[0]


def check(dtypes: Sequence[mx.Dtype], record: Record) -> bool:
    """Whether the kernel is right for all layers."""
    mx.random.seed(0)
    all_right = True
    for dtype in dtypes:
        for outputs, inner, has_bias in CHECKED:
            fault, worst = _checked(ProductCase(outputs, inner, dtype, has_bias))
            all_right &= fault is None
            layer = {"dtype": str(dtype), "outputs": outputs, "inner": inner, "bias": has_bias}
            record({"kind": "error", **layer, "worst": worst, "fault": fault})
    return all_right


def _checked(case: ProductCase) -> tuple[str | None, float]:
    """What is wrong, or None; and the largest error of a row."""
    weight, bias = random_layer(case)
    x = mx.random.normal((MOST_ROWS, 1, case.inner)).astype(case.dtype)
    exact = x.astype(mx.float32) @ weight.astype(mx.float32).T
    exact = exact if bias is None else exact + bias.astype(mx.float32)
    whole = multiply(case, x, weight, bias)
    mx.eval(whole, exact)
    worst = max(relative_errors(whole, exact))
    fault = None if worst <= LIMITS[case.dtype] else f"off by {worst:.2g}"
    for rows in range(1, MOST_ROWS + 1):
        first, last = multiply(case, x[:rows], weight, bias), multiply(case, x[-rows:], weight, bias)
        if not mx.array_equal(first, whole[:rows]) or not mx.array_equal(last, whole[-rows:]):
            fault = fault or f"{rows} rows differ from the same among {MOST_ROWS}"
    apart = mx.concatenate([x, x], axis=-1)[:5, :, : case.inner]
    turned = mx.contiguous(x.swapaxes(0, 2)).swapaxes(0, 2)
    for name, found, right in (
        ("rows apart", multiply(case, apart, weight, bias), whole[:5]),
        ("columns together", multiply(case, turned, weight, bias), whole),
        ("four axes", multiply(case, x.reshape(4, 2, 4, -1), weight, bias).reshape(whole.shape), whole),
    ):
        if not mx.array_equal(found, right):
            fault = fault or f"{name}: not the same"
    return fault, worst


def chain(product: Product, weights: Sequence[tuple[mx.array, mx.array]]) -> Callable[[mx.array], mx.array]:
    def run(x: mx.array) -> mx.array:
        for there, back in weights:
            x = product(product(x, there), back)
        return x

    return mx.compile(run)


def ours(x: mx.array, weight: mx.array) -> mx.array:
    return multiply(ProductCase(*weight.shape, weight.dtype), x, weight)


def mlx_own(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


def measure(rows_list: Sequence[int], record: Record) -> None:
    sides = {"ours": ours, "mlx": mlx_own}
    for name, (outputs, inner) in TIMED.items():
        links = max(2, min(32, _CHAIN_BYTES // (4 * outputs * inner)))
        weights = [(random_weight(outputs, inner), random_weight(inner, outputs)) for _ in range(links)]
        mx.eval(weights)
        for rows in rows_list:
            x = mx.random.normal((rows, 1, inner)).astype(mx.bfloat16)
            found: dict[str, object] = {}
            for side, product in sides.items():
                host, whole = times(chain(product, weights), x)
                found[f"{side}_host_us"] = round(1e6 * host / (2 * links), 2)
                found[f"{side}_us"] = round(1e6 * whole / (2 * links), 2)
            gigabytes = 2e-9 * outputs * inner
            found["floor_us"] = round(1e6 * gigabytes / 4200, 2)
            record({"kind": "time", "layer": name, "rows": rows, "links": 2 * links} | found)


def times(run: Callable[[mx.array], mx.array], x: mx.array, repeats: int = 15) -> tuple[float, float]:
    """Seconds until all was launched, and until it was computed."""
    for _ in range(3):
        mx.eval(run(x))
    launched, computed = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        result = run(x)
        mx.async_eval(result)
        launched.append(time.perf_counter() - begun)
        mx.eval(result)
        computed.append(time.perf_counter() - begun)
    return statistics.median(launched), statistics.median(computed)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rows", type=int, choices=range(1, MOST_ROWS + 1), nargs="*", default=ROWS)
    add_out(parser, "products")
    arguments = parser.options()
    if not product_kernel.is_available():
        sys.exit("products.py needs MLX's CUDA build")
    keep = partial(record, out=arguments.out)
    plain = product_kernel.kernel
    product_kernel.kernel = poison_outputs(plain)
    is_right = check((mx.bfloat16, mx.float16), keep)
    product_kernel.kernel = plain
    measure(arguments.rows, keep)
    if not is_right:
        sys.exit("the kernel is wrong")


if __name__ == "__main__":
    entry.run(main)
