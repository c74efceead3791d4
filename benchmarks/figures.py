"""What benchmarks share to tell their figures: JSON lines, options for where they go, quantiles."""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Record = Callable[[Line], None]


def add_output_options(parser: argparse.ArgumentParser, name: str) -> None:
    """`--out` (a file in $OUT where that is set), `--plot` and `--plot-from`."""
    folder = os.environ.get("OUT")
    default = Path(folder) / f"{name}.jsonl" if folder else None
    parser.add_argument("--out", type=Path, default=default, help="file to append the JSON lines to")
    parser.add_argument("--plot", type=Path, help="draw the lines: writes this path with .png and .svg")
    parser.add_argument(
        "--plot-from", type=Path, nargs="+", help="measure nothing: take the lines of these files"
    )


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


def read_lines(paths: Sequence[Path]) -> list[Line]:
    return [json.loads(text) for path in paths for text in path.read_text().splitlines()]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of at least one value that is not below `share` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def numbers(text: str) -> list[int]:
    """ "1,8,32" as an option's value."""
    return [int(part) for part in text.split(",")]
