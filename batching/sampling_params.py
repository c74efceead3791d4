"""How one request wants its tokens drawn; the same struct in Python and on the wire."""

import math

import msgspec

from mlxd.batching.errors import InvalidParamError

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 512
MAX_SEED = 2**64 - 1
MAX_VOCAB_SIZE = 2**31 - 1
MIN_POSITIVE = 1e-6
"""Less would round to nothing where float32 is computed with."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of one request. Order: penalties and bias, temperature, top_k, top_p, min_p, draw.

    Attributes:
        max_tokens: most tokens to generate, >= 1.
        temperature: 0 is greedy; >= 0.
        top_p: smallest set of tokens whose probability reaches it; [1e-6, 1].
        top_k: keep the k likeliest; 0 keeps all.
        min_p: drop tokens below min_p times the likeliest one's probability; [0, 1].
        repetition_penalty: divides positive logits (multiplies negative ones) of tokens seen in prompt or
            output; [1e-6, 100].
        presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for generated tokens;
            [-2, 2].
        logit_bias: token id -> added to its logit, [-100, 100].
        seed: 64-bit; the same seed and prompt give the same tokens, whoever shares the batch. None: the
            daemon picks.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end it, besides the model's own.
        ignore_eos: go on past the model's end-of-text token.
        top_logprobs: report this many likeliest alternatives with each token, at most 20; None: no
            log-probabilities.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None

    def check(self, vocab_size: int = MAX_VOCAB_SIZE) -> None:
        """Raises InvalidParamError that names the field ("sampling.seed"), the value and the range."""
        _int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, MIN_POSITIVE, 1)
        _int("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, MIN_POSITIVE, 100)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _length("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise _error("logit_bias", f"names token {token}; token ids are from 0 to {vocab_size - 1}")
            _number(f"logit_bias[{token}]", bias, -100, 100)
        if self.seed is not None:
            _int("seed", self.seed, 0, MAX_SEED)
        if isinstance(self.stop, str):  # in Python that is a sequence of strings, too
            raise InvalidParamError("sampling.stop", self.stop, "a list of strings")
        _length("stop", len(self.stop), MAX_STOP_STRINGS)
        for index, text in enumerate(self.stop):
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                size = f"has {len(text)} characters" if text else "is empty"
                raise _error(f"stop[{index}]", f"{size}; it must have 1 to {MAX_STOP_LENGTH}")
        _length("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for index, token in enumerate(self.stop_token_ids):
            _int(f"stop_token_ids[{index}]", token, 0, vocab_size - 1)
        if self.top_logprobs is not None:
            _int("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)


GREEDY = SamplingParams(temperature=0.0)


def _error(field: str, sentence: str) -> InvalidParamError:
    path = f"sampling.{field}"
    return InvalidParamError.from_message(path, f"{path} {sentence}")


def _int(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParamError(f"sampling.{field}", value, f"an integer from {low} to {high}")


def _number(field: str, value: float, low: float, high: float) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not real or not low <= value <= high:
        raise InvalidParamError(f"sampling.{field}", value, f"a number from {low:g} to {high}")


def _length(field: str, length: int, limit: int) -> None:
    if length > limit:
        raise _error(field, f"has {length} entries; the limit is {limit}")
