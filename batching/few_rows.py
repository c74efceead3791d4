"""Layers whose products with a few rows are computed by a kernel of our own, in decode steps that say so.

Everything else that calls a layer, prefill and rows alone among it, has MLX compute as ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.product_kernel import FEWEST_ROWS, MOST_ROWS, ProductCase, multiply

_are_own: ContextVar[bool] = ContextVar("are_own", default=False)
ROW_BUCKETS = frozenset(1 << i for i in range(FEWEST_ROWS.bit_length() - 1, MOST_ROWS.bit_length()))
"""That the kernel serves: powers of two."""


@contextmanager
def own_products(are_own: bool = True) -> Iterator[None]:
    """What models multiply in the block, on this thread, is multiplied by the kernel where it knows how."""
    token = _are_own.set(are_own)
    try:
        yield
    finally:
        _are_own.reset(token)


class FewRowsLinear(nn.Linear):
    """A dense layer.

    Attributes:
        product: of its weight.
        has_served: whether it was ever asked for one of our own.
    """

    product: ProductCase
    has_served = False

    def __call__(self, x: mx.array) -> mx.array:
        if _serves(self, x):
            return multiply(self.product, x, self.weight, self.get("bias"))
        plain: mx.array = super().__call__(x)
        return plain


class FewRowsHead(nn.Embedding):
    """An embedding that may be the head, too. Attributes: as of `FewRowsLinear`."""

    product: ProductCase
    has_served = False

    def as_linear(self, x: mx.array) -> mx.array:
        if _serves(self, x):
            return multiply(self.product, x, self.weight)
        plain: mx.array = super().as_linear(x)  # type: ignore[no-untyped-call]
        return plain


def _serves(layer: FewRowsLinear | FewRowsHead, x: mx.array) -> bool:
    case = layer.product
    if not _are_own.get() or x.dtype != case.dtype or x.shape[-1] != case.inner:
        return False
    if not FEWEST_ROWS * case.inner <= x.size <= MOST_ROWS * case.inner:
        return False
    layer.has_served = True
    return True


def multiplies_few_rows(model: nn.Module) -> bool:
    """Whether any of its layers was rewritten."""
    return any(isinstance(module, FewRowsLinear | FewRowsHead) for module in model.modules())
