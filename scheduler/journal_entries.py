"""What a journal holds of requests, and the changes that are told to it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.messages import Generate
from mlxd.scheduler.transcript import Record


class Begun(IntEnum):
    """In how many processes a request was begun that has not ended."""

    ONCE = 1
    """At most by the one that accepted it."""
    AGAIN = 2
    """By a later one, beside others."""
    ALONE = 3
    """By a third one, with nothing beside it; the latest one of all to be begun so."""


@dataclass(frozen=True, slots=True)
class Accept:
    """`message`: with a seed, so that it gives the same tokens again."""

    key: RequestKey
    digest: bytes
    message: Generate


@dataclass(frozen=True, slots=True)
class Start:
    """An open request is about to begin anew. One at most is ALONE: it makes the one before it AGAIN."""

    key: RequestKey
    begun: Begun


@dataclass(frozen=True, slots=True)
class End:
    """`ended_at`: Unix time, seconds."""

    key: RequestKey
    record: Record
    ended_at: float


@dataclass(frozen=True, slots=True)
class Forget:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Keep:
    """These are the tenants from now on: what others have is forgotten."""

    tenants: frozenset[str]


Change = Accept | Start | End | Forget | Keep


@dataclass(frozen=True, slots=True)
class Entry:
    """What the journal has of one request: its message while it is open, its record afterwards."""

    key: RequestKey
    digest: bytes
    is_whole: bool
    message: Generate | None
    begun: Begun
    ended_at: float
    record: Record | None


encode: Callable[[Generate | Record], bytes] = msgspec.msgpack.Encoder().encode
_decode_message = msgspec.msgpack.Decoder(Generate).decode
_decode_record = msgspec.msgpack.Decoder(Record).decode


def decode_entry(
    tenant: str,
    request_id: str,
    digest: bytes,
    is_whole: int,
    message: bytes | None,
    begun: int,
    ended_at: float | None,
    record: bytes | None,
) -> Entry:
    """Raises msgspec.MsgspecError, TypeError or ValueError."""
    if message is None and record is None:
        raise ValueError("it has neither a message nor a record")
    ended = None if record is None else _decode_record(record)
    if ended is not None:
        _check_pieces(ended)
    return Entry(
        key=RequestKey(tenant, request_id),
        digest=digest,
        is_whole=bool(is_whole),
        message=None if message is None else _decode_message(message),
        begun=Begun(begun),
        ended_at=ended_at or 0.0,
        record=ended,
    )


def _check_pieces(record: Record) -> None:
    """Raises ValueError where it is not what a transcript leaves."""
    num_tokens = len(record.token_ids)
    if len(record.texts) not in (num_tokens, num_tokens + 1) or len(record.logprobs) not in (0, num_tokens):
        counts = f"{len(record.texts)} texts and {len(record.logprobs)} log-probabilities"
        raise ValueError(f"its record has {counts} for {num_tokens} tokens")
