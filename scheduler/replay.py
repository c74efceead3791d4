"""Recorded arrivals, given to tenants."""

import csv
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from mlxd.scheduler.config import Positive
from mlxd.scheduler.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTY_WEIGHT = 3
Scale = Annotated[float, Meta(gt=0, le=1e6)]


class Replay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A CSV file with the columns of the Azure LLM inference traces.

    Each row goes to a tenant drawn by the trace's seed; a bursty one is drawn three times as often, and sends
    all it has of `burst_s` seconds at their start. `time_scale`: above 1 spreads arrivals; `length_scale`:
    below 1 shortens prompts and outputs, to one token at least. `limit`: rows read.
    """

    csv: Annotated[str, Meta(min_length=1)]
    time_scale: Scale = 1.0
    length_scale: Scale = 1.0
    limit: Positive = 1_000_000
    bursty: tuple[str, ...] = ()
    burst_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0

    def requests(
        self, folder: Path, tenants: Sequence[str], random: Random
    ) -> Iterator[tuple[str, float, int, int]]:
        """Tenant, seconds, prompt tokens and output tokens of each row. Raises ConfigError."""
        weights = [_BURSTY_WEIGHT if name in self.bursty else 1 for name in tenants]
        path = folder / self.csv
        begun: datetime | None = None
        for number, row in enumerate(_rows(path)):
            if number >= self.limit:
                return
            try:
                stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
                num_prompt, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except ValueError as error:
                raise ConfigError(f"{path}:{number + 2}: {error}") from None
            begun = begun or stamp
            at = (stamp - begun).total_seconds() * self.time_scale
            name = random.choices(tenants, weights)[0]
            if name in self.bursty:
                at -= at % self.burst_s
            yield name, at, self._scaled(num_prompt), self._scaled(num_output)

    def _scaled(self, num_tokens: int) -> int:
        return max(1, round(num_tokens * self.length_scale))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}:1: the column {missing[0]} is missing")
            for row in reader:
                yield {name: row[name] or "" for name in COLUMNS}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: is no CSV file: {error}") from None
