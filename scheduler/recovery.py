"""Which requests may begin, after processes that ended with requests open."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.journal import Journal
from mlxd.scheduler.journal_entries import Begun
from mlxd.scheduler.stream import Stream

logger = logging.getLogger(__name__)

RETRY_S = 1.0


class Recovery:
    """Finds a request that ends the process each time, and lets it take no other along.

    New requests begin at once. Those that an earlier process left open begin again as many at a time as there
    are rows, in equal parts for their tenants, at least one each, and noted in the journal before. Where the
    process ends again, those that were so begun are suspects: each begins alone, noted before, and nothing
    else until it has ended. So whoever was alone when a process ended had nobody beside it, and no other one
    is ever blamed.

    Runs on the asyncio thread.
    """

    def __init__(self, journal: Journal, begin: Callable[[Stream], None], num_rows: int) -> None:
        self._journal = journal
        self._begin = begin
        self._num_rows = num_rows
        self._held: set[Stream] = set()
        self._suspects: deque[Stream] = deque()
        self._earlier: dict[str, deque[Stream]] = {}
        self._new: deque[Stream] = deque()
        self._again: set[Stream] = set()
        self._num_again: Counter[str] = Counter()
        self._alone: Stream | None = None

    def new(self, stream: Stream) -> None:
        """A client sent it."""
        if self._alone is None:
            self._begin(stream)
        else:
            self._held.add(stream)
            self._new.append(stream)

    def add(self, stream: Stream, *, is_suspect: bool) -> None:
        """An earlier process left it open; they come in the order in which they were accepted."""
        self._held.add(stream)
        if is_suspect:
            self._suspects.append(stream)
        else:
            self._earlier.setdefault(stream.key.tenant, deque()).append(stream)

    def begin(self) -> None:
        """All of an earlier process are here."""
        if self._suspects:
            logger.warning("two processes were killed: requests that both had begun run one at a time now")
        self._go_on()

    def ended(self, stream: Stream) -> None:
        """A request has its end."""
        if stream in self._again:
            self._again.remove(stream)
            self._num_again[stream.key.tenant] -= 1
        if stream is self._alone:
            self._alone = None
            # Its end may have found no room in the journal.
            self._journal.start(stream.key, Begun.AGAIN, _nobody_waits)
        self._go_on()

    def take_back(self, stream: Stream) -> bool:
        """Whether it was not begun, and now never is; it still has to be told as ended."""
        is_held = stream in self._held
        self._held.discard(stream)
        return is_held

    def stop(self) -> None:
        """Begin nothing more of what waits; its streams are somebody else's to end."""
        self._held.clear()
        self._alone = None

    def _go_on(self) -> None:
        if self._alone is not None:
            return
        self._alone = self._next(self._suspects)
        if self._alone is not None:
            self._alone.is_alone = True
            self._note(self._alone, Begun.ALONE)
            return
        while (stream := self._next(self._new)) is not None:
            self._let_go(stream)
        for tenant, waiting in tuple(self._earlier.items()):
            self._begin_again(tenant, waiting)
            if not waiting:
                del self._earlier[tenant]

    def _begin_again(self, tenant: str, waiting: deque[Stream]) -> None:
        """As many as the tenant may have at a time."""
        num_tenants = len(self._earlier.keys() | (+self._num_again).keys())
        part = max(1, self._num_rows // num_tenants)
        while self._num_again[tenant] < part and (stream := self._next(waiting)) is not None:
            self._again.add(stream)
            self._num_again[tenant] += 1
            self._note(stream, Begun.AGAIN)

    def _next(self, waiting: deque[Stream]) -> Stream | None:
        """The first that was not taken back."""
        while waiting:
            stream = waiting.popleft()
            if stream in self._held:
                return stream
        return None

    def _note(self, stream: Stream, begun: Begun) -> None:
        self._journal.start(stream.key, begun, partial(self._noted, stream, begun))

    def _noted(self, stream: Stream, begun: Begun, failure: JournalError | None) -> None:
        if stream not in self._held:
            return
        if failure is None:
            self._let_go(stream)
        else:
            asyncio.get_running_loop().call_later(RETRY_S, self._note, stream, begun)

    def _let_go(self, stream: Stream) -> None:
        self._held.remove(stream)
        self._begin(stream)


def _nobody_waits(failure: JournalError | None) -> None:
    pass
