"""Whether a model that was rewritten computes what it did."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.selftest import tolerance
from mlxd.caches.kinds import native_caches
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of

Inputs = Sequence[list[list[int]]]
"""Tokens of one forward after another, [rows, positions] each."""
ALONE: Inputs = [[3, 1, 2, 0, 1]], [[2]]
"""A short prompt and one token after it."""
TOGETHER: Inputs = [[3], [1], [2]], [[1], [0], [2]]
"""Rows that decode."""


def logprobs(model: nn.Module, inputs: Inputs = ALONE) -> mx.array:
    """float32 [tokens, V], after each token of the inputs."""
    caches = native_caches(model)
    logits = [model(mx.array(tokens), cache=caches).astype(mx.float32) for tokens in inputs]
    parts = [x - mx.logsumexp(x, axis=-1, keepdims=True) for x in logits]
    found = mx.concatenate([x.reshape(-1, x.shape[-1]) for x in parts])
    mx.eval(found)
    return found


def fault_in(model: nn.Module, expected: mx.array, dtype: mx.Dtype, inputs: Inputs = ALONE) -> str | None:
    """What is wrong with a model whose log-probabilities were these, or None.

    Args:
        dtype: of activations, which says how much is taken for rounding.
    """
    try:
        worst = float(mx.abs(logprobs(model, inputs) - expected).max())
    except MODEL_FAULTS as error:
        return f"fails ({summary_of(error)})"
    limit = tolerance(dtype, mx.default_device().type)
    return None if worst <= limit else f"differs by {worst:.2g}"
