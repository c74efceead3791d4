"""What the engine and the server tell about themselves as they work."""

from typing import Protocol

from mlxd.metrics.stats import EngineSnapshot, RequestStats, StepStats


class Recorder(Protocol):
    """Receives facts; never blocks, never raises, costs microseconds.

    `accepted`, `request`, `step` and `snapshot` come from the engine thread. The first three count from the
    next `snapshot` on, so that what is counted and what the snapshot says is open are of one moment. So the
    engine tells a snapshot after every step, and before it blocks if requests came, left or changed since.
    The other methods may be called from any thread and count at once.
    """

    def accepted(self, tenant: str) -> None:
        """A request entered; snapshots have it as waiting, running or paused until `request` ends it."""
        ...

    def request(self, stats: RequestStats) -> None:
        """An accepted request ended; once a request."""
        ...

    def step(self, stats: StepStats) -> None: ...

    def snapshot(self, snapshot: EngineSnapshot) -> None: ...

    def rejected(self, tenant: str, reason: str) -> None:
        """A request was refused before it was accepted; `reason` is a word of ours."""
        ...

    def bad_message(self, reason: str) -> None:
        """A frame broke a rule of the protocol; `reason` is its error code."""
        ...

    def message(self, direction: str, kind: str) -> None:
        """A well-formed message passed; `direction` is "in" or "out"."""
        ...

    def clients(self, connected: int, buffered_bytes: int) -> None:
        """Clients there are now, and bytes waiting to be sent to them all."""
        ...

    def journal(self, written: int, failed: int, seconds: float) -> None:
        """The journal wrote what waited: that many changes, and that many it could not."""
        ...


class NullRecorder:
    """Forgets everything."""

    def accepted(self, tenant: str) -> None:
        pass

    def request(self, stats: RequestStats) -> None:
        pass

    def step(self, stats: StepStats) -> None:
        pass

    def snapshot(self, snapshot: EngineSnapshot) -> None:
        pass

    def rejected(self, tenant: str, reason: str) -> None:
        pass

    def bad_message(self, reason: str) -> None:
        pass

    def message(self, direction: str, kind: str) -> None:
        pass

    def clients(self, connected: int, buffered_bytes: int) -> None:
        pass

    def journal(self, written: int, failed: int, seconds: float) -> None:
        pass
