"""What each text model of mlx-lm does here: `python tests/models_table.py` writes docs/models.md."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from tiny_zoo import MODELS, VOCAB, zoo_model

from mlxd.batching.driver import Driver
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.plan import RowResult
from mlxd.batching.runner import RunnerInfo
from mlxd.batching.sampling_params import SamplingParams
from mlxd.batching.selftest import oracle_logprobs
from mlxd.caches.kinds import Layer, UnsupportedCacheError, group_specs, inspect_layers, packed_layers
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import MemoryPlan, plan_memory

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
TOLERANCE = 1e-4
VARIANTS = ("in_place", "gathered", "grouped")

_HEAD = (
    "| model file | state | served | attention | alone = mlx-lm | batched = alone | compiled = eager "
    "| resumed = undisturbed | 8-bit KV |"
)
_STEPS = 3
_ROUNDING = 0.05
"""Largest difference from mlx-lm quantised to 8 bits: a last bit may move a number by a whole code."""
_PAGE = 8
_MAX_ROWS = 3
_WATCHED = SamplingParams(temperature=0.0, top_logprobs=20)
_PROMPTS = [[(11 * (i + 1) * (j + 3)) % VOCAB for j in range(n)] for i, n in enumerate((37, 9, 1))]
"""Several pages, windows and chunks; a page and one; a single token, which needs no prefill."""

Results = list[RowResult]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table.

    Attributes:
        state: the groups of its caches, empty where it is refused.
        served: "batched", "one row at a time: why", or "refused: why".
        attention: the decode variants that are right for it.
        checks: alone, batched, compiled, resumed, quantised, each as its cell reads.
    """

    name: str
    state: tuple[str, ...]
    served: str
    attention: tuple[str, ...] = ()
    checks: tuple[str, ...] = ("",) * 5

    def __str__(self) -> str:
        cells = (self.name, ", ".join(self.state), self.served, ", ".join(self.attention), *self.checks)
        return "| " + " | ".join(cells) + " |"


class Bench:
    """A tiny model with a runner for three rows."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self.model = model
        self.memory: MemoryPlan = plan_memory(
            group_specs(layers, _PAGE),
            budget_bytes=2**22,
            weights_bytes=0,
            max_rows=_MAX_ROWS,
            max_model_len=128,
            chunk=2 * _PAGE,
        )
        info = RunnerInfo("tiny", VOCAB, self.memory, _MAX_ROWS, frozenset(), "cpu", True)
        self.runner = MlxRunner(model, layers, self.memory, info)
        self.oracle = [oracle_logprobs(model, prompt) for prompt in _PROMPTS]

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Results]:
        """Results of each row."""
        self.runner.reset()
        driver = Driver(self.runner, self.memory)
        for prompt in prompts:
            driver.join(prompt, _WATCHED)
        driver.prefill()
        steps = [driver.decode() for _ in range(_STEPS)]
        return [list(results) for results in zip(*steps, strict=True)]

    def fault(self, rows: Sequence[int]) -> str | None:
        """What is wrong when these prompts run together, compared with mlx-lm's own caches; or None."""
        try:
            found = self.generate([_PROMPTS[row] for row in rows])
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        worst = max(_from_oracle(results, self.oracle[row]) for row, results in zip(rows, found, strict=True))
        return None if worst <= TOLERANCE else "log-probabilities differ"

    def resumed(self, prompts: Sequence[Sequence[int]]) -> list[Results]:
        """As `generate`, but the first row leaves after one step and comes back after the next."""
        self.runner.reset()
        driver = Driver(self.runner, self.memory)
        rows = [driver.join(prompt, _WATCHED) for prompt in prompts]
        driver.prefill()
        found = [[result] for result in driver.decode()]
        driver.leave(rows[0])
        siblings = driver.decode() if driver.rows else ()
        driver.join([*prompts[0], *rows[0].output], _WATCHED)
        driver.prefill()
        *others, back = driver.decode()
        found[0].append(back)
        for results, first, second in zip(found[1:], siblings, others, strict=True):
            results += [first, second]
        return found


def _from_oracle(results: Results, expected: Sequence[mx.array]) -> float:
    """Largest difference of log-probabilities; infinite where a row failed or drew another token."""
    worst = 0.0
    for result, logprobs in zip(results, expected, strict=True):
        if result.token != int(mx.argmax(logprobs)):
            return float("inf")
        worst = max(worst, _difference(result, logprobs))
    return worst


