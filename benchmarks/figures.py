"""What benchmarks share to tell their figures: JSON lines, quantiles."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from entry import BenchmarkError

Line = dict[str, Any]
Record = Callable[[Line], None]


def first_tokens(prompt_tokens: int, cached_tokens: int, seconds: Sequence[float]) -> Line:
    """What became of prompts of `prompt_tokens` together, and when each one's first token came."""
    return {
        "prompt_tokens_computed": prompt_tokens - cached_tokens,
        "prompt_tokens_cached": cached_tokens,
        "first_token_ms_median": round(1000 * statistics.median(seconds), 1),
        "first_token_ms_max": round(1000 * max(seconds), 1),
    }


def record(line: Line, out: Path | None, *, quiet: bool = False) -> None:
    """Print it, unless `quiet`, and add it to the file."""
    text = json.dumps(line)
    if not quiet:
        print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")


def of_case(record: Record, case: Line) -> Record:
    """Records lines that begin with what the case is."""
    return lambda line: record(case | line)


def read_lines(paths: Sequence[Path], kind: str | None = None) -> list[Line]:
    """What was recorded in these files.

    Args:
        kind: of some line in each file, by which a benchmark knows its own.
    Raises:
        BenchmarkError: a file has lines that are no JSON objects, or none of the kind.
    """
    lines = []
    for path in paths:
        own = list(_lines_of(path))
        if kind is not None and all(line.get("kind") != kind for line in own):
            raise BenchmarkError(f"{path} has no line of kind {kind!r}: it is not of this benchmark")
        lines += own
    return lines


def _lines_of(path: Path) -> Iterator[Line]:
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise BenchmarkError(f"{path}:{number}: no JSON object")
        yield line


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of at least one value that is not below `share` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
