"""Has a model multiply few rows by our own kernel, where that is right."""

import logging

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching import product_kernel
from mlxd.batching.few_rows import FewRowsHead, FewRowsLinear, own_products
from mlxd.batching.kernel_check import LIMITS, relative_errors
from mlxd.batching.product_kernel import MOST_ROWS, ProductCase, multiply
from mlxd.batching.rewriting import TOGETHER, fault_in, logprobs
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of

logger = logging.getLogger(__name__)

_FEWER_ROWS = 3, 16
_NOTHING_KNOWN = "by MLX: no layers that the kernel knows"


def multiply_few_rows(model: nn.Module, dtype: mx.Dtype) -> str:
    """Rewrite `model` in place, its layers joined before; leave it as it was where the kernel is wrong.

    Args:
        dtype: of activations, which says how much is taken for rounding.
    Returns:
        What was rewritten, for people.
    """
    if not product_kernel.is_available():
        return "by MLX: there is a kernel for CUDA alone"
    was = [(layer, type(layer)) for layer in _layers_with_cases(model)]
    if not was:
        return _NOTHING_KNOWN
    try:
        expected = logprobs(model, TOGETHER)
    except MODEL_FAULTS as error:
        return f"by MLX: {summary_of(error)}"
    for layer, kind in was:
        layer.__class__ = _multiplying(kind)
    with own_products():
        fault = fault_in(model, expected, dtype, TOGETHER)
    served = [layer for layer, _ in was if layer.has_served]
    fault = f"the model {fault} then" if fault else _fault_in_kernel(served)
    for layer, kind in was:
        if fault is not None or not layer.has_served:
            layer.__class__ = kind
    if fault is not None:
        logger.warning("products of few rows are MLX's: %s", fault)
        return f"by MLX: {fault}"
    return f"by a kernel in {len(served)} layers" if served else _NOTHING_KNOWN


def _is_known(kind: type[nn.Module]) -> bool:
    is_embedding = issubclass(kind, nn.Embedding) and kind.as_linear is nn.Embedding.as_linear
    return kind is nn.Linear or is_embedding


def _multiplying(kind: type[nn.Module]) -> type[nn.Module]:
    """What a module of this class becomes, which keeps all that it holds."""
    return FewRowsLinear if kind is nn.Linear else type(FewRowsHead.__name__, (FewRowsHead, kind), {})


def _layers_with_cases(model: nn.Module) -> list[nn.Module]:
    """Layers that the kernel knows, each of which is told its product."""
    layers = []
    for module in {id(module): module for module in model.modules()}.values():
        if _is_known(type(module)):
            weight, bias = module.weight, module.get("bias")
            outputs, inner = weight.shape
            case = ProductCase(outputs, inner, weight.dtype, has_bias=bias is not None)
            if case.is_supported and (bias is None or bias.dtype == weight.dtype):
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
            found = multiply(case, x, weight, bias)
            fewer = [multiply(case, x[:rows], weight, bias) for rows in _FEWER_ROWS]
            mx.eval(expected, found, fewer)
        except (RuntimeError, ValueError) as error:
            return f"{summary_of(error)} in {case}"
        worst = max(relative_errors(found, expected))
        if not worst <= LIMITS[case.dtype]:
            return f"a row is off by {worst:.2g} of its norm in {case}"
        if not all(mx.array_equal(few, found[: few.shape[0]]) for few in fewer):
            return f"rows depend on those beside them in {case}"
    return None
