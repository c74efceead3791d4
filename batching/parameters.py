"""What a model is made of."""

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def parameters_of(model: nn.Module) -> list[mx.array]:
    """All of them, evaluated or not, in the model's order."""
    # Without a destination tree_flatten makes a list of pairs.
    pairs = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    return [array for _, array in pairs]


def main_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype of most floating-point parameters, so of activations."""
    sizes: dict[mx.Dtype, int] = {}
    for array in parameters_of(model):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return max(sizes, key=lambda dtype: sizes[dtype])
