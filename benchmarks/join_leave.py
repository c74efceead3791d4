"""What it costs that a row joins or leaves, by the length of the rows beside it; mlx-lm in the same run.

    python benchmarks/join_leave.py --lengths 100,1000,4000 --siblings 6

Cost is host and device time together: from the join until the newcomer's first token, its own prefill
included, less the steady steps in it; from the leave until the next token, less a steady step. Prints a table
and, with `--out`, adds a JSON line to a file.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import entry
from figures import record
from options import Parser, add_out, model, number_from, numbers

from mlxd.batching.blas import ensure_blas

blas = ensure_blas()  # before anything imports mlx

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from models import load, make_runner  # noqa: E402

from mlxd.batching.driver import Driver  # noqa: E402

if TYPE_CHECKING:
    from models import BenchModel

    from mlxd.batching.mlx_runner import MlxRunner
    from mlxd.batching.row import Row

_NEWCOMER = tuple(range(1, 9))
_STEADY_STEPS = 3
_MOST_STEPS = 4096


class Side(Protocol):
    """An engine whose rows join, step and leave; each call returns when the device is done."""

    def join(self, prompts: Sequence[Sequence[int]]) -> int:
        """Take them in, up to their first tokens; decode steps that all rows took on the way."""
        ...

    def step(self) -> None: ...

    def leave(self) -> None:
        """The row that joined last goes."""
        ...


class Ours:
    def __init__(self, runner: "MlxRunner") -> None:
        self._driver = Driver(runner, runner.info.memory)
        self._last: Row | None = None

    def join(self, prompts: Sequence[Sequence[int]]) -> int:
        rows = [self._driver.join(prompt) for prompt in prompts]
        self._driver.prefill(rows)
        self._driver.decode()
        self._last = rows[-1]
        return 1

    def step(self) -> None:
        self._driver.decode()

    def leave(self) -> None:
        assert self._last is not None
        self._driver.leave(self._last)


class MlxLm:
    def __init__(self, bench: "BenchModel", max_rows: int) -> None:
        self._generator = BatchGenerator(bench.model, max_tokens=_MOST_STEPS, completion_batch_size=max_rows)
        self._last = -1

    def join(self, prompts: Sequence[Sequence[int]]) -> int:
        waiting = set(self._generator.insert([list(prompt) for prompt in prompts]))
        self._last = max(waiting)
        steps = 0
        while waiting:
            _, responses = self._generator.next()
            waiting -= {response.uid for response in responses}
            steps += bool(responses)
        self._wait()
        return steps

    def step(self) -> None:
        self._generator.next()
        self._wait()

    def leave(self) -> None:
        self._generator.remove([self._last])

    def _wait(self) -> None:
        mx.synchronize(self._generator.stream)


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds: of a join and a leave beyond the steps in it, and of a steady step."""

    join_ms: float
    leave_ms: float
    step_ms: float


def measure(side: Side, length: int, siblings: int, rounds: int, vocab_size: int) -> Cost:
    """In each round a newcomer joins `siblings` rows of `length` and leaves; medians over rounds.

    Calls are compared with the steady steps right after them, since a shared machine's speed drifts.
    """
    side.join([[(7 * row + i) % vocab_size for i in range(length)] for row in range(siblings)])
    joins, leaves, steps = [], [], []
    for _ in range(rounds):
        begun = time.perf_counter()
        taken = side.join([_NEWCOMER])
        join_s = time.perf_counter() - begun
        joins.append(join_s - taken * _steady_s(side))
        begun = time.perf_counter()
        side.leave()
        side.step()
        leave_s = time.perf_counter() - begun
        steps.append(_steady_s(side))
        leaves.append(leave_s - steps[-1])
    return Cost(*(1e3 * statistics.median(times) for times in (joins, leaves, steps)))


def _steady_s(side: Side) -> float:
    return statistics.median(_timed(side.step) for _ in range(_STEADY_STEPS))


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> None:
    options = _options()
    bench = load(options.model)
    steps = options.rounds * (2 + 2 * _STEADY_STEPS) + 2
    found: dict[str, dict[str, dict[str, float]]] = {"mlxd": {}, "mlx-lm": {}}
    print(f"{'siblings of':>12} {'engine':>8} {'join ms':>9} {'leave ms':>9} {'step ms':>9}")
    for length in options.lengths:
        runner = make_runner(
            bench,
            max_rows=options.siblings + 1,
            max_model_len=length + steps,
            page_size=64,
            attention=options.attention,
            compile="off",
        )
        for name, side in (("mlxd", Ours(runner)), ("mlx-lm", MlxLm(bench, options.siblings + 1))):
            cost = measure(side, length, options.siblings, options.rounds, bench.vocab_size)
            found[name][str(length)] = {
                "join_ms": round(cost.join_ms, 3),
                "leave_ms": round(cost.leave_ms, 3),
                "step_ms": round(cost.step_ms, 3),
            }
            print(f"{length:>12} {name:>8} {cost.join_ms:>9.2f} {cost.leave_ms:>9.2f} {cost.step_ms:>9.2f}")
    line = {"benchmark": "join_leave", "model": bench.name, "blas": blas.name, "siblings": options.siblings}
    record(line | {"cost": found}, options.out, quiet=True)


def _options() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=model, default="tiny")
    parser.add_argument("--siblings", type=number_from(1), default=6)
    parser.add_argument("--rounds", type=number_from(1), default=20)
    parser.add_argument("--attention", default="in_place", choices=["in_place", "gathered"])
    parser.add_argument("--lengths", type=numbers, default=[100, 1000, 4000])
    add_out(parser, "join_leave")
    return parser.options()


if __name__ == "__main__":
    entry.run(main)
