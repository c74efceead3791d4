"""Decode attention over pages of packed keys and values, read where they lie."""

import mlx.core as mx

from mlxd.batching.page_softmax import softmax_over_pages
from mlxd.caches.quantized import QuantizedStandIn


def attend_packed_pages(
    stand_in: QuantizedStandIn, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    """Attention of one position a row.

    Args:
        queries: [B, n_heads, 1, key_dim], rotated.
        sinks: [n_heads] extra logits that take weight and give no value, or None.
    Returns:
        [B, n_heads, 1, value_dim] in the queries' dtype.
    """
    keys, values = stand_in.pools
    view = stand_in.view
    heads, size = keys.codes.shape[1:3]
    batch, query_heads, _, key_dim = queries.shape
    group = query_heads // heads
    pages = view.page_rows(heads)
    query = mx.arange(batch * heads, dtype=mx.int32).reshape(batch, 1, heads)
    scores = keys.gather_matmul(
        (queries * scale).reshape(batch * heads, group, key_dim),
        mx.broadcast_to(query, pages.shape),
        pages,
        transpose=True,
    )  # [B, T, heads, group, size]
    weights, total = softmax_over_pages(scores, view.bias, sinks)
    partial = values.gather_matmul(
        weights.astype(values.scales.dtype).reshape(-1, group, size),
        mx.arange(batch * heads * view.width, dtype=mx.int32).reshape(pages.shape),
        pages,
        transpose=False,
    )  # [B, T, heads, group, value_dim]
    out = partial.astype(mx.float32).sum(axis=1) / total[..., None]
    return out.astype(queries.dtype).reshape(batch, query_heads, 1, -1)
