"""Numbers packed by affine quantisation, and attention over them."""

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
    """Attention over packed keys and values that lie in order; makes a dense copy of these for the moment.

    Products with the codes would save the copy, but they are slower, and wrong on CUDA where a row is not of
    whole 16 bytes. The copy is one layer's, small beside the scores that fused attention saves.

    Args:
        queries: [B, n_heads, L, key_dim], the last L of the S positions where `mask` is "causal".
        keys, values: [B, n_kv_heads, S, dim].
        mask: None, "causal", or bool or additive, [L, S] or [B, 1 or n_heads, L, S].
        sinks: [n_heads] extra logits that take weight and give no value, or None.
    Returns:
        [B, n_heads, L, value_dim] in the queries' dtype.
    """
    dense = (packed.dense().astype(queries.dtype) for packed in (keys, values))
    return mx.fast.scaled_dot_product_attention(queries, *dense, scale=scale, mask=mask, sinks=sinks)
