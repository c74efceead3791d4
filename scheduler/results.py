"""What a client gets for a request."""

from dataclasses import dataclass

from mlxd.batching.plan import TokenLogprobs
from mlxd.scheduler.events import Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `finish_reason`: "stop" or "length"; `logprobs`: empty or as long as `token_ids`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The next piece of an answer. `finish_reason` and `usage` are set on the last one alone."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
