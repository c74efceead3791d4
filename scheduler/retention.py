"""Requests that are kept for their readers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.stream import Stream

_STREAM_BYTES = 1024
_PIECE_BYTES = 128
_LOGPROB_BYTES = 104
"""What Python needs to hold a stream, each of its pieces and of their log-probabilities, besides what they
take on the wire."""


class _Kept(NamedTuple):
    stream: Stream
    since: float
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Shelf:
    """One tenant's streams, oldest first."""

    kept: dict[RequestKey, _Kept] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, kept: _Kept) -> None:
        assert kept.stream.key not in self.kept, "an id is used again only once it is forgotten"
        self.kept[kept.stream.key] = kept
        self.num_bytes += kept.num_bytes

    def take(self, key: RequestKey) -> _Kept:
        kept = self.kept.pop(key)
        self.num_bytes -= kept.num_bytes
        return kept

    @property
    def oldest(self) -> _Kept:
        return next(iter(self.kept.values()))


class Retention:
    """Keeps streams for a time; where they are too many bytes, who holds most gives up its oldest.

    So no tenant can push out what another one holds within an equal part. The newest stream stays in any
    case: its reader may not have got all of it yet.

    Args:
        max_age_s, max_bytes: of each, and of all together as they are when they come.
        on_drop: told of each stream that is given up.
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
        return kept.stream if kept else None

    def add(self, stream: Stream, since: float) -> None:
        """Streams come in the order of `since`."""
        newest = _Kept(stream, since, _size(stream))
        self._shelves.setdefault(stream.key.tenant, _Shelf()).add(newest)
        self._num_bytes += newest.num_bytes
        while self._num_bytes > self._max_bytes and len(self) > 1:
            self._drop_oldest(max(self._shelves, key=lambda tenant: self._bytes_before(tenant, newest)))

    def _bytes_before(self, tenant: str, newest: _Kept) -> int:
        """What a tenant holds besides the newest stream of all."""
        is_own = tenant == newest.stream.key.tenant
        return self._shelves[tenant].num_bytes - (newest.num_bytes if is_own else 0)

    def discard(self, stream: Stream) -> None:
        """Keep it no more, if it was kept; nobody is told."""
        if self.get(stream.key) is stream:
            self._take(stream.key)

    def take_others(self, tenants: Collection[str]) -> list[Stream]:
        """Keep those of these tenants alone; returns what others had, of which `on_drop` is not told."""
        gone = [self._shelves.pop(tenant) for tenant in tuple(self._shelves) if tenant not in tenants]
        self._num_bytes -= sum(shelf.num_bytes for shelf in gone)
        return [kept.stream for shelf in gone for kept in shelf.kept.values()]

    def expire(self, now: float) -> None:
        """Drop those whose time is over."""
        for tenant, shelf in tuple(self._shelves.items()):
            while shelf.kept and now - shelf.oldest.since >= self._max_age_s:
                self._drop_oldest(tenant)

    def _drop_oldest(self, tenant: str) -> None:
        stream = self._shelves[tenant].oldest.stream
        self._take(stream.key)
        self._on_drop(stream)

    def _take(self, key: RequestKey) -> None:
        shelf = self._shelves[key.tenant]
        self._num_bytes -= shelf.take(key).num_bytes
        if not shelf.kept:
            del self._shelves[key.tenant]


def _size(stream: Stream) -> int:
    transcript = stream.transcript
    overhead = _STREAM_BYTES + _PIECE_BYTES * len(transcript) + _LOGPROB_BYTES * transcript.num_logprobs
    return overhead + transcript.num_bytes
