"""What a process takes over from the one before it."""

import asyncio
import logging

from mlxd.scheduler.endings import Endings
from mlxd.scheduler.journal import Journal
from mlxd.scheduler.journal_entries import Begun, Entry
from mlxd.scheduler.open_streams import OpenStreams
from mlxd.scheduler.recovery import Recovery
from mlxd.scheduler.stream import stream_of

logger = logging.getLogger(__name__)


def take_over(journal: Journal, streams: OpenStreams, recovery: Recovery, endings: Endings) -> None:
    """Ended requests of the journal are kept, open ones begin again but for one that ended the daemon."""
    entries = journal.take_entries()
    for entry in entries:
        if entry.record is not None:
            endings.keep(stream_of(entry), journal.age_s(entry))
        else:
            _reopen(entry, streams, recovery, endings)
    recovery.begin()
    if entries:
        logger.info("journal: entries=%d open=%d", len(entries), len(streams))


def _reopen(entry: Entry, streams: OpenStreams, recovery: Recovery, endings: Endings) -> None:
    stream = stream_of(entry)
    stream.arrived_at = asyncio.get_running_loop().time()
    streams.add(stream)
    streams.lost_reader(stream, stream.arrived_at)
    if entry.begun is Begun.ALONE:
        why = f"the daemon ended {Begun.ALONE} times with this request begun, the last time with no other"
        logger.error("given up tenant=%s id=%s: %s", *entry.key, why)
        endings.fail(stream, "engine_failed", why)
    else:
        recovery.add(stream, is_suspect=entry.begun is Begun.AGAIN)
