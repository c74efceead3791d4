"""Whether a model that was rewritten computes what it did."""

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.selftest import tolerance
from mlxd.caches.kinds import native_caches
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of

_PROMPT, _NEXT = [3, 1, 2, 0, 1], [2]


def logprobs(model: nn.Module) -> mx.array:
    """float32 [positions, V], of a short prompt and of one token after it."""
    caches = native_caches(model)
    logits = [model(mx.array([tokens]), cache=caches)[0].astype(mx.float32) for tokens in (_PROMPT, _NEXT)]
    found = mx.concatenate([x - mx.logsumexp(x, axis=-1, keepdims=True) for x in logits])
    mx.eval(found)
    return found


def fault_in(model: nn.Module, expected: mx.array, dtype: mx.Dtype) -> str | None:
    """What is wrong with a model whose log-probabilities were these, or None.

    Args:
        dtype: of activations, which says how much is taken for rounding.
    """
    try:
        worst = float(mx.abs(logprobs(model) - expected).max())
    except MODEL_FAULTS as error:
        return f"fails ({summary_of(error)})"
    limit = tolerance(dtype, mx.default_device().type)
    return None if worst <= limit else f"differs by {worst:.2g}"
