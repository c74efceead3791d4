"""Is a step right? Both engines' log-probabilities against the same model in float32."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from figures import Line
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from models import BenchModel

from mlxd.batching.driver import Driver
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.sampling_params import SamplingParams

_SHORT = 512
"""Tokens that a row beside the longest one has at most: a float32 prefill takes its time."""
_TOP = 20
_WITH_LOGPROBS = SamplingParams(temperature=0.0, top_logprobs=_TOP)
_TIMES_THEIRS, _ALLOWED = 3.0, 1e-3
_CHUNK = 2048


def check(bench: BenchModel, runner: MlxRunner, rows: int, context: int) -> Line:
    """Largest errors of log-probabilities: of the 20 likeliest tokens after ragged prompts of random tokens.

    Raises:
        SystemExit: ours are over three times mlx-lm's, so there is nothing to time.
    """
    rng = random.Random(7)
    lengths = [context, min(context // 2, _SHORT) + 1, min(context // 3, _SHORT // 2) + 1][:rows]
    prompts = [[rng.randrange(bench.vocab_size) for _ in range(length)] for length in lengths]
    ours = _our_logprobs(runner, prompts)
    theirs = _their_logprobs(bench.model, prompts)
    right = _float32_logprobs(bench.model, prompts)
    tokens = [mx.array(list(row)) for row in ours]
    our_error = max(
        abs(logprob - float(exact[token]))
        for row, exact in zip(ours, right, strict=True)
        for token, logprob in row.items()
    )
    their_error = max(
        float(mx.abs(row[index].astype(mx.float32) - exact[index]).max())
        for row, exact, index in zip(theirs, right, tokens, strict=True)
    )
    if not our_error <= _TIMES_THEIRS * their_error + _ALLOWED:
        raise SystemExit(
            f"{bench.name}: log-probabilities are off by {our_error:.3g}, mlx-lm's by {their_error:.3g}"
        )
    return {
        "kind": "error",
        "rows_compared": len(prompts),
        "mlxd": round(our_error, 6),
        "mlx-lm": round(their_error, 6),
    }


def _our_logprobs(runner: MlxRunner, prompts: Sequence[Sequence[int]]) -> list[dict[int, float]]:
    """Per row, the likeliest tokens and their log-probabilities. The runner is left empty."""
    driver = Driver(runner, runner.info.memory)
    rows = [driver.join(prompt, _WITH_LOGPROBS) for prompt in prompts]
    driver.prefill()
    found = []
    for result in driver.decode():
        if result.fault is not None or result.logprobs is None:
            raise SystemExit(f"row {result.row_id} failed: {result.fault}")
        found.append(dict(result.logprobs.top))
    for row in rows:
        driver.leave(row)
    driver.clean()
    return found


def _their_logprobs(model: nn.Module, prompts: Sequence[Sequence[int]]) -> list[mx.array]:
    """Per row, [vocab_size] of mlx-lm's batch."""
    generator = BatchGenerator(model)
    waiting = generator.insert([list(prompt) for prompt in prompts], max_tokens=[2] * len(prompts))
    found: dict[int, mx.array] = {}
    while len(found) < len(waiting):
        for response in generator.next()[1]:
            found.setdefault(response.uid, response.logprobs)
    mx.eval(list(found.values()))
    mx.synchronize(generator.stream)
    generator.close()
    return [found[uid] for uid in waiting]


def _float32_logprobs(model: nn.Module, prompts: Sequence[Sequence[int]]) -> list[mx.array]:
    """Per row, [vocab_size] of the row alone."""
    with _in_float32(model):
        return [_last_logprobs(model, prompt) for prompt in prompts]


def _last_logprobs(model: nn.Module, prompt: Sequence[int]) -> mx.array:
    cache = make_prompt_cache(model)
    for start in range(0, len(prompt) - 1, _CHUNK):
        model(mx.array([prompt[start : min(start + _CHUNK, len(prompt) - 1)]]), cache=cache)
        mx.eval([part.state for part in cache])
    logits = model(mx.array([prompt[-1:]]), cache=cache)[0, -1].astype(mx.float32)
    logprobs: mx.array = logits - mx.logsumexp(logits)
    mx.eval(logprobs)
    return logprobs


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Packed weights are unpacked, so that all products are plain ones."""
    layers = model.leaf_modules()
    model.update_modules(tree_map(_unpacked, layers, is_leaf=nn.Module.is_module))
    kept = model.parameters()
    model.update(tree_map(lambda array: array.astype(mx.float32), kept))
    try:
        yield
    finally:
        model.update(kept)
        model.update_modules(layers)
        mx.clear_cache()


def _unpacked(layer: nn.Module) -> nn.Module:
    if not isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return layer
    dense: nn.Module = (
        nn.Embedding(1, 1) if isinstance(layer, nn.QuantizedEmbedding) else nn.Linear(1, 1, bias=False)
    )
    packing = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    dense.weight = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **packing)
    if "bias" in layer:
        dense.bias = layer.bias
    return dense
