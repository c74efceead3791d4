"""One request as its client sees it."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec
from msgspec import UNSET

from mlxd.scheduler import messages as wire
from mlxd.scheduler.answer import Answer
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.journal_entries import Entry
from mlxd.scheduler.session import Session
from mlxd.scheduler.transcript import Transcript


def digest_of(message: wire.Generate) -> bytes:
    """What two messages share that ask for the same answer."""
    body = msgspec.msgpack.encode(msgspec.structs.replace(message, credit=UNSET))
    return blake2b(body, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Stream:
    """What a request answered, who reads it and how far.

    Attributes:
        digest: of the message that made it.
        is_whole: all of the answer comes in `done`.
        is_accepted: `accepted` may be told, and what follows it.
        is_ended: its end may be told.
        is_orphan: its tenant is no more; nobody but its reader is told of it.
        is_alone: nothing else runs before it has ended.
        answer: None until its prompt is tokenised and the engine has it.
        session: its reader; None where that went away, or has got all.
        arrived_at: when it was sent, or taken over from an earlier process, on the loop's clock.
        state: what it does, for its reader.
        seq: pieces that were sent to the reader.
        credit: bytes of chunks that the reader takes for now; None: no limit.
        end_as: as what it is to end, where somebody wants it to.
        message: what it was made from; None once nobody needs it any more.
        refusal: what to tell in place of an answer.
    """

    key: RequestKey
    digest: bytes
    is_whole: bool
    transcript: Transcript
    is_accepted: bool = False
    is_ended: bool = False
    is_orphan: bool = False
    is_alone: bool = False
    arrived_at: float = 0.0
    state: Literal["waiting", "running", "paused"] = "waiting"
    message: wire.Generate | None = None
    answer: Answer | None = None
    session: Session | None = None
    seq: int = 0
    credit: int | None = None
    sent_at: float = 0.0
    end_as: str = ""
    refusal: wire.Rejected | wire.Error | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody may ever read it."""
        return self.session is not None or self.end_as != "client_gone"

    @property
    def deadline(self) -> float | None:
        """On the loop's clock; told as long as it has its message."""
        if self.message is None or self.message.deadline_ms is UNSET:
            return None
        return self.arrived_at + self.message.deadline_ms / 1000

    @property
    def unread_bytes(self) -> int:
        """About what its reader left unread of what it may be sent; none where it takes the answer whole."""
        if self.session is None or self.is_whole or not self.is_accepted:
            return 0
        return self.transcript.bytes_from(self.seq)

    def attach(self, session: Session, seq: int, credit: int | msgspec.UnsetType) -> None:
        """Tell `session` from piece `seq` on."""
        self.session = session
        self.seq = seq
        self.credit = None if credit is UNSET else credit
        session.requests.add(self.key)

    def detach(self) -> None:
        if self.session is not None:
            self.session.requests.discard(self.key)
            self.session = None

    def next_message(self, max_chunk_bytes: int) -> wire.Chunk | wire.Terminal | None:
        """What its reader is to be sent now.

        An end that is no `done` does not wait for room or credit: it may come before the last text.

        Args:
            max_chunk_bytes: 0 where the reader's connection has no room.
        """
        terminal = self.transcript.terminal if self.is_ended else None
        if self.is_whole:
            return self.transcript.whole(terminal) if isinstance(terminal, wire.Done) else terminal
        limit = max_chunk_bytes if self.credit is None else min(max_chunk_bytes, self.credit)
        chunk = self.transcript.chunk(self.seq, limit) if limit > 0 else None
        if chunk is not None:
            return chunk
        is_told = self.seq >= len(self.transcript)
        return terminal if is_told or not isinstance(terminal, wire.Done) else None

    def sent(self, message: wire.Chunk | wire.Terminal, num_bytes: int) -> None:
        """Note what went out."""
        if isinstance(message, wire.Chunk):
            self.seq += max(1, len(message.token_ids))
            if self.credit is not None:
                self.credit -= num_bytes


def stream_of(entry: Entry) -> Stream:
    """What an earlier process accepted, without a reader."""
    request_id, record = entry.key.request_id, entry.record
    transcript = Transcript(request_id) if record is None else Transcript.restored(request_id, record)
    stream = Stream(entry.key, entry.digest, entry.is_whole, transcript, is_accepted=True)
    stream.message = entry.message
    return stream
