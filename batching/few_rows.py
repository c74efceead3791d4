"""Layers whose products with a few rows are computed by a kernel of our own, in decode steps that say so.

Everything else that calls a layer, prefill and rows alone among it, has MLX compute as ever.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching import product_kernel
from mlxd.batching.kernel_check import LIMITS, relative_errors
from mlxd.batching.product_kernel import FEWEST_ROWS, MOST_ROWS, ProductCase, multiply
from mlxd.batching.rewriting import TOGETHER, fault_in, logprobs
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of

logger = logging.getLogger(__name__)

_are_own: ContextVar[bool] = ContextVar("are_own", default=False)
_CHECKED_ROWS = 3
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


class _Linear(nn.Linear):
    """Attributes:
    product: of its weight.
    """

    product: ProductCase

    def __call__(self, x: mx.array) -> mx.array:
        if _is_served(self.product, x):
            return multiply(self.product, x, self.weight, self.get("bias"))
        plain: mx.array = super().__call__(x)
        return plain


class _Head(nn.Embedding):
    """An embedding that is the head, too."""

    product: ProductCase

    def as_linear(self, x: mx.array) -> mx.array:
        if _is_served(self.product, x):
            return multiply(self.product, x, self.weight)
        plain: mx.array = super().as_linear(x)  # type: ignore[no-untyped-call]
        return plain


def _is_served(case: ProductCase, x: mx.array) -> bool:
    if not _are_own.get() or x.dtype != case.dtype or x.shape[-1] != case.inner:
        return False
    return FEWEST_ROWS * case.inner <= x.size <= MOST_ROWS * case.inner


def _is_known(kind: type[nn.Module]) -> bool:
    is_embedding = issubclass(kind, nn.Embedding) and kind.as_linear is nn.Embedding.as_linear
    return kind is nn.Linear or is_embedding


def _multiplying(kind: type[nn.Module]) -> type[nn.Module]:
    """What a module of this class becomes, which keeps all that it holds."""
    return _Linear if kind is nn.Linear else type(_Head.__name__, (_Head, kind), {})


def multiplies_few_rows(model: nn.Module) -> bool:
    """Whether any of its layers was rewritten."""
    return any(isinstance(module, _Linear | _Head) for module in model.modules())


def multiply_few_rows(model: nn.Module, dtype: mx.Dtype) -> str:
    """Rewrite `model` in place, its layers joined before; leave it as it was where the kernel is wrong.

    Args:
        dtype: of activations, which says how much is taken for rounding.
    Returns:
        What was rewritten, for people.
    """
    if not product_kernel.is_available():
        return "by MLX: there is a kernel for CUDA alone"
    try:
        expected = logprobs(model, TOGETHER)
    except MODEL_FAULTS as error:
        return f"by MLX: {summary_of(error)}"
    was = [(module, type(module)) for module in _layers_with_cases(model)]
    if not was:
        return "by MLX: no layers that the kernel knows"
    for module, kind in was:
        module.__class__ = _multiplying(kind)
    fault = _fault_in_kernel([module for module, _ in was])
    if fault is None:
        with own_products():
            fault = fault_in(model, expected, dtype, TOGETHER)
        fault = fault and f"the model {fault} then"
    if fault is not None:
        for module, kind in was:
            module.__class__ = kind
        logger.warning("products of few rows are MLX's: %s", fault)
        return f"by MLX: {fault}"
    return f"by a kernel in {len(was)} layers"


def _layers_with_cases(model: nn.Module) -> list[nn.Module]:
    """Layers that the kernel knows, each of which is told its product."""
    layers = []
    for module in {id(module): module for module in model.modules()}.values():
        if _is_known(type(module)):
            outputs, inner = module.weight.shape
            case = ProductCase(outputs, inner, module.weight.dtype, has_bias="bias" in module)
            if case.is_supported:
                module.product = case
                layers.append(module)
    return layers


def _fault_in_kernel(layers: list[nn.Module]) -> str | None:
    """What the kernel does wrong with random rows, of one layer of each case; or None."""
    for case, layer in {layer.product: layer for layer in layers}.items():
        x = mx.random.normal((MOST_ROWS, 1, case.inner), key=mx.random.key(0)).astype(case.dtype)
        weight, bias = layer.weight, layer.get("bias")
        expected = x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)
        try:
            many = multiply(case, x, weight, bias)
            few = multiply(case, x[:_CHECKED_ROWS], weight, bias)
            mx.eval(expected, many, few)
        except (RuntimeError, ValueError) as error:
            return f"{summary_of(error)} in {case}"
        worst = max(relative_errors(many, expected))
        if not worst <= LIMITS[case.dtype]:
            return f"a row is off by {worst:.2g} of its norm in {case}"
        if not mx.array_equal(few, many[:_CHECKED_ROWS]):
            return f"rows depend on those beside them in {case}"
    return None
