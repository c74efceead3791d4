"""Numbers packed by affine quantisation, and attention that multiplies with them as they are."""

import math
from dataclasses import dataclass

import mlx.core as mx

from mlxd.caches.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Packed:
    """[..., rows, dim] numbers, each `code * scale + bias` of its group along the last axis.

    Attributes:
        codes: uint32 [..., rows, dim * bits / 32].
        scales, biases: [..., rows, dim / group_size].
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array
    quantization: Quantization

    @property
    def planes(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.codes, self.scales, self.biases

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers, not of their codes."""
        return (*self.codes.shape[:-1], self.scales.shape[-1] * self.quantization.group_size)

    def unreadable(self) -> mx.array:
        """NaN in the shape and dtype of the numbers: for whoever should not read them; costs no memory."""
        return mx.broadcast_to(mx.array(math.nan, self.scales.dtype), self.shape)

    def dense(self) -> mx.array:
        """A dense copy, in the scales' dtype."""
        kind = self.quantization
        return mx.dequantize(*self.planes, group_size=kind.group_size, bits=kind.bits)

    def matmul(self, x: mx.array, *, transpose: bool) -> mx.array:
        """`x` times these matrices, or times their transposes; leading axes are equal."""
        # CUDA has no product of slices and transposes; elsewhere MLX would copy them itself.
        kind = self.quantization
        codes, scales, biases = map(mx.contiguous, self.planes)
        return mx.quantized_matmul(
            mx.contiguous(x),
            codes,
            scales,
            biases,
            transpose=transpose,
            group_size=kind.group_size,
            bits=kind.bits,
        )

    def gather_matmul(
        self, x: mx.array, matrix_of_x: mx.array, matrix: mx.array, *, transpose: bool
    ) -> mx.array:
        """Products of pairs: matrix `matrix_of_x[i]` of `x` and matrix `matrix[i]` of these, read in place.

        Args:
            x: [n, rows of x, inner].
            matrix_of_x, matrix: int32, of one shape; indexes over all leading axes, flattened.
        Returns:
            Shaped like the indexes, then [rows of x, dim], or [rows of x, rows] where transposed.
        """
        kind = self.quantization
        codes, scales, biases = (plane.reshape(-1, *plane.shape[-2:]) for plane in self.planes)
        return mx.gather_qmm(
            mx.contiguous(x),
            codes,
            scales,
            biases,
            lhs_indices=matrix_of_x,
            rhs_indices=matrix,
            transpose=transpose,
            group_size=kind.group_size,
            bits=kind.bits,
        )


def pack(numbers: mx.array, quantization: Quantization) -> Packed:
    """Quantises [..., dim]; dim must be a multiple of the group size."""
    codes, scales, biases = mx.quantize(numbers, group_size=quantization.group_size, bits=quantization.bits)
    return Packed(codes, scales, biases, quantization)


def attend(
    queries: mx.array,
    keys: Packed,
    values: Packed,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention over packed keys and values that lie in order, without a dense copy of them.

    Args:
        queries: [B, n_heads, L, key_dim], the last L of the S positions where `mask` is "causal".
        keys, values: [B, n_kv_heads, S, dim].
        mask: None, "causal", or bool or additive, [L, S] or [B, 1 or n_heads, L, S].
        sinks: [n_heads] extra logits that take weight and give no value, or None.
    Returns:
        [B, n_heads, L, value_dim] in the queries' dtype.
    """
    batch, query_heads, length, key_dim = queries.shape
    heads, columns = keys.codes.shape[1:3]
    group = query_heads // heads
    grouped = (queries * scale).reshape(batch, heads, group * length, key_dim)
    scores = keys.matmul(grouped, transpose=True).reshape(batch, heads, group, length, columns)
    if isinstance(mask, str):
        mask = mx.arange(columns) <= mx.arange(columns - length, columns)[:, None]
    if mask is not None:
        mask = _by_group(mask, heads)
        barred = mx.finfo(scores.dtype).min
        scores = mx.where(mask, scores, barred) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        sink = sinks.astype(scores.dtype).reshape(1, heads, group, 1, 1)
        scores = mx.concatenate([scores, mx.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., :columns]
    out = values.matmul(weights.reshape(batch, heads, group * length, columns), transpose=False)
    return out.astype(queries.dtype).reshape(batch, query_heads, length, -1)


def _by_group(mask: mx.array, heads: int) -> mx.array:
    """[B, 1 or n_heads, L, S] as [B, 1 or n_kv_heads, 1 or group, L, S]; others as they are."""
    if mask.ndim != 4:
        return mask
    return mx.unflatten(mask, 1, (min(heads, mask.shape[1]), -1))
