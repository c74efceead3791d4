"""The requests of all clients, from a generate message to its one terminal message and the time after it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from mlxd.batching.runner import RunnerInfo
from mlxd.batching.text import Tokenizer
from mlxd.metrics.recorder import Recorder
from mlxd.scheduler import messages as wire
from mlxd.scheduler.answer import Answer
from mlxd.scheduler.config import ServerConfig, TenantConfig
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import InvalidParamError, MlxdError, ProtocolError, RejectedError
from mlxd.scheduler.events import Accepted, Event, Finished, Rejected, RequestKey, Submission, Tokens
from mlxd.scheduler.intake import Intake, check_length, check_request
from mlxd.scheduler.retention import Retention
from mlxd.scheduler.session import Session
from mlxd.scheduler.stream import Stream, digest_of
from mlxd.scheduler.transcript import Transcript

RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class Served:
    """What there is once the model is loaded."""

    info: RunnerInfo
    tokenizer: Tokenizer


class Desk:
    """Runs on the asyncio thread.

    Attributes:
        served: None until the model is loaded.
        generated_tokens: by tenant, of all requests so far.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine,
        recorder: Recorder,
        send: Callable[[Session, wire.ServerMessage], int],
    ) -> None:
        """`send` must not block; it returns the frame's bytes, and may call back into `abandon`."""
        self.served: Served | None = None
        self.generated_tokens: Counter[str] = Counter()
        self._config = config
        self._engine = engine
        self._recorder = recorder
        self._send = send
        self._open: dict[RequestKey, Stream] = {}
        self._num_open: Counter[str] = Counter()
        self._detached: dict[RequestKey, float] = {}
        self._kept = Retention(config.retention_s, config.retention_bytes, self._forget)
        self._intake = Intake()
        self._beginnings: set[asyncio.Task[None]] = set()

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
            served = self._check(message)
            stream = Stream(key, digest_of(message), not message.stream, Transcript(message.id))
            known = self._find(key)
            if known is not None and known.digest == stream.digest:
                self._attach(known, session, 0, message.credit)
                return
            self._check_room(session.tenant, known is not None, message.id)
        except MlxdError as error:
            self._send(session, self._refusal(key, error))
            return
        stream.attach(session, 0, message.credit)
        self._begin(stream, message, served)

    def _find(self, key: RequestKey) -> Stream | None:
        return self._open.get(key) or self._kept.get(key)

    def _check(self, message: wire.Generate) -> Served:
        """Raises RejectedError, InvalidParamError or InvalidPromptError."""
        if self.served is None:
            raise RejectedError("loading", "the model is loading", retryable=True, retry_after_ms=RETRY_MS)
        check_request(message, self.served.info.vocab_size)
        check_length(message, self.served.tokenizer, self.served.info.memory.max_model_len)
        return self.served

    def _check_room(self, tenant: TenantConfig, is_known: bool, request_id: str) -> None:
        """Raises RejectedError. The engine judges queues exactly; this bounds what it has not seen yet."""
        if is_known:
            message = f"another request has the id {request_id!r}, or had it lately"
            raise RejectedError("id_conflict", message, retryable=False)
        limit = tenant.max_running + tenant.max_waiting
        if self._num_open[tenant.name] >= limit:
            message = f"tenant {tenant.name!r} has {limit} requests open already"
            raise RejectedError("queue_full", message, retryable=True, retry_after_ms=RETRY_MS)

    def _begin(self, stream: Stream, message: wire.Generate, served: Served) -> None:
        now = asyncio.get_running_loop().time()
        stream.sent_at = now
        self._open[stream.key] = stream
        self._num_open[stream.key.tenant] += 1
        beginning = asyncio.create_task(self._submit(stream, message, served, now))
        self._beginnings.add(beginning)
        beginning.add_done_callback(self._beginnings.discard)

    async def _submit(
        self, stream: Stream, message: wire.Generate, served: Served, arrived_at: float
    ) -> None:
        tokenizer, sampling = served.tokenizer, message.sampling
        try:
            ids = await self._intake.prompt_ids(stream.key.tenant, message, tokenizer)
            if stream.end_as == "client_gone" and stream.session is None:
                self._close(stream)
                return
            eos = frozenset[int]() if sampling.ignore_eos else served.info.eos_token_ids
            ending = eos.union(sampling.stop_token_ids)
            text = tokenizer.stream(sampling.stop)
            stream.answer = Answer(stream.transcript, message.id, len(ids), text, ending)
            self._engine.submit(Submission(stream.key, ids, sampling, arrived_at))
        except MlxdError as error:
            self._refuse(stream, self._refusal(stream.key, error))
            return
        if stream.end_as:
            self._engine.cancel(stream.key, stream.end_as)

    def _refusal(self, key: RequestKey, error: MlxdError) -> wire.Rejected | wire.Error:
        if isinstance(error, RejectedError):
            self._recorder.rejected(key.tenant, error.reason)
            return wire.Rejected(
                id=key.request_id,
                reason=error.reason,
                message=str(error),
                retryable=error.retryable,
                retry_after_ms=error.retry_after_ms,
            )
        self._recorder.bad_message(error.code)
        field = error.field if isinstance(error, InvalidParamError) else UNSET
        return wire.Error(id=key.request_id, code=error.code, message=str(error), field=field)

    def _refuse(self, stream: Stream, reply: wire.Rejected | wire.Error) -> None:
        """In place of accepted; the id is free again."""
        session = stream.session
        self._close(stream)
        stream.detach()
        if session is not None:
            self._send(session, reply)

    def resume(self, session: Session, message: wire.Resume) -> None:
        """Tell a request again; raises ProtocolError "gone" where the tenant has none of this id."""
        assert session.tenant is not None, "only clients that said hello get here"
        key = RequestKey(session.tenant.name, message.id)
        if self.served is None:
            loading = RejectedError(
                "loading", "the model is loading", retryable=True, retry_after_ms=RETRY_MS
            )
            self._send(session, self._refusal(key, loading))
            return
        stream = self._find(key)
        if stream is None:
            text = "there is no such request, or it ended too long ago"
            raise ProtocolError("gone", text, request_id=message.id)
        self._attach(stream, session, message.seq, message.credit)

    def _attach(self, stream: Stream, session: Session, seq: int, credit: int | msgspec.UnsetType) -> None:
        earlier = stream.session
        if earlier is not None and earlier is not session:
            stream.detach()
            text = "another connection reads this request now"
            self._send(earlier, wire.Error(id=stream.key.request_id, code="taken_over", message=text))
        self._detached.pop(stream.key, None)
        stream.attach(session, seq, credit)
        if stream.is_accepted:
            self._reply(stream, wire.Accepted(id=stream.key.request_id))
            self._tell(stream)

    def grant(self, session: Session, message: wire.Grant) -> None:
        """Let more bytes out, where this connection reads the request and gave credit before."""
        assert session.tenant is not None, "only clients that said hello get here"
        stream = self._find(RequestKey(session.tenant.name, message.id))
        if stream is not None and stream.session is session and stream.credit is not None:
            stream.credit = min(stream.credit + message.bytes, wire.MAX_CREDIT)
            self._tell(stream)

    def cancel(self, key: RequestKey, outcome: str = "cancelled") -> bool:
        """Whether there is such an open request; its terminal message comes when the engine let go of it."""
        stream = self._open.get(key)
        if stream is None:
            return False
        stream.end_as = outcome
        if stream.answer is not None:
            self._engine.cancel(key, outcome)
        return True

    def abandon(self, session: Session, outcome: str) -> None:
        """A client is gone ("client_gone"), or does not read what it was sent ("slow_client")."""
        for key in tuple(session.requests):
            stream = self._find(key)
            assert stream is not None, "what is kept no more has no reader"
            if outcome == "client_gone":
                stream.detach()
                if key in self._open:
                    self._detached[key] = asyncio.get_running_loop().time()
            else:
                self.cancel(key, outcome)
        if not self._config.resume_grace_s:
            self._give_up_detached(float("inf"))

    def _give_up_detached(self, detached_before: float) -> None:
        """End the requests that have had no reader since then."""
        while self._detached:
            key, since = next(iter(self._detached.items()))
            if since >= detached_before:
                return
            del self._detached[key]
            self.cancel(key, "client_gone")

    def has_room(self, session: Session) -> None:
        """A connection took all that it had left unread."""
        for key in tuple(session.requests):
            stream = self._find(key)
            assert stream is not None, "what is kept no more has no reader"
            self._tell(stream)

    def deliver(self, events: Sequence[Event]) -> None:
        """Tell clients what the engine told."""
        for event in events:
            stream = self._open.get(event.key)
            if stream is not None and stream.answer is not None:
                self._take(stream, stream.answer, event)

    def _take(self, stream: Stream, answer: Answer, event: Event) -> None:
        match event:
            case Accepted():
                self._accept(stream)
            case Tokens():
                self._take_tokens(stream, answer, event)
            case Finished():
                answer.finished(event)
                self._end(stream, is_wanted=event.outcome != "client_gone" or stream.session is not None)
            case Rejected():
                reply = wire.Rejected(
                    id=event.key.request_id,
                    reason=event.reason,
                    message=event.message,
                    retryable=event.retryable,
                    retry_after_ms=event.retry_after_ms,
                )
                self._refuse(stream, reply)

    def _accept(self, stream: Stream) -> None:
        stream.is_accepted = True
        self._reply(stream, wire.Accepted(id=stream.key.request_id))
        self._tell(stream)

    def _take_tokens(self, stream: Stream, answer: Answer, event: Tokens) -> None:
        stream.state = "running"
        self.generated_tokens[event.key.tenant] += len(event.token_ids)
        was_ended = answer.ended_by
        answer.tokens(event)
        if answer.ended_by and not was_ended:
            self._engine.cancel(event.key, answer.ended_by)
        self._tell(stream)
        if stream.unread_bytes > self._config.max_client_buffer_bytes and not stream.end_as:
            self.cancel(event.key, "slow_client")

    def _end(self, stream: Stream, *, is_wanted: bool) -> None:
        self._close(stream)
        if is_wanted:
            self._kept.add(stream, asyncio.get_running_loop().time())
            self._tell(stream)

    def _tell(self, stream: Stream) -> None:
        """Send what there is, as far as the reader has room and gave credit."""
        while (session := stream.session) is not None and stream.is_accepted:
            message = stream.next_message(has_room=not session.outbox)
            if message is None:
                return
            if not isinstance(message, wire.Chunk):
                stream.detach()
            stream.sent_at = asyncio.get_running_loop().time()
            stream.sent(message, self._send(session, message))

    def _reply(self, stream: Stream, message: wire.ServerMessage) -> None:
        if stream.session is not None:
            stream.sent_at = asyncio.get_running_loop().time()
            self._send(stream.session, message)

    def _close(self, stream: Stream) -> None:
        del self._open[stream.key]
        self._num_open[stream.key.tenant] -= 1
        self._detached.pop(stream.key, None)

    def _forget(self, stream: Stream) -> None:
        session = stream.session
        if session is not None:
            stream.detach()
            text = "the client did not read its messages"
            self._send(session, wire.Error(id=stream.key.request_id, code="slow_client", message=text))

    def give_up(self) -> None:
        """End every open request for an engine that does not answer any more."""
        for stream in tuple(self._open.values()):
            text = "the engine does not answer"
            stream.transcript.terminal = wire.Error(
                id=stream.key.request_id, code="engine_failed", message=text
            )
            stream.is_accepted = True
            self._end(stream, is_wanted=True)

    def expire(self) -> None:
        """Give up what nobody came back for in time; to be called now and then."""
        now = asyncio.get_running_loop().time()
        self._give_up_detached(now - self._config.resume_grace_s)
        self._kept.expire(now)

    def keep_alive(self, session: Session, quiet_since: float) -> None:
        """Show that requests which got nothing since then are still known."""
        for key in tuple(session.requests):
            stream = self._find(key)
            if stream is not None and stream.sent_at <= quiet_since:
                self._reply(stream, wire.KeepAlive(id=key.request_id, state=stream.state))

    def close(self) -> None:
        """Tokenise nothing more."""
        self._intake.close()
