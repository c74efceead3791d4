"""Drawing one token a row inside the decode graph: a pure function of arrays, vectorised over rows.

A row's token depends on its own logits, parameters and uniform number alone: a part of the graph that a row
does not use leaves its numbers bit for bit as they are, so whoever shares the batch cannot change it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd.batching.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

_DRAW_BLOCK = 256
_LARGEST_UNIFORM = 1.0 - 2.0**-24
_TOP_BIT = 1 << 29
_NUM_BITS = 30
"""Bits 29..0 hold every float32 from 0.0 to just under 2.0."""


@dataclass(frozen=True, slots=True)
class SamplingShape:
    """Which parts of sampling a decode graph holds; part of its compile key, the rest enters as arrays.

    Attributes:
        draw: some row has a temperature; without it every row takes its likeliest token.
        top_k, top_p: some row cuts its distribution so (min_p costs nothing and is always there with `draw`).
        penalties: some row has a repetition, presence or frequency penalty.
        bias_width: entries a row of logit_bias, 0 or a power of two.
        logprobs: some row asked for log-probabilities.
    """

    draw: bool = False
    top_k: bool = False
    top_p: bool = False
    penalties: bool = False
    bias_width: int = 0
    logprobs: bool = False

    def example(self) -> SamplingParams:
        """Some parameters whose sampling graph has exactly these parts."""
        return SamplingParams(
            temperature=1.0 if self.draw else 0.0,
            top_k=2 if self.top_k else 0,
            top_p=0.5 if self.top_p else 1.0,
            presence_penalty=1.0 if self.penalties else 0.0,
            logit_bias=dict.fromkeys(range(self.bias_width), 0.0),
            top_logprobs=1 if self.logprobs else None,
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of `sample`'s inputs, in order; see SamplingBatch for what they hold."""
        names: tuple[str, ...] = ()
        if self.penalties:
            names += ("counted", "counts", "prompt_seen", "repetition", "presence", "frequency")
        if self.bias_width:
            names += ("bias_ids", "bias")
        if self.draw:
            names += ("uniforms", "temperature", "min_p")
        if self.top_k:
            names += ("top_k",)
        if self.top_p:
            names += ("top_p",)
        return names

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of `sample`'s outputs, in order."""
        names: tuple[str, ...] = ("tokens", "ok")
        if self.logprobs:
            names += ("logprob", "top_ids", "top_logprobs")
        if self.penalties:
            names += ("counts",)
        return names

    @property
    def label(self) -> str:
        """Short and readable, "draw+top_p+bias8"; "greedy" where nothing is in."""
        parts = {
            "draw": self.draw,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "penalties": self.penalties,
            f"bias{self.bias_width}": self.bias_width > 0,
            "logprobs": self.logprobs,
        }
        return "+".join(name for name, present in parts.items() if present) or "greedy"


def sample(
    shape: SamplingShape, logits: mx.array, tokens_in: mx.array, inputs: Sequence[mx.array]
) -> list[mx.array]:
    """Draw one token a row. For use inside `mx.compile` or outside of it.

    Args:
        logits: [B, V], any float dtype; computed with in float32. -inf bars a token.
        tokens_in: [B] int, the tokens this step was fed; penalties count them where `counted` says so.
        inputs: SamplingBatch.inputs(), named by `shape.inputs`.
    Returns:
        Named by `shape.outputs`:
        tokens: [B] int32; 0 where not ok.
        ok: [B] bool; False where the row has a NaN or +inf, or no finite score at all.
        logprob: [B] float32, of the drawn token in the model's own distribution, before penalties and bias.
        top_ids, top_logprobs: [B, min(20, V)] int32 and float32, the likeliest tokens in no order.
        counts: [B, V] int32, times each token was generated, tokens_in included.
    """
    given = dict(zip(shape.inputs, inputs, strict=True))
    made: dict[str, mx.array] = {}
    scores = logits
    if shape.penalties:
        made["counts"] = _count(given["counts"], tokens_in, given["counted"])
        scores = _penalise(scores.astype(mx.float32), made["counts"], given)
    if shape.bias_width:
        rows = mx.arange(scores.shape[0])[:, None]
        scores = scores.astype(mx.float32).at[rows, given["bias_ids"]].add(given["bias"])
    peak = mx.max(scores, axis=-1, keepdims=True)
    tokens = mx.argmax(scores, axis=-1).astype(mx.int32)
    if shape.draw:
        weights = kept_weights(shape, scores.astype(mx.float32), peak.astype(mx.float32), given)
        tokens = mx.where(given["temperature"] > 0, inverse_cdf(weights, given["uniforms"]), tokens)
    made["ok"] = mx.isfinite(peak[:, 0])
    made["tokens"] = mx.where(made["ok"], tokens, 0)
    if shape.logprobs:
        made |= _logprobs(logits.astype(mx.float32), made["tokens"])
    return [made[name] for name in shape.outputs]


def _count(counts: mx.array, tokens_in: mx.array, counted: mx.array) -> mx.array:
    return counts.at[mx.arange(counts.shape[0]), tokens_in].add(counted)


