"""What a GPU does in a decode step: each kernel by name, how often and how long, and when none runs.

    python benchmarks/step_profile.py --model 1b --rows 1,32,128 --context 512

CUDA's own records of pipelined steps, read through PyTorch's profiler, which must be installed; it sees all
kernels of the process, those of MLX's graphs among them. `busy_ms` is the time in which any kernel ran. The
records cost the host time, so `step_ms` is longer than without. Prints JSON lines.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import entry
from figures import Line, record
from options import Parser, add_out, add_page_size, models, number_from, numbers

_WARM_STEPS = 10
_PARTS = {
    "attention": ("mlxd_whole", "mlxd_part", "mlxd_join"),
    "norm": ("rms_norm",),
    "products": ("mlxd_product", "gemm", "gemv", "nvjet", "cutlass", "splitk", "qmv", "qmm"),
    "sampling": ("argreduce", "arg_reduce", "logsumexp", "softmax", "sort"),
}
"""Of a step, by what the names of their kernels hold, in small letters."""


class Kernel(NamedTuple):
    """`begun_us`, `us`: when it began, on the profiler's clock, and how long it ran."""

    name: str
    begun_us: float
    us: float

    @property
    def part(self) -> str:
        name = self.name.lower()
        return next((part for part, names in _PARTS.items() if any(n in name for n in names)), "other")


def kernels_of(run: Callable[[], None]) -> list[Kernel]:
    """All that ran on the GPU for it, in order. `run` waits for what it launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [
        Kernel(event["name"], float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda kernel: kernel.begun_us)


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Time in which at least one of them ran; they come in order of their beginning."""
    total = until = 0.0
    for kernel in kernels:
        end = kernel.begun_us + kernel.us
        total += max(0.0, end - max(until, kernel.begun_us))
        until = max(until, end)
    return total


def by_name(kernels: Sequence[Kernel], num_steps: int) -> list[Line]:
    """A line for each kernel, the longest in all first: launches a step, microseconds of the median launch
    and of the longest one, and milliseconds a step.
    """
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.part, kernel.name].append(kernel.us)
    lines = [
        {
            "part": part,
            "kernel": name,
            "launches": round(len(us) / num_steps, 2),
            "us": round(statistics.median(us), 2),
            "longest_us": round(max(us), 2),
            "ms_a_step": round(sum(us) / num_steps / 1e3, 4),
        }
        for (part, name), us in times.items()
    ]
    return sorted(lines, key=lambda line: -line["ms_a_step"])


def by_part(lines: Sequence[Line]) -> Line:
    parts: dict[str, float] = defaultdict(float)
    for line in lines:
        parts[line["part"]] += line["ms_a_step"]
    return {part: round(ms, 3) for part, ms in sorted(parts.items())}


def main() -> None:
    options = _options()
    entry.require("torch")  # through whose profiler CUDA's records are read
    from mlxd.batching.blas import ensure_blas

    blas = ensure_blas()  # before anything imports mlx
    from machine import describe
    from models import load, make_runner

    from mlxd.batching.driver import Driver

    record(describe(blas), options.out)
    for name in options.model:
        bench = load(name)
        for rows in options.rows:
            runner = make_runner(
                bench,
                max_rows=rows,
                max_model_len=options.context + _WARM_STEPS + options.steps + 2,
                page_size=options.page_size,
                attention=options.attention,
                compile="on",
            )
            driver = Driver(runner, runner.info.memory, pipelined=True)
            for row in range(rows):
                driver.join([(7 * row + i) % bench.vocab_size for i in range(options.context)])
            driver.prefill()
            for _ in range(_WARM_STEPS):
                driver.decode()

            def steps(driver: Driver = driver) -> None:
                for _ in range(options.steps):
                    driver.decode()
                driver.flush()

            _tell(kernels_of(steps), {"model": name, "rows": rows, "context": options.context}, options)


def _tell(kernels: Sequence[Kernel], case: Line, options: argparse.Namespace) -> None:
    if not kernels:
        sys.exit("the profiler saw no kernel: it needs a GPU of NVIDIA, and MLX's CUDA build")
    wall_us = kernels[-1].begun_us + kernels[-1].us - kernels[0].begun_us
    lines = by_name(kernels, options.steps)
    whole = {
        "kind": "step",
        "launches": round(len(kernels) / options.steps, 1),
        "step_ms": round(wall_us / options.steps / 1e3, 3),
        "busy_ms": round(busy_us(kernels) / options.steps / 1e3, 3),
    }
    record(case | whole | {"parts_ms": by_part(lines)}, options.out)
    for line in lines[: options.most]:
        record(case | {"kind": "kernel"} | line | {"kernel": line["kernel"][:120]}, options.out)


def _options() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=models, default=["1b"])
    parser.add_argument("--rows", type=numbers, default=[1, 32, 128], help="rows of the batch, as 1,32,128")
    parser.add_argument("--context", type=number_from(1), default=512, help="prompt tokens of each row")
    parser.add_argument("--steps", type=number_from(1), default=20, help="that are recorded")
    add_page_size(parser)
    parser.add_argument("--attention", choices=("in_place", "gathered", "kernel"), default="kernel")
    parser.add_argument("--most", type=number_from(1), default=12, help="kernels that get a line")
    add_out(parser, "step_profile")
    return parser.options()


if __name__ == "__main__":
    entry.run(main)
