"""A decode step's parts on the host: what the scheduler decides, and what clients are told."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import scheduling
from models import SMOLLM2

from mlxd.batching.model import resolve
from mlxd.batching.runner import ignore_progress
from mlxd.batching.text import Tokenizer
from mlxd.scheduler.answer import Answer
from mlxd.scheduler.events import RequestKey, Tokens
from mlxd.scheduler.protocol import encode
from mlxd.scheduler.transcript import Transcript

_TENANTS, _WAITING, _STEPS = 4, 64, 200
_LONGEST_CHUNK = 2**16
_NUM_TOKENS = 64


def schedule_ms(rows: int) -> float:
    """Plan and postprocess of a step of so many rows, beside a few who wait."""
    figures = scheduling.measure(rows, _TENANTS, _WAITING, _STEPS, "fair", plain=True)
    return float(str(figures["median_ms"]))


def text_ms(rows: int, folder: Path | None) -> float:
    """A token of each row: detokenised, added to its transcript, encoded as a frame.

    `folder`: of the tokenizer; None takes the built-in model's.
    """
    tokenizer = Tokenizer.load(folder or resolve(SMOLLM2, ignore_progress))
    transcripts = [Transcript(str(row)) for row in range(rows)]
    answers = [
        Answer(transcript, str(row), tokenizer.stream(), frozenset())
        for row, transcript in enumerate(transcripts)
    ]
    return round(1e3 * statistics.median(_steps_s(answers, transcripts)), 4)


def _steps_s(answers: list[Answer], transcripts: list[Transcript]) -> Iterator[float]:
    for step in range(_NUM_TOKENS):
        begun = time.perf_counter()
        for row, (answer, transcript) in enumerate(zip(answers, transcripts, strict=True)):
            answer.tokens(Tokens(RequestKey("bench", str(row)), (1_000 + 37 * row + step,)))
            chunk = transcript.chunk(step, _LONGEST_CHUNK)
            assert chunk is not None
            encode(chunk)
        yield time.perf_counter() - begun
