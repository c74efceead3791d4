"""Ended requests that can be told again."""

from collections.abc import Callable

from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.stream import Stream

_STREAM_BYTES = 1024
_PIECE_BYTES = 128
_LOGPROB_BYTES = 104
"""What Python needs to hold a stream, each of its pieces and of their log-probabilities, besides what they
take on the wire."""


class Retention:
    """Keeps ended streams for a time, the newest of them where they are too many bytes, and always the last.

    Args:
        max_age_s, max_bytes: of each, and of all together.
        on_drop: told of each stream that is kept no more.
    """

    def __init__(self, max_age_s: float, max_bytes: int, on_drop: Callable[[Stream], None]) -> None:
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._kept: dict[RequestKey, tuple[Stream, float]] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: RequestKey) -> Stream | None:
        kept = self._kept.get(key)
        return kept and kept[0]

    def add(self, stream: Stream, ended_at: float) -> None:
        """Streams come in the order in which they ended."""
        assert stream.key not in self._kept, "an id is used again only once it is forgotten"
        self._kept[stream.key] = stream, ended_at
        self._num_bytes += _size(stream)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._drop_oldest()

    def expire(self, now: float) -> None:
        """Drop those whose time is over."""
        while self._kept:
            _, ended_at = next(iter(self._kept.values()))
            if now - ended_at < self._max_age_s:
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        stream, _ = self._kept.pop(next(iter(self._kept)))
        self._num_bytes -= _size(stream)
        self._on_drop(stream)


def _size(stream: Stream) -> int:
    transcript = stream.transcript
    overhead = _STREAM_BYTES + _PIECE_BYTES * len(transcript) + _LOGPROB_BYTES * transcript.num_logprobs
    return overhead + transcript.num_bytes
