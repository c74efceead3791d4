"""Products with packed weights that are read once for all rows of a batch.

Where rows are a batch's first axis, MLX's CUDA build takes them for as many products and reads and unpacks
the weight for each. Here they are the rows of one product, in our own forwards.
"""

import logging

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.device import unpacks_by_batch
from mlxd.batching.own_forward import is_own_forward, own_forward
from mlxd.batching.rewriting import TOGETHER, fault_in, logprobs
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of

logger = logging.getLogger(__name__)


class _Linear(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        flat: mx.array = super().__call__(_together(x))  # type: ignore[no-untyped-call]
        return flat.reshape(*x.shape[:-1], flat.shape[-1])


class _Embedding(nn.QuantizedEmbedding):
    def as_linear(self, x: mx.array) -> mx.array:
        flat: mx.array = super().as_linear(_together(x))  # type: ignore[no-untyped-call]
        return flat.reshape(*x.shape[:-1], flat.shape[-1])


def _together(x: mx.array) -> mx.array:
    """[rows, inner] of [..., inner], in our own forwards."""
    return x.reshape(-1, x.shape[-1]) if is_own_forward() and x.ndim > 2 else x


_BECOMES: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: _Linear,
    nn.QuantizedEmbedding: _Embedding,
}
"""A module changes its class and keeps all that it holds."""


def multiply_packed_together(model: nn.Module, dtype: mx.Dtype) -> str:
    """Rewrite `model` in place, its layers joined before; leave it as it was where it then is wrong.

    Args:
        dtype: of activations, which says how much is taken for rounding.
    Returns:
        What was rewritten, for people; nothing where nothing needed to be.
    """
    modules = list({id(module): module for module in model.modules() if type(module) in _BECOMES}.values())
    if not modules or not unpacks_by_batch():
        return ""
    try:
        expected = logprobs(model, TOGETHER)
    except MODEL_FAULTS as error:
        return f"packed ones a row at a time: {summary_of(error)}"
    was = [(module, type(module)) for module in modules]
    for module, kind in was:
        module.__class__ = _BECOMES[kind]
    with own_forward():
        fault = fault_in(model, expected, dtype, TOGETHER)
    if fault is None:
        return f"all rows at once in {len(modules)} packed layers"
    for module, kind in was:
        module.__class__ = kind
    logger.warning("products with packed weights go a row at a time: the model %s otherwise", fault)
    return f"packed ones a row at a time: the model {fault} otherwise"
