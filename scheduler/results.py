"""What a client gets for a request."""

from dataclasses import dataclass

from mlxd.batching.plan import TokenLogprobs
from mlxd.scheduler.events import Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    Attributes:
        text: without the token or the stop string that ended it. In process it is "" where all prompts were
            token ids and no stop string was asked for, since then no tokenizer is needed.
        token_ids: all that were drawn, the token that ended it included.
        finish_reason: "stop" or "length".
        logprobs: empty, or one for each of `token_ids`.
    """

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
