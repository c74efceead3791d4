"""The requests that have no end yet."""

from collections import Counter
from collections.abc import Iterator

from mlxd.scheduler.config import TenantConfig
from mlxd.scheduler.errors import RejectedError
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.intake import RETRY_MS
from mlxd.scheduler.retention import Retention
from mlxd.scheduler.stream import Stream


class OpenStreams:
    """By key, counted by tenant; some of them have lost their reader.

    Attributes:
        paused: those that wait for their reader.
    """

    def __init__(self, paused: Retention) -> None:
        self.paused = paused
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

    def check_room(self, tenant: TenantConfig) -> None:
        """Raises RejectedError. The engine judges queues exactly; this bounds what it has not seen yet."""
        limit = tenant.max_running + tenant.max_waiting
        if self._num_of[tenant.name] >= limit:
            message = f"tenant {tenant.name!r} has {limit} requests open already"
            raise RejectedError("queue_full", message, retryable=True, retry_after_ms=RETRY_MS)

    def add(self, stream: Stream) -> None:
        assert stream.key not in self._streams, "an id is of one request at a time"
        self._streams[stream.key] = stream
        self._num_of[stream.key.tenant] += 1

    def remove(self, stream: Stream) -> None:
        del self._streams[stream.key]
        self._num_of[stream.key.tenant] -= 1
        self._unread_since.pop(stream.key, None)
        self.paused.discard(stream)

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
