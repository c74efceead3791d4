"""Recorded arrivals as requests of ten tenants, scaled to what a small machine carries.

The recording is AzureLLMInferenceTrace_conv.csv of the Azure Public Dataset, CC-BY 4.0 (Patel et al.,
Splitwise, ISCA 2024).
"""

import csv
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from entry import BenchmarkError
from open_loop import Due

_LENGTHS = "ContextTokens", "GeneratedTokens"
BURSTY = ("bursty1", "bursty2")
STEADY = tuple(f"steady{number}" for number in range(1, 9))
TENANTS = BURSTY + STEADY
BURSTY_WEIGHT = 3
"""How often a row goes to a bursty tenant, where it goes to a steady one once."""
BURST_S = 60.0
"""A bursty tenant sends at once what it has of so long."""


class Recorded(NamedTuple):
    """A request of the recording. `at_s`: seconds after the first one."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def recorded(path: Path, time_scale: float, length_scale: float) -> Iterator[Recorded]:
    """Requests in order.

    `time_scale`: above 1 spreads arrivals; `length_scale`: below 1 shortens prompts and answers.

    Raises:
        BenchmarkError: a row is not as in the recording, or there is none.
    """
    with path.open(newline="") as file:
        begun: datetime | None = None
        rows = csv.DictReader(file)
        try:
            for row in rows:
                stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
                begun = begun or stamp
                prompt, output = (max(2, round(int(row[name]) * length_scale)) for name in _LENGTHS)
                yield Recorded((stamp - begun).total_seconds() * time_scale, prompt, output)
        except (KeyError, TypeError, ValueError, csv.Error):
            columns = ", ".join(("TIMESTAMP", *_LENGTHS))
            raise BenchmarkError(f"{path}:{rows.line_num}: no request with {columns}") from None
    if begun is None:
        raise BenchmarkError(f"{path} has no requests")


def read(path: Path, until_s: float, time_scale: float, length_scale: float) -> list[Due]:
    """Requests due before `until_s`, as of the ten tenants; scaled as `recorded` does."""
    rng = random.Random(1)
    weights = [BURSTY_WEIGHT if tenant in BURSTY else 1 for tenant in TENANTS]
    requests: list[Due] = []
    for at_s, prompt, output in recorded(path, time_scale, length_scale):
        if at_s >= until_s:
            break
        (tenant,) = rng.choices(TENANTS, weights)
        due_s = at_s - at_s % BURST_S if tenant in BURSTY else at_s
        requests.append(Due(tenant, due_s, prompt, output))
    return sorted(requests, key=lambda due: due.at_s)
