"""What a client's user asks for, and the message that it becomes."""

import uuid
from collections.abc import Mapping, Sequence
from typing import TypedDict

import msgspec
from msgspec import UNSET

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import messages as wire
from mlxd.scheduler.errors import InvalidParamError
from mlxd.scheduler.priority import PriorityName


class RequestOptions(TypedDict, total=False):
    """What `generate` and `stream` take beside a prompt and how to sample.

    messages: a conversation in place of the prompt, each with "role" and "content".
    token_ids: the prompt's tokens in place of its text.
    request_id: to resume it by, or to send it twice without harm; a new one by default.
    priority: "interactive", "normal" or "batch".
    deadline_ms: milliseconds after its arrival in which it must end.
    """

    messages: Sequence[Mapping[str, str]] | None
    token_ids: Sequence[int] | None
    request_id: str | None
    priority: PriorityName
    deadline_ms: int | None


def new_id() -> str:
    return uuid.uuid4().hex


def checked_id(request_id: str) -> str:
    """Raises InvalidParamError: the answer to a message without an id could not be told from others."""
    limit = wire.MAX_ID_LENGTH
    if not 1 <= len(request_id) <= limit:
        raise InvalidParamError("id", request_id[:limit], f"1 to {limit} characters")
    return request_id


def generate_message(
    prompt: str | None,
    sampling: SamplingParams | None,
    *,
    stream: bool,
    messages: Sequence[Mapping[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    request_id: str | None = None,
    priority: PriorityName = "normal",
    deadline_ms: int | None = None,
) -> wire.Generate:
    """The options are `RequestOptions`.

    Raises:
        InvalidParamError: a turn is no role and content, or the id or a sampling value is out of range.
    """
    sampling = sampling or SamplingParams()
    sampling.check()
    return wire.Generate(
        id=new_id() if request_id is None else checked_id(request_id),
        prompt=UNSET if prompt is None else prompt,
        messages=UNSET if messages is None else _turns(messages),
        token_ids=UNSET if token_ids is None else tuple(token_ids),
        sampling=sampling,
        stream=stream,
        priority=priority,
        deadline_ms=UNSET if deadline_ms is None else deadline_ms,
    )


def _turns(messages: Sequence[Mapping[str, str]]) -> tuple[wire.ChatMessage, ...]:
    try:
        return msgspec.convert(list(messages), tuple[wire.ChatMessage, ...])
    except msgspec.ValidationError as error:
        raise InvalidParamError.from_message("messages", f"messages: {error}") from None
