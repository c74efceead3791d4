"""Why OpenBLAS gets one core less than there are: product times beside a busy process, by thread count.

    python benchmarks/blas_threads.py

Each line is a fresh process that multiplies 32 x 576 by 576 x 1536, thirty times a step, with as many other
processes spinning as `busy` says.
"""

import json
import os
import subprocess
import sys

import entry
from figures import record
from options import Parser, add_out

STEP = """
import json, time
from mlxd.batching.blas import ensure_blas
ensure_blas()
import mlx.core as mx
weights = [mx.random.normal((576, 1536)) for _ in range(30)]
rows = mx.random.normal((32, 576))
mx.eval(rows, weights)
times = []
for _ in range(40):
    begun = time.perf_counter()
    mx.eval([rows @ weight for weight in weights])
    times.append(1e3 * (time.perf_counter() - begun))
times = sorted(times[2:])
print(json.dumps({"median_ms": round(times[len(times) // 2], 1), "worst_ms": round(times[-1], 1)}))
"""


def main() -> None:
    parser = Parser(__doc__)
    add_out(parser, "blas_threads")
    options = parser.options()
    cores = os.cpu_count() or 1
    for busy in (0, 1):
        for threads in sorted({1, max(1, cores - 1), cores}):
            record({"busy": busy, "threads": threads} | _measure(threads, busy), options.out)


def _measure(threads: int, busy: int) -> dict[str, float]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        environment = os.environ | {"OPENBLAS_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [sys.executable, "-c", STEP],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


if __name__ == "__main__":
    entry.run(main)
