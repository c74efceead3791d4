"""The residual stream of a model: what is added to it is added where it is normed, in one launch.

mlx-lm's layers compute `h = x + r`, and then `norm(h)`. Here an embedding begins a stream of arrays that know
which two they are the sum of, and a norm that is given such a sum computes both. MLX computes nothing that
nobody reads, so whatever else a model does with a sum is right as well: it reads the plain one.
"""

import logging
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching import norm_check, norm_kernel
from mlxd.batching.norm_kernel import NormCase, add_and_norm
from mlxd.batching.own_forward import is_own_forward, own_forward
from mlxd.batching.rewriting import fault_in, logprobs
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of

logger = logging.getLogger(__name__)


class Residual(mx.array):
    """An array of the stream.

    Attributes:
        terms: what it is the sum of, until it is normed or changed in place; None where that is not known.
    """

    terms: tuple[mx.array, mx.array] | None = None

    def __init__(self, array: mx.array) -> None:
        super().__init__(array)
        self[...] = array  # which is no operation, whereas that made one

    def __add__(self, other: Any) -> "Residual":
        return _sum(self, other)

    def __radd__(self, other: Any) -> "Residual":
        return _sum(other, self)

    def __mul__(self, other: Any) -> "Residual":
        return Residual(mx.multiply(self, other))

    __rmul__ = __mul__


def _sum(first: Any, second: Any) -> Residual:
    total = Residual(mx.add(first, second))
    are_arrays = isinstance(first, mx.array) and isinstance(second, mx.array)
    if are_arrays and first.shape == second.shape and first.dtype == second.dtype:
        # Arrays of its own: the model may change in place what it added.
        total.terms = copy(first), copy(second)
    return total


_CHANGES = "setitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift"


def _forgetting(name: str) -> Any:
    change = getattr(mx.array, name)

    def method(self: Residual, *arguments: Any) -> Any:
        self.terms = None
        return change(self, *arguments)

    return method


for _name in _CHANGES.split():
    setattr(Residual, f"__{_name}__", _forgetting(f"__{_name}__"))


class _Norm(nn.RMSNorm):
    """Adds, too, where it is given a sum.

    Attributes:
        added: what it last asked of the kernel.
    """

    added: NormCase | None = None

    def __call__(self, x: mx.array) -> mx.array:
        if isinstance(x, Residual) and x.terms is not None and x.size > 0:
            case = NormCase(self.weight.size, x.dtype, self.weight.dtype, self.eps)
            if case.is_supported and x.shape[-1] == case.dims:
                self.added = case
                total, normed = add_and_norm(case, *x.terms, self.weight)
                x[...] = total  # what is added next, and all who hold this sum, go on from the kernel's
                return normed
        plain: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
        return plain


class _Embedding(nn.Embedding):
    def __call__(self, x: mx.array) -> mx.array:
        return _begin(super().__call__(x))  # type: ignore[no-untyped-call]


class _QuantizedEmbedding(nn.QuantizedEmbedding):
    def __call__(self, x: mx.array) -> mx.array:
        return _begin(super().__call__(x))  # type: ignore[no-untyped-call]


def _begin(embedded: mx.array) -> mx.array:
    return Residual(embedded) if is_own_forward() else embedded


_BECOMES: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: _Norm,
    nn.Embedding: _Embedding,
    nn.QuantizedEmbedding: _QuantizedEmbedding,
}
"""A module changes its class and keeps all that it holds."""
_WAS = {ours: theirs for theirs, ours in _BECOMES.items()}


def fuse_norms(model: nn.Module, dtype: mx.Dtype) -> str:
    """Have the model add where it norms, in our own forwards; leave it as it was where it then is wrong.

    Args:
        dtype: of activations, which says how much is taken for rounding.
    Returns:
        What was fused, for people.
    """
    if not norm_kernel.is_available():
        return "nothing: there is a kernel for CUDA alone"
    try:
        expected = logprobs(model)
    except MODEL_FAULTS as error:
        return f"nothing: {summary_of(error)}"
    modules = list({id(module): module for module in model.modules() if type(module) in _BECOMES}.values())
    _change(modules, _BECOMES)
    with own_forward():
        fault = fault_in(model, expected, dtype)
    norms = [module for module in modules if isinstance(module, _Norm)]
    cases = [norm.added for norm in norms if norm.added is not None]
    fault = norm_check.fault_in(dict.fromkeys(cases)) if fault is None else f"the model {fault} then"
    if cases and fault is None:
        _change([norm for norm in norms if norm.added is None], _WAS)
        return f"add+norm of {len(cases)} modules"
    _change(modules, _WAS)
    if fault is None:
        return "nothing: no norm that it knows is of a sum"
    logger.warning("norms do not add: %s", fault)
    return f"nothing: {fault}"


def _change(modules: Iterable[nn.Module], classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    for module in modules:
        module.__class__ = classes[type(module)]
