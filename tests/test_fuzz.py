"""Frames that are almost messages cost nobody anything: `python tests/fuzz.py` sends a million of them."""

from collections import Counter
from pathlib import Path

import pytest
from fuzz import fuzz
from fuzz_frames import MAX_MESSAGE_BYTES, Mutator

from mlxd.scheduler.errors import ProtocolError
from mlxd.scheduler.protocol import decode, kind_of

BAD = {"decode", "too_large", "unsupported", "invalid_param"}
KINDS = {"generate", "cancel", "status", "ping", "drain"}


def test_frames_are_the_same_for_the_same_seed() -> None:
    one, same, other = ([Mutator(seed).frames() for _ in range(50)] for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_decoding_a_mutated_frame_gives_a_message_or_one_of_four_errors() -> None:
    mutator = Mutator(7)
    seen: Counter[str] = Counter()
    for _ in range(4_000):
        for frame in mutator.frames():
            try:
                seen[kind_of(decode(frame, MAX_MESSAGE_BYTES))] += 1
            except ProtocolError as error:
                seen[error.code] += 1
    assert set(seen) == BAD | KINDS, "a mutator that makes nothing of a sort tests nothing of it"


def test_a_client_is_served_as_ever_among_4000_mutated_frames(tmp_path: Path) -> None:
    report = fuzz(tmp_path, 4_000, seed=3)
    assert report.faults == ()
    assert report.answers > 0
    assert BAD | {"malformed_frames", "unauthenticated"} <= {
        code for code, count in report.refused.items() if count
    }


@pytest.mark.slow
def test_a_client_is_served_as_ever_among_100000_mutated_frames(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 100_000, seed=4).faults == ()
