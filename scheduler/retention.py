"""Ended requests that can be told again."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.stream import Stream

_STREAM_BYTES = 1024
_PIECE_BYTES = 128
_LOGPROB_BYTES = 104
"""What Python needs to hold a stream, each of its pieces and of their log-probabilities, besides what they
take on the wire."""


@dataclass(slots=True, eq=False)
class _Shelf:
    """One tenant's streams with the times at which they ended, oldest first."""

    kept: dict[RequestKey, tuple[Stream, float]] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, stream: Stream, ended_at: float) -> None:
        assert stream.key not in self.kept, "an id is used again only once it is forgotten"
        self.kept[stream.key] = stream, ended_at
        self.num_bytes += _size(stream)

    def take_oldest(self) -> Stream:
        stream, _ = self.kept.pop(next(iter(self.kept)))
        self.num_bytes -= _size(stream)
        return stream

    @property
    def oldest_ended_at(self) -> float:
        return next(iter(self.kept.values()))[1]


class Retention:
    """Keeps ended streams for a time; where they are too many bytes, who holds most gives up its oldest.

    So no tenant can push out what another one holds within an equal part. The newest stream stays in any
    case: its reader may not have got all of it yet.

    Args:
        max_age_s, max_bytes: of each, and of all together.
        on_drop: told of each stream that is kept no more.
    """

    def __init__(self, max_age_s: float, max_bytes: int, on_drop: Callable[[Stream], None]) -> None:
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._shelves: dict[str, _Shelf] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    def get(self, key: RequestKey) -> Stream | None:
        shelf = self._shelves.get(key.tenant)
        kept = shelf and shelf.kept.get(key)
        return kept[0] if kept else None

    def add(self, stream: Stream, ended_at: float) -> None:
        """Streams come in the order in which they ended."""
        self._shelves.setdefault(stream.key.tenant, _Shelf()).add(stream, ended_at)
        self._num_bytes += _size(stream)
        while self._num_bytes > self._max_bytes and len(self) > 1:
            self._drop_oldest(max(self._shelves, key=lambda tenant: self._bytes_before(tenant, stream)))

    def _bytes_before(self, tenant: str, newest: Stream) -> int:
        """What a tenant holds besides the newest stream of all."""
        shelf = self._shelves[tenant]
        return shelf.num_bytes - (_size(newest) if tenant == newest.key.tenant else 0)

    def take_others(self, tenants: Collection[str]) -> list[Stream]:
        """Keep those of these tenants alone; returns what others had, of which `on_drop` is not told."""
        gone = [self._shelves.pop(tenant) for tenant in tuple(self._shelves) if tenant not in tenants]
        self._num_bytes -= sum(shelf.num_bytes for shelf in gone)
        return [stream for shelf in gone for stream, _ in shelf.kept.values()]

    def expire(self, now: float) -> None:
        """Drop those whose time is over."""
        for tenant, shelf in tuple(self._shelves.items()):
            while shelf.kept and now - shelf.oldest_ended_at >= self._max_age_s:
                self._drop_oldest(tenant)

    def _drop_oldest(self, tenant: str) -> None:
        shelf = self._shelves[tenant]
        stream = shelf.take_oldest()
        if not shelf.kept:
            del self._shelves[tenant]
        self._num_bytes -= _size(stream)
        self._on_drop(stream)


def _size(stream: Stream) -> int:
    transcript = stream.transcript
    overhead = _STREAM_BYTES + _PIECE_BYTES * len(transcript) + _LOGPROB_BYTES * transcript.num_logprobs
    return overhead + transcript.num_bytes
