"""Recorded arrivals as requests of ten tenants, scaled to what a small machine carries.

The recording is AzureLLMInferenceTrace_conv.csv of the Azure Public Dataset, CC-BY 4.0 (Patel et al.,
Splitwise, ISCA 2024).
"""

import csv
import random
from datetime import datetime
from pathlib import Path

from open_loop import Due

BURSTY = ("bursty1", "bursty2")
STEADY = tuple(f"steady{number}" for number in range(1, 9))
TENANTS = BURSTY + STEADY
BURSTY_WEIGHT = 3
"""How often a row goes to a bursty tenant, where it goes to a steady one once."""
BURST_S = 60.0
"""A bursty tenant sends at once what it has of so long."""


def read(path: Path, until_s: float, time_scale: float, length_scale: float) -> list[Due]:
    """Requests due before `until_s`.

    `time_scale`: above 1 spreads arrivals; `length_scale`: below 1 shortens prompts and answers.
    """
    rng = random.Random(1)
    weights = [BURSTY_WEIGHT if tenant in BURSTY else 1 for tenant in TENANTS]
    requests: list[Due] = []
    with path.open(newline="") as file:
        begun: datetime | None = None
        for row in csv.DictReader(file):
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
            begun = begun or stamp
            at_s = (stamp - begun).total_seconds() * time_scale
            if at_s >= until_s:
                break
            (tenant,) = rng.choices(TENANTS, weights)
            if tenant in BURSTY:
                at_s -= at_s % BURST_S
            prompt, output = (
                max(2, round(int(row[name]) * length_scale)) for name in ("ContextTokens", "GeneratedTokens")
            )
            requests.append(Due(tenant, at_s, prompt, output))
    return sorted(requests, key=lambda due: due.at_s)
