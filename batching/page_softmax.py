"""The softmax between scores and values where both lie in pages."""

import mlx.core as mx

from mlxd.batching.fast_exp import exp_of_difference


def softmax_over_pages(scores: mx.array, bias: mx.array, sinks: mx.array | None) -> tuple[mx.array, mx.array]:
    """Weights over pages and columns together, before they are divided by their sum.

    Args:
        scores: [B, T, n_kv_heads, group, page_size], any float dtype.
        bias: float32 [B, T, 1, 1, page_size], `PagedView.bias`.
        sinks: [n_kv_heads * group] extra logits that take weight and give no value, or None.
    Returns:
        Weights, float32 and shaped like `scores`, and their sum, [B, n_kv_heads, group].
    """
    _, _, heads, group, _ = scores.shape
    scores = scores.astype(mx.float32) + bias
    top = scores.max(axis=(1, 4), keepdims=True)
    if sinks is None:
        weights = exp_of_difference(scores, top)
        return weights, weights.sum(axis=(1, 4))
    sink = sinks.astype(mx.float32).reshape(1, 1, heads, group, 1)
    top = mx.maximum(top, sink)
    weights = exp_of_difference(scores, top)
    return weights, weights.sum(axis=(1, 4)) + mx.exp(sink - top).squeeze((1, 4))
