"""What benchmarks print: first tokens in figures, and figures as JSON lines."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def first_tokens(prompt_tokens: int, cached_tokens: int, seconds: Sequence[float]) -> Line:
    """What became of prompts of `prompt_tokens` together, and when each one's first token came."""
    return {
        "prompt_tokens_computed": prompt_tokens - cached_tokens,
        "prompt_tokens_cached": cached_tokens,
        "first_token_ms_median": round(1000 * statistics.median(seconds), 1),
        "first_token_ms_max": round(1000 * max(seconds), 1),
    }


def record(line: Line, out: Path | None) -> None:
    """Print it, and add it to the file."""
    text = json.dumps(line)
    print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")