def _penalise(scores: mx.array, counts: mx.array, given: dict[str, mx.array]) -> mx.array:
    """Penalties of 1 (repetition) and 0 (the others) change no score."""
    generated = counts > 0
    repetition = given["repetition"][:, None]
    pushed_down = mx.where(scores > 0, scores / repetition, scores * repetition)
    scores = mx.where(given["prompt_seen"] | generated, pushed_down, scores)
    return scores - given["presence"][:, None] * generated - given["frequency"][:, None] * counts


def kept_weights(
    shape: SamplingShape, scores: mx.array, peak: mx.array, given: dict[str, mx.array]
) -> mx.array:
    """Probabilities up to a factor, [B, V] float32: the likeliest token weighs exactly 1, a dropped one 0.

    Each filter is a least weight, so tokens that tie with the last one kept are kept too, in whatever order.
    """
    temperature = given["temperature"][:, None]
    weights = mx.exp((scores - peak) / mx.where(temperature > 0, temperature, 1.0))
    least = given["min_p"][:, None]
    kept = weights
    if shape.top_k:
        kth = _least_kept(lambda t: mx.sum(weights >= t, axis=-1, keepdims=True), given["top_k"][:, None])
        least = mx.maximum(least, kth)
        kept = mx.where(weights >= kth, weights, 0.0)
    if shape.top_p:
        top_p = given["top_p"][:, None]
        goal = top_p * mx.sum(kept, axis=-1, keepdims=True)
        nucleus = _least_kept(lambda t: mx.sum(mx.where(kept >= t, kept, 0.0), axis=-1, keepdims=True), goal)
        # A sum that rounds must not drop tokens of a row that wants them all.
        least = mx.maximum(least, mx.where(top_p < 1, nucleus, 0.0))
    return mx.where(weights >= least, weights, 0.0)


def _least_kept(measure: Callable[[mx.array], mx.array], goal: mx.array) -> mx.array:
    """Largest float32 t in [0, 1] with measure(t) >= goal, [B, 1]; 0 where no t reaches it.

    Exact in a fixed number of passes: weights are not negative, so their order is that of their bits, and t
    is found from its highest bit down. `measure` must not grow with t. Faster than sorting
    (benchmarks/sampler.py).
    """
    found = mx.zeros(goal.shape, dtype=mx.uint32)
    # The bit is an array that is halved: as thirty constants it would be thirty kernels to compile.
    bit = mx.full(goal.shape, _TOP_BIT, dtype=mx.uint32)
    for _ in range(_NUM_BITS):
        trial = found | bit
        found = mx.where(measure(trial.view(mx.float32)) >= goal, trial, found)
        bit = bit >> 1
    return found.view(mx.float32)


def inverse_cdf(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Inverse of the cumulative distribution in vocabulary order, [B] int32; never a token of weight 0.

    First a block of the vocabulary is drawn, then a token in it: a running sum over the whole vocabulary
    would cost more and lose small weights to rounding.
    """
    num_rows, vocab = weights.shape
    padded = mx.pad(weights, [(0, 0), (0, -vocab % _DRAW_BLOCK)])
    blocks = padded.reshape(num_rows, -1, _DRAW_BLOCK)
    block, rest = _pick(mx.sum(blocks, axis=-1), uniforms[:, None])
    inside = mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    token, _ = _pick(inside, rest)
    return (block * _DRAW_BLOCK + token)[:, 0].astype(mx.int32)


def _pick(weights: mx.array, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """First index whose running sum exceeds uniform x total.

    Args:
        weights: [B, N], not negative.
        uniforms: [B, 1] in [0, 1 - 2^-24]; times the total it stays below the total, so an index exists.
    Returns:
        index: [B, 1] int32, with a weight above 0; 0 where the row is not finite.
        rest: [B, 1], where in the index's own weight the uniform fell, again in [0, 1 - 2^-24].
    """
    running = mx.cumsum(weights, axis=-1)
    # A parallel scan may round its sums unevenly: an index without weight is no candidate whatever its sum.
    reach = mx.where(weights > 0, running, 0.0)
    goal = uniforms * mx.max(reach, axis=-1, keepdims=True)
    index = mx.argmax(reach > goal, axis=-1, keepdims=True).astype(mx.int32)
    weight = mx.take_along_axis(weights, index, axis=-1)
    rest = (goal - (mx.take_along_axis(running, index, axis=-1) - weight)) / weight
    return index, mx.clip(rest, 0.0, _LARGEST_UNIFORM)


def _logprobs(logits: mx.array, tokens: mx.array) -> dict[str, mx.array]:
    """Of the drawn and the likeliest tokens only: a log-softmax of the whole vocabulary would cost more."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    width = min(MAX_TOP_LOGPROBS, logits.shape[-1])
    top = mx.argpartition(logits, -width, axis=-1)[:, -width:].astype(mx.int32)
    return {
        "logprob": (mx.take_along_axis(logits, tokens[:, None], axis=-1) - total)[:, 0],
        "top_ids": top,
        "top_logprobs": mx.take_along_axis(logits, top, axis=-1) - total,
    }
