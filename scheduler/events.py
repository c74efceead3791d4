"""What the engine tells about a request, in order: one Accepted or Rejected, Tokens, one Finished."""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from mlxd.batching.errors import InvalidPromptError
from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.priority import Priority


class RequestKey(NamedTuple):
    """A request's name: ids are scoped to the tenant, two tenants may use the same one."""

    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its way to the scheduler, which takes what `check` lets pass.

    Times are of the engine's clock, in seconds.
    """

    key: RequestKey
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrived_at: float
    priority: Priority = Priority.NORMAL
    deadline: float | None = None

    def check(self, vocab_size: int) -> None:
        """Raises InvalidPromptError, InvalidParamError: no model of so many tokens can compute it."""
        if not self.prompt:
            raise InvalidPromptError("the prompt is empty")
        low, high = min(self.prompt), max(self.prompt)
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InvalidPromptError(f"the prompt has token id {bad}; ids are from 0 to {vocab_size - 1}")
        self.sampling.check(vocab_size)


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens`: those of the prompt that were not computed but found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Rejected:
    """`reason` as in errors.RejectedError, or "id_conflict"."""

    key: RequestKey
    reason: str
    message: str
    retryable: bool
    retry_after_ms: int = 0


class Tokens(msgspec.Struct, frozen=True):
    """New tokens of one request; `logprobs` is empty or as long as `token_ids`.

    A msgspec struct, as one is made for each row and step.
    """

    key: RequestKey
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of an accepted request.

    Attributes:
        outcome: "stop", "length", "cancelled", "client_gone", "slow_client", "expired", "hopeless",
            "revoked", "failed" or "draining".
        error_code, error: set where outcome is one of the last five.
    """

    key: RequestKey
    outcome: str
    usage: Usage
    error_code: str = ""
    error: str = ""


Event = Accepted | Rejected | Tokens | Finished
