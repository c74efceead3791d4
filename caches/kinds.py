"""Which of our cache kinds stands in for which of mlx-lm's; a new kind is one file and one line here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxd.caches.paged import LayerShape, PagedRows
from mlxd.caches.rotating import RotatingRows
from mlxd.caches.sizing import GroupSpec


class UnsupportedCacheError(Exception):
    """The model keeps a kind of state that no kind here serves; the message names it and its layers."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One cache kind.

    Attributes:
        native: the class in mlx-lm that it stands in for, matched exactly.
        window: the sliding window of such a cache, None for full attention.
        rows: the class that holds a layer of it.
    """

    native: type
    window: Callable[[Any], int | None]
    rows: type[PagedRows]


KINDS: tuple[Kind, ...] = (
    Kind(KVCache, lambda cache: None, PagedRows),
    Kind(RotatingKVCache, lambda cache: int(cache.max_size), RotatingRows),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One entry of a model's cache list: its kind, window and shape."""

    kind: Kind
    window: int | None
    shape: LayerShape

    @property
    def group(self) -> str:
        return "full" if self.window is None else f"sliding:{self.window}"


def native_caches(model: nn.Module) -> list[Any]:
    """mlx-lm's own caches for one row; the oracle in the self-test and the source of the layers' kinds."""
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    return [KVCache() for _ in model.layers]


def _kind_of(index: int, cache: object) -> Kind:
    name = type(cache).__name__
    for kind in KINDS:
        if type(cache) is kind.native:
            keep = getattr(cache, "keep", 0)
            if keep:
                raise UnsupportedCacheError(f"layer {index} keeps {keep} attention sinks in a {name}")
            return kind
    known = ", ".join(kind.native.__name__ for kind in KINDS)
    raise UnsupportedCacheError(f"layer {index} needs {name}; supported are {known}")


class _ShapeProbe:
    """Stands in for a cache during one unevaluated forward and notes what it is given."""

    offset = 0

    def __init__(self) -> None:
        self.seen: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.seen = keys, values
        return keys, values

    def make_mask(self, *args: object, **kwargs: object) -> None:
        return None


def inspect_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Kinds and shapes of the model's caches; builds a one-token graph and evaluates nothing.

    Raises:
        UnsupportedCacheError: a layer needs a kind that is not in KINDS, or stores nothing.
    """
    natives = native_caches(model)
    kinds = [_kind_of(index, cache) for index, cache in enumerate(natives)]
    probes = [_ShapeProbe() for _ in natives]
    model(mx.zeros((1, 1), mx.int32), cache=probes)
    layers = []
    for index, (kind, native, probe) in enumerate(zip(kinds, natives, probes, strict=True)):
        if probe.seen is None:
            raise UnsupportedCacheError(
                f"layer {index} stores no keys and values in its {type(native).__name__}"
            )
        keys, values = probe.seen
        shape = LayerShape(index, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        layers.append(Layer(kind, kind.window(native), shape))
    return tuple(layers)


def group_specs(layers: Sequence[Layer], page_size: int) -> tuple[GroupSpec, ...]:
    """Layers of one kind and window share page tables; groups come in order of their first layer."""
    names = list(dict.fromkeys(layer.group for layer in layers))
    specs = []
    for name in names:
        members = [layer for layer in layers if layer.group == name]
        specs.append(
            GroupSpec(
                name=name,
                layers=tuple(layer.shape.index for layer in members),
                window=members[0].window,
                page_size=page_size,
                bytes_per_token=sum(layer.shape.bytes_per_token for layer in members),
            )
        )
    return tuple(specs)
