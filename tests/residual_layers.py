"""Small models with a residual stream: one as mlx-lm's are, and layers that do more with it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.own_forward import own_forward
from mlxd.batching.residual import fuse_norms

DIM = 64
VOCAB = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def __call__(self, x: mx.array) -> mx.array:
        h = x + self.first(self.first_norm(x))
        return self.second(self.second_norm(h)) + h


class Model(nn.Module):
    """Two layers between an embedding and its transpose; it keeps no state."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = [layer(), layer()]
        self.norm = nn.RMSNorm(DIM)
        self.make_cache = list

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.as_linear(self.norm(x))


TOKENS = mx.array([[5, 3, 1], [2, 0, 7]])


def logits(model: nn.Module) -> mx.array:
    with own_forward():
        result: mx.array = model(TOKENS)
        mx.eval(result)
    return result


def fused(layer: Callable[[], nn.Module] = Layer) -> tuple[nn.Module, nn.Module, str]:
    """A model whose norms add, the same one untouched, and what was fused."""
    mx.random.seed(0)
    apart = Model(layer)
    model = deepcopy(apart)
    return model, apart, fuse_norms(model, mx.float32)


class Scaled(Layer):
    def __call__(self, x: mx.array) -> mx.array:
        h = 0.5 * x + self.first(self.first_norm(x))
        return h * 2.0 + self.second(self.second_norm(h))


class ReadElsewhere(Layer):
    """The sum is read before it is normed, and after."""

    def __call__(self, x: mx.array) -> mx.array:
        h = x + self.first(self.first_norm(x))
        before = mx.tanh(h)
        normed = self.second_norm(h)
        return h + before * mx.exp(-h * h) + self.second(normed) + self.second_norm(h)


class ChangedTerm(Layer):
    """What was added is changed before the sum is normed."""

    def __call__(self, x: mx.array) -> mx.array:
        added = self.first(self.first_norm(x))
        h = x + added
        added *= 3.0
        return h + self.second(self.second_norm(h)) + added


class ChangedInPlace(Layer):
    """A sum is changed before it is normed, and after, under another name."""

    def __call__(self, x: mx.array) -> mx.array:
        h = x + self.first(self.first_norm(x))
        same = h
        h += 1.0
        h[..., 0] = 0.5
        normed = self.second_norm(h)
        same -= 0.25
        return h + self.second(normed)


class Parallel(Layer):
    def __call__(self, x: mx.array) -> mx.array:
        normed = self.first_norm(x)
        return x + self.first(normed) + self.second(normed)


class OtherShapes(Layer):
    def __call__(self, x: mx.array) -> mx.array:
        h = x + self.first(self.first_norm(x)).sum(axis=1, keepdims=True)
        return h + self.second(self.second_norm(h + 1.0))


class Wider(Layer):
    """What is added is of another precision."""

    def __call__(self, x: mx.array) -> mx.array:
        h = x + self.first(self.first_norm(x)).astype(mx.float16).astype(mx.float32)
        half = h.astype(mx.float16) + h
        return h + self.second(self.second_norm(half))


class Particular(Layer):
    """Takes no norm but mlx-lm's."""

    def __call__(self, x: mx.array) -> mx.array:
        if type(self.second_norm) is not nn.RMSNorm:
            raise TypeError("no RMSNorm")
        return super().__call__(x)
