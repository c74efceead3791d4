"""Generation inside this process: no sockets, same engine."""

import itertools
import operator
import queue
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.sampling_params import SamplingParams
from mlxd.batching.text import Tokenizer
from mlxd.batching.text_stream import TextStream
from mlxd.scheduler.config import Config
from mlxd.scheduler.errors import (
    EngineFailedError,
    InvalidPromptError,
    MlxdError,
    RejectedError,
    RequestFailedError,
)
from mlxd.scheduler.events import Accepted, Event, Finished, Rejected, RequestKey, Submission, Tokens
from mlxd.scheduler.model_runner import load_model_tokenizer
from mlxd.scheduler.results import Completion

if TYPE_CHECKING:
    from mlxd.scheduler.engine import Engine


@dataclass(slots=True, eq=False)
class _Answer:
    """An open request. `index`: which prompt it answers."""

    index: int
    stream: TextStream | None
    ending: frozenset[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def is_stopped(self) -> bool:
        """A stop string ended the text."""
        return self.stream is not None and self.stream.stopped

    def take(self, event: Tokens) -> None:
        if self.is_stopped:
            return
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if self.stream is not None:
            self.text += self.stream.push([t for t in event.token_ids if t not in self.ending])

    def finish(self, event: Finished) -> Completion:
        if self.stream is not None:
            self.text += self.stream.finish()
        return Completion(
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason="stop" if self.is_stopped else event.outcome,
            usage=replace(event.usage, completion_tokens=len(self.token_ids)),
            logprobs=tuple(self.logprobs),
        )


class LocalClient:
    """Submits as the first configured tenant, as many as its queue takes; one `generate` at a time."""

    def __init__(self, engine: "Engine", config: Config) -> None:
        self._engine = engine
        self._config = config
        self._tenant = config.tenants[0].name
        self._window = min(config.tenants[0].max_waiting, config.scheduler.max_waiting)
        self._events: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._tokenizer: Tokenizer | None = None
        self._open: dict[RequestKey, _Answer] = {}

    def receive(self, events: Sequence[Event]) -> None:
        """From the engine thread."""
        self._events.put(events)

    def generate(self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams) -> list[Completion]:
        """Raises MlxdError where a prompt is refused or fails; the others are cancelled then."""
        sampling.check()
        self._engine.wait_ready()
        tokenizer = self._load_tokenizer() if _needs_text(prompts, sampling) else None
        left = deque(enumerate(prompts))
        done: dict[int, Completion] = {}
        try:
            while left or self._open:
                while left and len(self._open) < self._window:
                    index, prompt = left.popleft()
                    self._submit(index, prompt, sampling, tokenizer)
                for event in self._events.get():
                    self._take(event, done)
        finally:
            for key in self._open:
                self._engine.cancel(key)
            self._open.clear()
        return [done[index] for index in range(len(prompts))]

    def _submit(
        self, index: int, prompt: str | Sequence[int], sampling: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        if isinstance(prompt, str):
            assert tokenizer is not None
            ids = tuple(tokenizer.encode(prompt))
        else:
            ids = _token_ids(prompt)
        eos: frozenset[int] = frozenset() if sampling.ignore_eos else self._engine.info.eos_token_ids
        stream = tokenizer.stream(sampling.stop) if tokenizer is not None else None
        key = RequestKey(self._tenant, str(next(self._ids)))
        self._engine.submit(Submission(key, ids, sampling, self._engine.clock()))
        self._open[key] = _Answer(index, stream, eos.union(sampling.stop_token_ids))

    def _take(self, event: Event, done: dict[int, Completion]) -> None:
        answer = self._open.get(event.key)
        if answer is None:
            return
        match event:
            case Accepted():
                pass
            case Rejected():
                del self._open[event.key]
                raise RejectedError(
                    event.reason,
                    event.message,
                    retryable=event.retryable,
                    retry_after_ms=event.retry_after_ms,
                )
            case Tokens():
                answer.take(event)
                if answer.is_stopped:
                    self._engine.cancel(event.key, "stop")
            case Finished():
                del self._open[event.key]
                if event.outcome not in ("stop", "length"):
                    raise _error_of(event)
                done[answer.index] = answer.finish(event)

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_model_tokenizer(self._config)
        return self._tokenizer


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, prompt))
    except TypeError as error:
        raise InvalidPromptError(f"the prompt holds what is not a token id: {error}") from None


def _needs_text(prompts: Sequence[str | Sequence[int]], sampling: SamplingParams) -> bool:
    return bool(sampling.stop) or any(isinstance(prompt, str) for prompt in prompts)


def _error_of(event: Finished) -> MlxdError:
    if event.error_code == EngineFailedError.code:
        return EngineFailedError(event.error)
    return RequestFailedError(event.error_code or event.outcome, event.error or f"ended as {event.outcome}")
