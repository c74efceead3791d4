"""What one step computes, and what came of it."""

from dataclasses import dataclass, field

import msgspec

from mlxd.batching.row import Row


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions [start, end) of a row, none of which yields a token.

    The last known position of a row is never in a chunk: its decode step computes it and yields the next
    token. `end` is computed from the row's own tokens alone, so a sibling never moves it.
    """

    row: Row
    start: int
    end: int
    tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class RestoredPage(msgspec.Struct, frozen=True):
    """A group's page that was computed before and comes from elsewhere.

    `payload` is what `Runner.export_pages` made of the page.
    """

    group: int
    page: int
    payload: memoryview


class DecodeEntry(msgspec.Struct, frozen=True):
    """One position of a row: feed its input token, write K and V at `position`, draw token `output_index`.

    `token` is the input token where the host knows it (first step after a prefill or a resume); None: the
    token that this row's previous step drew, which is still on the device.

    A msgspec struct, as one is made for each row and step.
    """

    row: Row
    position: int
    output_index: int
    token: int | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward over all rows; built by Scheduler.schedule, never changed after.

    Attributes:
        step_id: 1, 2, 3, ...
        decode: rows that draw a token, in joining order.
        prefill: chunks, at most one a row, of rows that are not in `decode`; either may run first.
        copies: per group, (origin, page): all origins are read before anything of the step is written.
        scrub: per group, pages to zero before anything is computed; none of those that are filled.
        left: ids of rows that were in an earlier plan and will be in no later one.
        restored: pages to fill before anything is computed.
    """

    step_id: int
    decode: tuple[DecodeEntry, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    scrub: tuple[tuple[int, ...], ...] = ()
    left: tuple[int, ...] = ()
    restored: tuple[RestoredPage, ...] = ()
    copies: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefill)

    @property
    def replaces_pages(self) -> bool:
        """Whether pages are copied, zeroed or filled before anything is computed."""
        return bool(self.restored or any(self.copies) or any(self.scrub))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the drawn token and of the likeliest ones, of the model's own distribution."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """One row's outcome: a token, or a fault that ends this row alone (`fault` is an error code)."""

    row_id: int
    token: int
    logprobs: TokenLogprobs | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one StepPlan.

    Attributes:
        rows: one a DecodeEntry, in plan order.
        prefill_faults: row id -> error code, rows whose chunk failed alone.
        decode_s, prefill_s: device time as seen by the host; 0 where there was no such part, or where it
            could not be told from the other one, which then has the time of both.
        compiled: whether the decode part ran compiled.
        traced: whether a graph was made for it, so that its time says nothing of the steps to come.
    """

    rows: tuple[RowResult, ...]
    prefill_faults: dict[int, str] = field(default_factory=dict)
    decode_s: float = 0.0
    prefill_s: float = 0.0
    compiled: bool = False
    traced: bool = False
