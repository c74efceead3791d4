"""The open requests of all clients, from a generate message to its one terminal message."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET

from mlxd.batching.runner import RunnerInfo
from mlxd.batching.text import Tokenizer
from mlxd.metrics.recorder import Recorder
from mlxd.scheduler import messages as wire
from mlxd.scheduler.answer import Answer
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import InvalidParamError, MlxdError, RejectedError
from mlxd.scheduler.events import Accepted, Event, Finished, Rejected, RequestKey, Submission, Tokens
from mlxd.scheduler.intake import check_length, check_request, is_long, prompt_ids
from mlxd.scheduler.session import Session

RETRY_MS = 1_000
MAX_TOKENISING = 2
"""Long prompts of one tenant that are tokenised at a time."""


@dataclass(frozen=True, slots=True)
class Served:
    """What there is once the model is loaded."""

    info: RunnerInfo
    tokenizer: Tokenizer


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """`answer`: None until its prompt is tokenised and the engine has it; `end_as`: how to end it then."""

    key: RequestKey
    session: Session
    arrived_at: float
    sent_at: float
    state: Literal["waiting", "running"] = "waiting"
    answer: Answer | None = None
    end_as: str = ""


class Desk:
    """Runs on the asyncio thread. `send` must not block; it may call back into `abandon`.

    Attributes:
        served: None until the model is loaded.
        generated_tokens: by tenant, of all requests so far.
    """

    def __init__(
        self, engine: Engine, recorder: Recorder, send: Callable[[Session, wire.ServerMessage], None]
    ) -> None:
        self.served: Served | None = None
        self._engine = engine
        self._recorder = recorder
        self._send = send
        self._open: dict[RequestKey, _OpenRequest] = {}
        self._num_open: Counter[str] = Counter()
        self.generated_tokens: Counter[str] = Counter()
        self._tokenisers = ThreadPoolExecutor(MAX_TOKENISING + 1, "mlxd-tokenise")
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._beginnings: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def generate(self, session: Session, message: wire.Generate) -> None:
        """Answer with accepted, rejected or error, now or once the prompt is tokenised."""
        assert session.tenant is not None, "only clients that said hello get here"
        key = RequestKey(session.tenant.name, message.id)
        try:
            served = self._check_room(session, key)
            check_request(message, served.info.vocab_size)
            check_length(message, served.tokenizer, served.info.memory.max_model_len)
        except MlxdError as error:
            self._refuse(session, key, error)
            return
        now = asyncio.get_running_loop().time()
        request = _OpenRequest(key, session, arrived_at=now, sent_at=now)
        self._open[key] = request
        self._num_open[key.tenant] += 1
        session.requests.add(key)
        beginning = asyncio.create_task(self._begin(request, message, served))
        self._beginnings.add(beginning)
        beginning.add_done_callback(self._beginnings.discard)

    def _check_room(self, session: Session, key: RequestKey) -> Served:
        """Raises RejectedError. The engine judges queues exactly; this bounds what it has not seen yet."""
        tenant = session.tenant
        assert tenant is not None
        if self.served is None:
            raise RejectedError("loading", "the model is loading", retryable=True, retry_after_ms=RETRY_MS)
        if key in self._open:
            message = f"request {key.request_id!r} is open already"
            raise RejectedError("id_conflict", message, retryable=False)
        limit = tenant.max_running + tenant.max_waiting
        if self._num_open[key.tenant] >= limit:
            message = f"tenant {key.tenant!r} has {limit} requests open already"
            raise RejectedError("queue_full", message, retryable=True, retry_after_ms=RETRY_MS)
        return self.served

    async def _begin(self, request: _OpenRequest, message: wire.Generate, served: Served) -> None:
        tokenizer, sampling = served.tokenizer, message.sampling
        try:
            ids = await self._prompt_ids(request, message, tokenizer)
            if request.session.gone:
                self._close(request)
                return
            eos = frozenset[int]() if sampling.ignore_eos else served.info.eos_token_ids
            ending = eos.union(sampling.stop_token_ids)
            text = tokenizer.stream(sampling.stop)
            request.answer = Answer(message.id, text, ending, stream=message.stream)
            self._engine.submit(Submission(request.key, ids, sampling, request.arrived_at))
        except MlxdError as error:
            self._close(request)
            self._refuse(request.session, request.key, error)
            return
        if request.end_as:
            self._engine.cancel(request.key, request.end_as)

    async def _prompt_ids(
        self, request: _OpenRequest, message: wire.Generate, tokenizer: Tokenizer
    ) -> tuple[int, ...]:
        """Raises what `prompt_ids` raises. Long prompts of a tenant leave a thread to the others'."""
        if not is_long(message):
            return prompt_ids(message, tokenizer)
        async with self._turns.setdefault(request.key.tenant, asyncio.Semaphore(MAX_TOKENISING)):
            if request.session.gone:
                return ()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._tokenisers, prompt_ids, message, tokenizer)

    def _refuse(self, session: Session, key: RequestKey, error: MlxdError) -> None:
        match error:
            case RejectedError():
                self._recorder.rejected(key.tenant, error.reason)
                reply: wire.ServerMessage = wire.Rejected(
                    id=key.request_id,
                    reason=error.reason,
                    message=str(error),
                    retryable=error.retryable,
                    retry_after_ms=error.retry_after_ms,
                )
            case _:
                self._recorder.bad_message(error.code)
                field = error.field if isinstance(error, InvalidParamError) else UNSET
                reply = wire.Error(id=key.request_id, code=error.code, message=str(error), field=field)
        self._send(session, reply)

    def cancel(self, key: RequestKey, outcome: str = "cancelled") -> bool:
        """Whether there is such an open request; its terminal message comes when the engine let go of it."""
        request = self._open.get(key)
        if request is None:
            return False
        if request.answer is None:
            request.end_as = outcome
        else:
            self._engine.cancel(key, outcome)
        return True

    def abandon(self, session: Session, outcome: str) -> None:
        """End all requests of a client that is gone or does not read."""
        for key in tuple(session.requests):
            self.cancel(key, outcome)

    def deliver(self, events: Sequence[Event]) -> None:
        """Tell clients what the engine told."""
        for event in events:
            request = self._open.get(event.key)
            if request is not None and request.answer is not None:
                self._tell(request, request.answer, event)

    def _tell(self, request: _OpenRequest, answer: Answer, event: Event) -> None:
        match event:
            case Accepted():
                self._reply(request, wire.Accepted(id=event.key.request_id))
            case Tokens():
                request.state = "running"
                self.generated_tokens[event.key.tenant] += len(event.token_ids)
                was_ended = answer.ended_by
                if (chunk := answer.tokens(event)) is not None:
                    self._reply(request, chunk)
                if answer.ended_by and not was_ended:
                    self._engine.cancel(event.key, answer.ended_by)
            case Finished():
                self._close(request)
                for message in answer.finished(event):
                    self._reply(request, message)
            case Rejected():
                self._close(request)
                self._reply(
                    request,
                    wire.Rejected(
                        id=event.key.request_id,
                        reason=event.reason,
                        message=event.message,
                        retryable=event.retryable,
                        retry_after_ms=event.retry_after_ms,
                    ),
                )

    def _reply(self, request: _OpenRequest, message: wire.ServerMessage) -> None:
        request.sent_at = asyncio.get_running_loop().time()
        self._send(request.session, message)

    def _close(self, request: _OpenRequest) -> None:
        del self._open[request.key]
        self._num_open[request.key.tenant] -= 1
        request.session.requests.discard(request.key)

    def give_up(self) -> None:
        """End every open request for an engine that does not answer any more."""
        for request in tuple(self._open.values()):
            self._close(request)
            text = "the engine does not answer"
            self._reply(request, wire.Error(id=request.key.request_id, code="engine_failed", message=text))

    def close(self) -> None:
        """Tokenise nothing more."""
        self._tokenisers.shutdown(wait=False, cancel_futures=True)

    def keep_alive(self, session: Session, quiet_since: float) -> None:
        """Show that requests which got nothing since then are still known."""
        for key in tuple(session.requests):
            request = self._open[key]
            if request.sent_at <= quiet_since:
                self._reply(request, wire.KeepAlive(id=key.request_id, state=request.state))
