"""Commands on their way to the engine thread."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mlxd.scheduler.config import TenantConfig
from mlxd.scheduler.events import RequestKey, Submission


@dataclass(frozen=True, slots=True)
class Cancel:
    key: RequestKey
    outcome: str


@dataclass(frozen=True, slots=True)
class Pause:
    """The request gives up its row until an Unpause."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Unpause:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Ping:
    callback: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Drain:
    pass


@dataclass(frozen=True, slots=True)
class SetTenants:
    """These are the tenants from now on; requests of others end."""

    tenants: tuple[TenantConfig, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Submission | Cancel | Pause | Unpause | Ping | Drain | SetTenants | Stop


class Inbox:
    """A queue from any thread to the engine thread. Submissions are bounded; other commands never wait.

    Whoever takes again has seen to what it took before.
    """

    def __init__(self, max_submissions: int) -> None:
        self._max_submissions = max_submissions
        self._commands: deque[Command] = deque()
        self._num_submissions = 0
        self._oldest_at: float | None = None
        self._oldest_taken_at: float | None = None
        self._changed = threading.Condition()
        self._is_closed = False

    def submit(self, submission: Submission, now: float) -> bool:
        """False: it is full or closed. `now`: seconds, see `unseen_s`."""
        with self._changed:
            if self._is_closed or self._num_submissions >= self._max_submissions:
                return False
            self._num_submissions += 1
            self._oldest_at = now if self._oldest_at is None else self._oldest_at
            self._commands.append(submission)
            self._changed.notify()
            return True

    def send(self, command: Cancel | Pause | Unpause | Ping | Drain | SetTenants | Stop) -> bool:
        """False: it is closed."""
        with self._changed:
            if not self._is_closed:
                self._commands.append(command)
                self._changed.notify()
            return not self._is_closed

    def take(self, timeout_s: float | None) -> list[Command]:
        """All commands so far, in order; if none, the first that comes in time. None: no limit."""
        with self._changed:
            self._oldest_taken_at = None
            if timeout_s != 0:
                self._changed.wait_for(lambda: self._commands, timeout_s)
            return self._take_all()

    def close(self) -> list[Command]:
        """Refuse what comes from now on; returns what is left."""
        with self._changed:
            self._is_closed = True
            commands = self._take_all()
            self._oldest_taken_at = None
            return commands

    def unseen_s(self, now: float) -> float:
        """For how long the oldest submission has waited that was not seen to yet; 0 where there is none."""
        with self._changed:
            times = (self._oldest_taken_at, self._oldest_at)
        return now - min((time for time in times if time is not None), default=now)

    def _take_all(self) -> list[Command]:
        commands = list(self._commands)
        self._commands.clear()
        self._num_submissions = 0
        self._oldest_taken_at, self._oldest_at = self._oldest_at, None
        return commands
