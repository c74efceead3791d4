"""SwiGLU by a faster exp, in our own forwards on MLX's CPU build; all others compute as mlx-lm does."""

from collections.abc import Callable
from types import ModuleType

import mlx.core as mx

from mlxd.batching.device import on_cpu
from mlxd.batching.fast_exp import fast_swiglu
from mlxd.batching.own_forward import is_own_forward
from mlxd.caches.mlx_lm_import import activations

_NAME = "swiglu"
_Activation = Callable[[mx.array, mx.array], mx.array]


def install_activations(modules: list[ModuleType]) -> None:
    """In the modules that define a model's layers; for the life of the process, and once."""
    for module in modules if on_cpu() else ():
        if getattr(module, _NAME, None) is activations.swiglu:
            setattr(module, _NAME, _swiglu(activations.swiglu))


def _swiglu(original: _Activation) -> _Activation:
    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        is_fast = is_own_forward() and gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape
        return fast_swiglu(gate, x) if is_fast else original(gate, x)

    return swiglu