def _difference(result: RowResult, expected: mx.array) -> float:
    """Largest difference of a log-probability among the likeliest; infinite where the row failed."""
    top = result.logprobs.top if result.logprobs is not None else ()
    return max((abs(float(expected[token]) - value) for token, value in top), default=float("inf"))


def _same(found: Sequence[Results], expected: Sequence[Results]) -> bool:
    """Whether tokens are equal and log-probabilities are within the tolerance, as far as both go."""
    pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=False)]
    for result, other in pairs:
        if result.logprobs is None or other.logprobs is None or result.token != other.token:
            return False
        values = dict(other.logprobs.top)
        if any(abs(values.get(token, value) - value) > TOLERANCE for token, value in result.logprobs.top):
            return False
    return True


def judge(name: str) -> Verdict:
    """Try a model as the daemon would at start, and further."""
    model = zoo_model(name)
    try:
        layers = inspect_layers(model)
    except UnsupportedCacheError as error:
        return Verdict(name, (), f"refused: {error}")
    state = tuple(dict.fromkeys(layer.group for layer in layers))
    bench = Bench(model, layers)
    bench.runner.step.enabled = False
    together, faults = _right_variants(bench, range(len(_PROMPTS)))
    if together:
        checks = *_checks(bench, together[0], len(_PROMPTS)), _quantized(model, layers)
        return Verdict(name, state, "batched", together, checks)
    bench.runner.describe(max_batch=1)
    alone, _ = _right_variants(bench, range(1))
    reason = faults["gathered"]
    if not alone:
        return Verdict(name, (), f"refused: wrong even for one row, {reason}")
    return Verdict(name, state, f"one row at a time: {reason}", alone, (*_checks(bench, alone[0], 1), ""))


def _right_variants(bench: Bench, rows: Sequence[int]) -> tuple[tuple[str, ...], dict[str, str | None]]:
    """The variants that are right for these prompts together, and what is wrong with each."""
    faults = {}
    for variant in VARIANTS:
        bench.runner.set_attention(variant)
        faults[variant] = bench.fault(rows)
    return tuple(variant for variant in VARIANTS if faults[variant] is None), faults


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


def _checks(bench: Bench, variant: str, num_rows: int) -> tuple[str, ...]:
    bench.runner.set_attention(variant)
    prompts = _PROMPTS[:num_rows]
    alone = all(bench.fault([row]) is None for row in range(num_rows))
    singles = [bench.generate([prompt])[0] for prompt in prompts]
    eager = bench.generate(prompts)
    resumed = bench.resumed(prompts)
    bench.runner.step.enabled = True
    compiled = bench.generate(prompts)
    failed = bench.runner.counters().graph_failures > 0
    return (
        _yes(alone),
        _yes(_same(eager, singles)) if num_rows > 1 else "",
        "eager only" if failed else _yes(_same(compiled, eager)),
        _yes(_same(resumed, singles)),
    )


def _quantized(model: nn.Module, layers: Sequence[Layer]) -> str:
    quantization = Quantization(bits=8, group_size=32)
    try:
        packed = packed_layers(layers, quantization)
    except UnsupportedCacheError as error:
        return "none" if not any(layer.kind.make_packed for layer in layers) else f"refused: {error}"
    bench = Bench(model, packed)
    bench.runner.step.enabled = False
    bench.runner.set_attention("in_place")
    try:
        batched = bench.generate(_PROMPTS)
        singles = [bench.generate([prompt])[0] for prompt in _PROMPTS]
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return "refused"
    for prompt, results in zip(_PROMPTS, batched, strict=True):
        expected, *_ = oracle_logprobs(model, prompt, quantization)
        if _difference(results[0], expected) > _ROUNDING:
            return "refused"
    return _yes(_same(batched, singles))


def table(verdicts: Sequence[Verdict]) -> str:
    """The table in Markdown, without its markers."""
    return "\n".join([_HEAD, "|---" * 9 + "|", *map(str, verdicts)])


def main() -> None:
    names = sys.argv[1:] or MODELS
    verdicts = []
    for name in names:
        verdicts.append(judge(name))
        print(verdicts[-1], flush=True)
    if sys.argv[1:]:
        return
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(verdicts)}\n{END}{after}")


if __name__ == "__main__":
    main()
