"""The requests of all clients, from a generate message to its one terminal message and the time after it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from mlxd.metrics.recorder import Recorder
from mlxd.scheduler import messages as wire
from mlxd.scheduler.answer import Answer
from mlxd.scheduler.beginnings import Beginnings
from mlxd.scheduler.config import Config
from mlxd.scheduler.endings import Endings
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import JournalError, MlxdError, ProtocolError, RejectedError
from mlxd.scheduler.events import Accepted, Event, Finished, Rejected, RequestKey, Tokens
from mlxd.scheduler.intake import Served, check_message, loading, with_seed
from mlxd.scheduler.journal import Journal
from mlxd.scheduler.journal_entries import Begun, Entry
from mlxd.scheduler.open_streams import OpenStreams
from mlxd.scheduler.pauses import Pauses
from mlxd.scheduler.readers import Readers
from mlxd.scheduler.recovery import Recovery
from mlxd.scheduler.replies import rejection_reply, reply_of
from mlxd.scheduler.retention import Retention
from mlxd.scheduler.session import Session
from mlxd.scheduler.stream import Stream, digest_of, stream_of
from mlxd.scheduler.transcript import Transcript

logger = logging.getLogger(__name__)


class Desk:
    """Runs on the asyncio thread.

    Attributes:
        served: None until the model is loaded.
        generated_tokens: by tenant, of all requests so far.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        recorder: Recorder,
        send: Callable[[Session, wire.ServerMessage], int],
        journal: Journal,
    ) -> None:
        """`send` must not block; it returns the frame's bytes, and may call back into `abandon`."""
        self.served: Served | None = None
        self.generated_tokens: Counter[str] = Counter()
        server = config.server
        self._grace_s = config.resume_grace_s
        self._engine = engine
        self._recorder = recorder
        self._send = send
        self._open = OpenStreams(Retention(server.retention_s, server.retention_bytes, self._give_up_paused))
        pauses = Pauses(engine, self._open, server.max_client_buffer_bytes)
        self._readers = Readers(send, self._open, pauses, server.max_client_buffer_bytes)
        self._journal = journal
        self._recovery = Recovery(journal, self._begin, config.scheduler.max_rows)
        self._endings = Endings(server, self._open, self._readers, journal, self._recovery.ended)
        self._beginnings = Beginnings(
            engine, self._open, on_refused=self._refuse_begun, on_unwanted=self._endings.end
        )

    @property
    def num_open(self) -> int:
        return len(self._open)

    def generate(self, session: Session, message: wire.Generate) -> None:
        """Answer with accepted, rejected or error, now or once the prompt is tokenised.

        The same message again is told the same request from its beginning.
        """
        assert session.tenant is not None, "only clients that said hello get here"
        key = RequestKey(session.tenant.name, message.id)
        try:
            if self.served is None:
                raise loading()
            check_message(message, self.served)
            stream = Stream(key, digest_of(message), not message.stream, Transcript(message.id))
            known = self._find(key)
            if known is not None and known.digest == stream.digest and not known.is_orphan:
                self._readers.attach(known, session, 0, message.credit)
                return
            if known is not None:
                text = f"another request has the id {message.id!r}, or had it lately"
                raise RejectedError("id_conflict", text, retryable=False)
            self._open.check_room(session.tenant)
        except MlxdError as error:
            self._send(session, self._refusal(key, error, about="generate"))
            return
        stream.attach(session, 0, message.credit)
        stream.message = with_seed(message) if self._journal.keeps else message
        stream.sent_at = asyncio.get_running_loop().time()
        self._open.add(stream)
        self._recovery.new(stream, stream.sent_at)

    def _find(self, key: RequestKey) -> Stream | None:
        return self._open.get(key) or self._endings.get(key)

    def _begin(self, stream: Stream, arrived_at: float) -> None:
        assert self.served is not None, "requests need a model"
        self._beginnings.begin(stream, self.served, arrived_at)

    def _refuse_begun(self, stream: Stream, error: MlxdError) -> None:
        self._refuse(stream, self._refusal(stream.key, error))

    def _refusal(self, key: RequestKey, error: MlxdError, about: str = "") -> wire.Rejected | wire.Error:
        if isinstance(error, RejectedError):
            self._recorder.rejected(key.tenant, error.reason)
        else:
            self._recorder.bad_message(error.code)
        return reply_of(error, key.request_id, about)

    def _refuse(self, stream: Stream, reply: wire.Rejected | wire.Error) -> None:
        """What an earlier start accepted is tried again where time may help."""
        may_help = isinstance(reply, wire.Rejected) and reply.reason in ("queue_full", "quota")
        if stream.is_accepted and may_help and self.served is not None:
            self._beginnings.begin_later(stream, self.served)
        else:
            self._endings.refuse(stream, reply)

    def restore(self) -> None:
        """Take over what the journal has: ended requests are kept, open ones begin again."""
        entries = self._journal.take_entries()
        for entry in entries:
            self._restore(entry)
        self._recovery.begin()
        if entries:
            logger.info("journal: entries=%d open=%d", len(entries), len(self._open))

    def _restore(self, entry: Entry) -> None:
        stream = stream_of(entry)
        if entry.record is not None:
            self._endings.keep(stream, self._journal.age_s(entry))
            return
        now = asyncio.get_running_loop().time()
        self._open.add(stream)
        self._open.lost_reader(stream, now)
        if entry.begun is Begun.ALONE:
            why = f"the daemon ended {Begun.ALONE} times with this request begun, the last time with no other"
            logger.error("given up tenant=%s id=%s: %s", *entry.key, why)
            self._endings.fail(stream, "engine_failed", why)
        else:
            self._recovery.add(stream, now, is_suspect=entry.begun is Begun.AGAIN)

    def resume(self, session: Session, message: wire.Resume) -> None:
        """Tell a request again; raises ProtocolError "gone" where the tenant has none of this id."""
        assert session.tenant is not None, "only clients that said hello get here"
        key = RequestKey(session.tenant.name, message.id)
        if self.served is None:
            self._send(session, self._refusal(key, loading()))
            return
        stream = self._find(key)
        if stream is None or stream.is_orphan:
            text = "there is no such request, or it ended too long ago"
            raise ProtocolError("gone", text, request_id=message.id)
        self._readers.attach(stream, session, message.seq, message.credit)

    def grant(self, session: Session, message: wire.Grant) -> None:
        """Let more bytes out, where this connection reads the request and gave credit before."""
        assert session.tenant is not None, "only clients that said hello get here"
        stream = self._find(RequestKey(session.tenant.name, message.id))
        if stream is not None:
            self._readers.grant(stream, session, message.bytes)

    def cancel(self, key: RequestKey, outcome: str = "cancelled") -> bool:
        """Whether there is such an open request; its terminal message comes when the engine let go of it."""
        stream = self._open.get(key)
        if stream is None:
            return False
        stream.end_as = outcome
        if self._recovery.take_back(stream):
            self._endings.end_unbegun(stream)
        elif stream.answer is not None:
            self._engine.cancel(key, outcome)
        return True

    def abandon(self, session: Session, outcome: str) -> None:
        """A client is gone ("client_gone"), or does not read what it was sent ("slow_client")."""
        for stream in self._read_by(session):
            if outcome == "client_gone":
                self._readers.lose(stream)
            else:
                self.cancel(stream.key, outcome)
        if not self._grace_s:
            self._give_up_unread()

    def _give_up_unread(self) -> None:
        until = asyncio.get_running_loop().time() - self._grace_s
        for key in self._open.take_unread(until):
            self.cancel(key, "client_gone")

    def has_room(self, session: Session) -> None:
        """A connection took all that it had left unread."""
        for stream in self._read_by(session):
            self._readers.tell(stream)

    def _read_by(self, session: Session) -> list[Stream]:
        return [stream for key in session.requests if (stream := self._find(key)) is not None]

    def deliver(self, events: Sequence[Event]) -> None:
        """Tell clients what the engine told."""
        for event in events:
            stream = self._open.get(event.key)
            if stream is not None and stream.answer is not None:
                self._take(stream, stream.answer, event)

    def _take(self, stream: Stream, answer: Answer, event: Event) -> None:
        match event:
            case Accepted() if not stream.is_accepted:
                assert stream.message is not None, "it is kept until the journal has it"
                told = partial(self._journaled, stream)
                self._journal.accept(stream.key, stream.digest, stream.message, told)
            case Tokens():
                self._take_tokens(stream, answer, event)
            case Finished():
                answer.finished(event)
                if stream.refusal is not None:
                    self._refuse(stream, stream.refusal)
                elif stream.is_accepted:
                    self._endings.end(stream)
            case Rejected():
                self._refuse(stream, rejection_reply(event))

    def _journaled(self, stream: Stream, failure: JournalError | None) -> None:
        """`accepted` may leave; tokens, and even the end, may be here already."""
        if stream not in self._open:
            return
        has_ended = stream.transcript.terminal is not None
        if failure is None:
            stream.is_accepted = True
            stream.message = None
            self._readers.reply(stream, wire.Accepted(id=stream.key.request_id))
            if has_ended:
                self._endings.end(stream)
            else:
                self._readers.tell(stream)
            return
        stream.refusal = self._refusal(stream.key, failure)
        if has_ended:
            self._refuse(stream, stream.refusal)
        else:
            self.cancel(stream.key, "failed")

    def _take_tokens(self, stream: Stream, answer: Answer, event: Tokens) -> None:
        if stream.state != "paused":
            stream.state = "running"
        self.generated_tokens[event.key.tenant] += len(event.token_ids)
        was_ended = answer.ended_by
        answer.tokens(event)
        if answer.ended_by and not was_ended:
            self._engine.cancel(event.key, answer.ended_by)
        self._readers.tell(stream)

    def _give_up_paused(self, stream: Stream) -> None:
        self.cancel(stream.key, "slow_client")

    def give_up(self, error: MlxdError) -> None:
        """End what the engine has not ended, and will not end any more."""
        self._recovery.stop()
        self._endings.give_up(error)

    def tell_unwritten(self) -> None:
        """Tell the ends that wait for a journal which does not answer any more."""
        self._endings.tell_unwritten()

    def update(self, tenants: Collection[str]) -> None:
        """What requests of other tenants answered is told to nobody any more, whoever has the name next."""
        self._journal.keep(tenants)
        for stream in self._open:
            if stream.key.tenant not in tenants:
                stream.is_orphan = True
                self.cancel(stream.key, "revoked")
        self._endings.forget_others(tenants)

    def expire(self) -> None:
        """Give up what nobody came back for, or read, in time; to be called now and then."""
        now = asyncio.get_running_loop().time()
        self._give_up_unread()
        self._open.paused.expire(now)
        self._endings.expire(now)

    def keep_alive(self, session: Session, quiet_since: float) -> None:
        """Show that requests which got nothing since then are still known."""
        for stream in self._read_by(session):
            self._readers.keep_alive(stream, quiet_since)

    def close(self) -> None:
        """Tokenise nothing more."""
        self._beginnings.close()
