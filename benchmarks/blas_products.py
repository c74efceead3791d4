"""Products with a model's weights, on the CPU: those that MLX gets, against the BLAS library's own.

    python benchmarks/blas_products.py --rows 1,8,32,64,512

All products of one step of the built-in model (30 layers, projections joined, and the head), weights as they
lie, one after the other. Milliseconds of processor time, the best of `--repeats` by turns. Prints JSON lines.
"""

import ctypes
import time
from collections.abc import Callable

import entry
import numpy as np
from figures import record
from options import Parser, add_out, number_from, numbers

from mlxd.batching.blas import ensure_blas

_LAYERS = 30
_LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
_HEAD = (49_152, 576)
_ROW_MAJOR, _NO_TRANS, _TRANS = 101, 111, 112

Product = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 64, 512])
    parser.add_argument("--repeats", type=number_from(1), default=10)
    add_out(parser, "blas_products")
    options = parser.options()
    blas = ensure_blas()
    if blas.path is None:
        parser.error(f"nothing to compare: MLX multiplies by {blas.name} alone")
    sides = {"mlx": _product(ctypes.CDLL(None)), "library": _product(ctypes.CDLL(blas.path))}
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape, dtype=np.float32) for shape in (*_LAYERS * _LAYER, _HEAD)]
    for rows in options.rows:
        inputs = {width: rng.standard_normal((rows, width), dtype=np.float32) for _, width in _LAYER}
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(options.repeats):
            for name, product in sides.items():
                best[name] = min(best[name], _step_s(product, weights, inputs))
        record({"rows": rows} | {name: round(1e3 * s, 1) for name, s in best.items()}, options.out)


def _step_s(product: Product, weights: list[np.ndarray], inputs: dict[int, np.ndarray]) -> float:
    outputs = [np.empty((len(inputs[w.shape[1]]), w.shape[0]), np.float32) for w in weights]
    for output in outputs:
        output.fill(0)  # its memory is there then
    begun = time.process_time()
    for weight, output in zip(weights, outputs, strict=True):
        product(inputs[weight.shape[1]], weight, output)
    return time.process_time() - begun


def _product(library: ctypes.CDLL) -> Product:
    name = "scipy_cblas_sgemm" if hasattr(library, "scipy_cblas_sgemm") else "cblas_sgemm"
    sgemm = library[name]

    def product(left: np.ndarray, weight: np.ndarray, output: np.ndarray) -> None:
        (rows, depth), columns = left.shape, len(weight)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (left, weight, output)]
        sizes = rows, columns, depth
        left_at, weight_at, output_at = pointers
        transposed = _ROW_MAJOR, _NO_TRANS, _TRANS
        sgemm(*transposed, *sizes, one, left_at, depth, weight_at, depth, zero, output_at, columns)

    return product


if __name__ == "__main__":
    entry.run(main)
