"""The requests that have no end yet."""

from collections import Counter
from collections.abc import Iterator

from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.stream import Stream


class OpenStreams:
    """By key, counted by tenant; some of them have lost their reader."""

    def __init__(self) -> None:
        self._streams: dict[RequestKey, Stream] = {}
        self._num_of: Counter[str] = Counter()
        self._unread_since: dict[RequestKey, float] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(tuple(self._streams.values()))

    def __contains__(self, stream: Stream) -> bool:
        return self._streams.get(stream.key) is stream

    def get(self, key: RequestKey) -> Stream | None:
        return self._streams.get(key)

    def num_of(self, tenant: str) -> int:
        return self._num_of[tenant]

    def add(self, stream: Stream) -> None:
        assert stream.key not in self._streams, "an id is of one request at a time"
        self._streams[stream.key] = stream
        self._num_of[stream.key.tenant] += 1

    def remove(self, stream: Stream) -> None:
        del self._streams[stream.key]
        self._num_of[stream.key.tenant] -= 1
        self._unread_since.pop(stream.key, None)

    def lost_reader(self, stream: Stream, now: float) -> None:
        """To be called in the order of `now`; nothing for one that has ended."""
        if stream in self:
            self._unread_since[stream.key] = now

    def found_reader(self, stream: Stream) -> None:
        self._unread_since.pop(stream.key, None)

    def take_unread(self, until: float) -> list[RequestKey]:
        """Those without a reader since then or longer; each is told once."""
        keys: list[RequestKey] = []
        for key, since in self._unread_since.items():
            if since > until:
                break
            keys.append(key)
        for key in keys:
            del self._unread_since[key]
        return keys
