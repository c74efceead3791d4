"""From a generate message to what the engine is handed."""

import asyncio
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from mlxd.batching.runner import RunnerInfo
from mlxd.batching.text import Tokenizer
from mlxd.scheduler.answer import Answer
from mlxd.scheduler.errors import InvalidParamError, InvalidPromptError, RejectedError, RequestFailedError
from mlxd.scheduler.events import Submission
from mlxd.scheduler.messages import Generate
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.stream import Stream

logger = logging.getLogger(__name__)

INLINE_CHARS = 2_000
INLINE_TURNS = 16
"""Longer texts and conversations are tokenised on another thread: they would hold up everyone's streams."""
RETRY_MS = 1_000
MAX_TOKENISING = 2
"""Long prompts of one tenant that are tokenised at a time."""


@dataclass(frozen=True, slots=True)
class Served:
    """What there is once the model is loaded."""

    info: RunnerInfo
    tokenizer: Tokenizer


class Intake:
    """Tokenises, long prompts on threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_TOKENISING + 1, "mlxd-tokenise")
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def prepare(self, stream: Stream, served: Served) -> Submission:
        """What the engine is handed; gives the stream its answer. Raises what `prompt_ids` raises."""
        message, tokenizer = stream.message, served.tokenizer
        assert message is not None, "only what was not submitted yet gets here"
        sampling = message.sampling
        ids = await self.prompt_ids(stream.key.tenant, message, tokenizer)
        eos = frozenset[int]() if sampling.ignore_eos else served.info.eos_token_ids
        ending = eos.union(sampling.stop_token_ids)
        text = tokenizer.stream(sampling.stop)
        stream.answer = Answer(stream.transcript, message.id, text, ending)
        return Submission(
            key=stream.key,
            prompt=ids,
            sampling=sampling,
            arrived_at=stream.arrived_at,
            priority=Priority.of(message.priority),
            deadline=stream.deadline,
        )

    async def prompt_ids(self, tenant: str, message: Generate, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Raises what `prompt_ids` raises. Long prompts of a tenant leave a thread to the others'."""
        if not is_long(message):
            return prompt_ids(message, tokenizer)
        async with self._turns.setdefault(tenant, asyncio.Semaphore(MAX_TOKENISING)):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, prompt_ids, message, tokenizer)

    def close(self) -> None:
        """Tokenise nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def loading() -> RejectedError:
    return RejectedError("loading", "the model is loading", retryable=True, retry_after_ms=RETRY_MS)


def with_seed(message: Generate) -> Generate:
    """So that it draws the same tokens when it is begun again."""
    if message.sampling.seed is not None:
        return message
    sampling = msgspec.structs.replace(message.sampling, seed=secrets.randbits(64))
    return msgspec.structs.replace(message, sampling=sampling)


def check_message(message: Generate, served: Served) -> None:
    """Raises InvalidParamError, InvalidPromptError or RejectedError, never_fits."""
    check_request(message, served.info.vocab_size)
    check_length(message, served.tokenizer, served.info.memory.max_model_len)


def is_long(message: Generate) -> bool:
    num_turns = 0 if message.messages is UNSET else len(message.messages)
    return num_turns > INLINE_TURNS or _num_chars(message) > INLINE_CHARS


def check_request(message: Generate, vocab_size: int) -> None:
    """Raises InvalidParamError or InvalidPromptError for what can be told without the tokenizer."""
    message.sampling.check(vocab_size)
    given = [n for n in ("prompt", "messages", "token_ids") if getattr(message, n) is not UNSET]
    if len(given) != 1:
        raise InvalidParamError("prompt", given, "exactly one of prompt, messages and token_ids")
    if message.token_ids is not UNSET:
        bad = next((token for token in message.token_ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise InvalidPromptError(f"token_ids has {bad}; token ids are from 0 to {vocab_size - 1}")


def check_length(message: Generate, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Raises RejectedError, never_fits, for a text so long that the context cannot hold it."""
    if tokenizer.max_token_chars is None:
        return
    num_chars = _num_chars(message)
    if num_chars > tokenizer.max_token_chars * max_model_len:
        text = f"a text of {num_chars} characters is beyond a context of {max_model_len} tokens"
        raise RejectedError("never_fits", text, retryable=False)


def _num_chars(message: Generate) -> int:
    if message.prompt is not UNSET:
        return len(message.prompt)
    if message.messages is not UNSET:
        return sum(len(turn.content) for turn in message.messages)
    return 0


def prompt_ids(message: Generate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt as token ids, never empty.

    Raises:
        InvalidPromptError: it is empty, or the chat template refuses it.
        RequestFailedError: the tokenizer raised; "internal".
    """
    try:
        ids = _encode(message, tokenizer)
    except InvalidPromptError:
        raise
    except Exception as error:  # a tokenizer is foreign code: whatever it raises ends this request alone
        logger.exception("tokenizer failed id=%s", message.id)
        raise RequestFailedError("internal", "the tokenizer failed on this prompt") from error
    if not ids:
        raise InvalidPromptError("the prompt is empty")
    return ids


def _encode(message: Generate, tokenizer: Tokenizer) -> tuple[int, ...]:
    if message.token_ids is not UNSET:
        return message.token_ids
    if message.messages is not UNSET:
        turns = [{"role": turn.role, "content": turn.content} for turn in message.messages]
        return tuple(tokenizer.encode_chat(turns))
    if message.prompt is not UNSET:
        return tuple(tokenizer.encode(message.prompt))
    return ()
