"""What each text model of mlx-lm does here: `python tests/models_table.py` writes docs/models.md's tables."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from model_bench import CHUNK, PROMPTS, TOLERANCE, Bench, Reuse, are_same
from tiny_zoo import MODELS, zoo_model

from mlxd.caches.kinds import UnsupportedCacheError, inspect_layers
from mlxd.caches.quantization import Quantization

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
VARIANTS = ("in_place", "gathered", "grouped")
PACKED_VARIANTS = ("in_place",)
FORMS = {
    "8 bits": Quantization(bits=8, group_size=32),
    "4 bits": Quantization(bits=4, group_size=32),
    f"8 bits from {CHUNK} on": Quantization(bits=8, group_size=32, start=CHUNK),
    f"4 bits from {CHUNK} on": Quantization(bits=4, group_size=32, start=CHUNK),
}
NATIVE_HEAD = (
    "| model file | state | served | attention | alone = mlx-lm | batched = alone | compiled = eager "
    "| resumed = undisturbed | warm = cold |"
)
PACKED_HEAD = f"| model file | {' | '.join(FORMS)} |"
_NO_REUSE = "no reuse"
_USUAL_REUSE = ((32, 38), (40, 46))
"""Positions found and positions of the prompt, second and third turn, where pages are `PAGE` long."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A model's line in the table of native caches.

    Attributes:
        state: the groups of its caches, empty where it is refused.
        served: "batched", "one row at a time: why", or "refused: why".
        attention: the decode variants that are right for it.
        checks: alone, batched, compiled, resumed, warm, each as its cell reads.
        rank: its place in the table: refused, one row, with an exception, plain.
    """

    name: str
    state: tuple[str, ...]
    served: str
    attention: tuple[str, ...] = ()
    checks: tuple[str, ...] = ("",) * 5

    @property
    def rank(self) -> int:
        for rank, start in enumerate(("refused", "one row")):
            if self.served.startswith(start):
                return rank
        return 3 if set(self.checks) == {"yes"} else 2

    def __str__(self) -> str:
        return _line((self.name, ", ".join(self.state), self.served, ", ".join(self.attention), *self.checks))


@dataclass(frozen=True, slots=True)
class PackedVerdict:
    """A model's line in the table of packed keys and values; `cells`: one for each of FORMS.

    `rank`: its place in the table: refused or wrong in some form, with an exception, plain.
    """

    name: str
    cells: tuple[str, ...]

    @property
    def rank(self) -> int:
        if not all(cell.startswith("yes") for cell in self.cells):
            return 0
        return 2 if set(self.cells) == {"yes"} else 1

    def __str__(self) -> str:
        return _line((self.name, *self.cells))


@dataclass(frozen=True, slots=True)
class Trial:
    """How many rows run together, 0 where even one is wrong; the variants that are right; why not more."""

    num_rows: int
    variants: tuple[str, ...]
    reason: str = ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def judge(name: str) -> Verdict:
    """Try a model with its native caches as the daemon would at start, and further."""
    model = zoo_model(name)
    try:
        layers = inspect_layers(model)
    except UnsupportedCacheError as error:
        return Verdict(name, (), f"refused: {error}")
    bench = Bench(model, layers)
    trial = _try(bench, VARIANTS)
    if not trial.num_rows:
        return Verdict(name, (), f"refused: wrong even for one row, {trial.reason}")
    state = tuple(dict.fromkeys(layer.group for layer in layers))
    served = "batched" if trial.num_rows > 1 else f"one row at a time: {trial.reason}"
    return Verdict(name, state, served, trial.variants, tuple(_checks(bench, trial).values()))


def judge_packed(name: str) -> PackedVerdict | None:
    """The same with its keys and values packed; None where it is refused anyhow, or keeps none."""
    model = zoo_model(name)
    try:
        layers = inspect_layers(model)
    except UnsupportedCacheError:
        return None
    if not any(layer.kind.make_packed for layer in layers):
        return None
    cells = [_packed_cell(Bench(model, layers, quantization)) for quantization in FORMS.values()]
    return PackedVerdict(name, tuple(cells))


def _try(bench: Bench, variants: Sequence[str]) -> Trial:
    """All prompts together, else the first alone."""
    reason = ""
    for num_rows in (len(PROMPTS), 1):
        bench.runner.describe(max_batch=num_rows)
        faults = {}
        for variant in variants:
            bench.runner.set_attention(variant)
            faults[variant] = bench.fault(range(num_rows))
        right = tuple(variant for variant in variants if faults[variant] is None)
        if right:
            return Trial(num_rows, right, reason)
        reason = reason or str(faults.get("gathered"))
    return Trial(0, (), reason)


def _checks(bench: Bench, trial: Trial) -> dict[str, str]:
    """What must hold, as its cell reads; rows that are computed in other pieces may round otherwise."""
    bench.runner.set_attention(trial.variants[0])
    prompts = PROMPTS[: trial.num_rows]
    exact, rounded = [TOLERANCE] * trial.num_rows, bench.limits[: trial.num_rows]
    alone = all(bench.fault([row]) is None for row in range(trial.num_rows))
    singles = [bench.generate([prompt])[0] for prompt in prompts]
    eager, resumed, compiled = bench.generate(prompts), bench.resumed(prompts), bench.compiled(prompts)
    return {
        "alone": _yes(alone),
        "batched": _yes(are_same(eager, singles, exact)) if trial.num_rows > 1 else "",
        "compiled": "eager only" if compiled is None else _yes(are_same(compiled, eager, exact)),
        "resumed": _yes(are_same(resumed, singles, rounded)),
        "warm": _reused(bench.reuse()),
    }


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


def _reused(reuse: Reuse) -> str:
    if not reuse.is_same:
        return _yes(False)
    if reuse.why_not:
        return f"{_NO_REUSE}: {reuse.why_not}"
    if reuse.found == _USUAL_REUSE:
        return _yes(True)
    return "yes, " + ", ".join(f"{found}/{total}" for found, total in reuse.found)


def _packed_cell(bench: Bench) -> str:
    """All checks in one: those that fail, or what was reused."""
    trial = _try(bench, PACKED_VARIANTS)
    if not trial.num_rows:
        return "refused"
    checks = _checks(bench, trial)
    failed = [check for check, cell in checks.items() if cell == _yes(False)]
    if failed:
        return f"{_yes(False)}: {', '.join(failed)}"
    return f"yes, {_NO_REUSE}" if checks["warm"].startswith(_NO_REUSE) else checks["warm"]


def table(head: str, verdicts: Sequence[Verdict | PackedVerdict]) -> list[str]:
    """Its lines in Markdown, exceptions first."""
    return [head, "|---" * (head.count("|") - 1) + "|", *map(str, sorted(verdicts, key=lambda v: v.rank))]


def lines_of(head: str, document: str) -> list[str]:
    """The lines of a document's table that begins with `head`, that line included."""
    lines = document.splitlines()
    start = lines.index(head)
    return list(takewhile(lambda line: line.startswith("|"), lines[start:]))


def written(document: str, tables: Mapping[str, Sequence[str]]) -> str:
    """The document with new lines in its tables, by head."""
    for head, lines in tables.items():
        document = document.replace("\n".join(lines_of(head, document)), "\n".join(lines))
    return document


def main() -> None:
    verdicts: list[Verdict] = []
    packed: list[PackedVerdict] = []
    for name in sys.argv[1:] or MODELS:
        verdicts.append(judge(name))
        print(verdicts[-1], flush=True)
        if line := judge_packed(name):
            packed.append(line)
            print(line, flush=True)
    if not sys.argv[1:]:
        tables = {NATIVE_HEAD: table(NATIVE_HEAD, verdicts), PACKED_HEAD: table(PACKED_HEAD, packed)}
        DOCUMENT.write_text(written(DOCUMENT.read_text(), tables))


if __name__ == "__main__":
    main()
