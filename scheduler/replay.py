"""Recorded arrivals, given to tenants."""

import csv
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from mlxd.caches.files import open_file
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.sections import Positive

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_LENGTH = 2**20
"""Tokens of a prompt or an output, at most."""
MAX_TOKENS = 100_000_000
"""Of all prompts and outputs together, at most: each output token is remembered until the end."""
MAX_CSV_BYTES = 2**28
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
        num_tokens = 0
        for number, row in enumerate(_rows(path)):
            if number >= self.limit:
                return
            try:
                stamp = _stamp(row["TIMESTAMP"])
                begun = begun or stamp
                if stamp < begun:
                    raise ValueError(f"TIMESTAMP {row['TIMESTAMP'][:26]} is before that of the first row")
                num_prompt, num_output = (
                    self._tokens(row, "ContextTokens"),
                    self._tokens(row, "GeneratedTokens"),
                )
                num_tokens += num_prompt + num_output
                _check_total(num_tokens)
            except ValueError as error:
                raise ConfigError(f"{path}:{number + 2}: {error}") from None
            at = (stamp - begun).total_seconds() * self.time_scale
            name = random.choices(tenants, weights)[0]
            if name in self.bursty:
                at -= at % self.burst_s
            yield name, at, num_prompt, num_output

    def _tokens(self, row: dict[str, str], column: str) -> int:
        """Scaled. Raises ValueError."""
        text = row[column]
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
            raise ValueError(f"{column} is {text[:20]!r}; it must be a number of tokens")
        scaled = max(1, round(int(text) * self.length_scale))
        if scaled > MAX_LENGTH:
            raise ValueError(f"{column} is {text}, with length_scale {scaled}; the limit is {MAX_LENGTH}")
        return scaled


def _check_total(num_tokens: int) -> None:
    """Raises ValueError."""
    if num_tokens > MAX_TOKENS:
        hint = "a smaller replay.length_scale or replay.limit makes fewer"
        raise ValueError(f"with this row there are {num_tokens} tokens; the limit is {MAX_TOKENS}; {hint}")


def _stamp(text: str) -> datetime:
    """UTC unless it says otherwise. Raises ValueError."""
    stamp = datetime.fromisoformat(text[:26])
    return stamp.replace(tzinfo=stamp.tzinfo or UTC)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with TextIOWrapper(open_file(path, MAX_CSV_BYTES), "utf-8", newline="") as file:
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
