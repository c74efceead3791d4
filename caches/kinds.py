"""Which of our cache kinds stands in for which of mlx-lm's; a new kind is one file and its entry here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxd.caches.composite import Path, assemble
from mlxd.caches.delayed import DelayedRows
from mlxd.caches.delayed_step import DelayedShape
from mlxd.caches.kind import Kind, Shape
from mlxd.caches.mlx_lm_import import ArraysCache, CacheList, KVCache, RotatingKVCache
from mlxd.caches.model_faults import MODEL_FAULTS
from mlxd.caches.packed import pack
from mlxd.caches.paged import LayerShape, PagedRows
from mlxd.caches.quantization import Quantization
from mlxd.caches.quantized import QuantizedRotatingRows, QuantizedRows, QuantizedShape
from mlxd.caches.recurrent import RecurrentRows, StateShape
from mlxd.caches.rotating import RotatingRows
from mlxd.caches.sizing import ENDLESS, GroupSpec


class UnsupportedCacheError(Exception):
    """The model keeps a kind of state that no kind here serves; the message names it and its layers."""


REFUSED = {
    "minimax_m3_vl": "its sparse attention counts columns of the buffer, not positions of the row",
    "phi3small": "its sparse attention counts columns of the buffer, and adds truth values to scores",
}
"""Model files whose fault a self-test at its lengths cannot see, or does not survive; and the fault."""

_PROBE_TOKENS = 16
"""Enough that state which grows with the first tokens has its full size."""


class _ShapeProbe:
    """Stands in for a cache during one unevaluated forward and notes what it is given."""

    offset = 0

    def __init__(self) -> None:
        self.seen: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.seen = self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array] | None:
        return self.seen

    def make_mask(self, *args: object, **kwargs: object) -> None:
        return None


def _attention_shape(index: int, probe: _ShapeProbe) -> LayerShape | None:
    if probe.seen is None:
        return None
    keys, values = probe.seen
    return LayerShape(index, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)


def _state_shape(index: int, native: Any) -> StateShape | None:
    if any(array is None for array in native.cache):
        return None
    return StateShape(index, tuple((tuple(array.shape[1:]), array.dtype) for array in native.cache))


KINDS: tuple[Kind, ...] = (
    Kind(
        KVCache,
        lambda cache: "full",
        lambda cache: None,
        _attention_shape,
        PagedRows,
        make_packed=QuantizedRows,
        make_delayed=DelayedRows,
    ),
    Kind(
        RotatingKVCache,
        lambda cache: f"sliding:{cache.max_size}",
        lambda cache: int(cache.max_size),
        _attention_shape,
        RotatingRows,
        make_packed=QuantizedRotatingRows,
        make_delayed=DelayedRows,
    ),
    Kind(ArraysCache, lambda cache: "state", lambda cache: None, _state_shape, RecurrentRows, probes=False),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One cache of a model: its kind, place, window and shape."""

    kind: Kind
    path: Path
    group: str
    window: int | None
    shape: Shape


def native_caches(model: nn.Module) -> list[Any]:
    """mlx-lm's own caches for one row; the oracle in the self-test and the source of the layers' kinds."""
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    return [KVCache() for _ in model.layers]


def rounded_caches(model: nn.Module, quantization: Quantization) -> list[Any]:
    """`native_caches` that store what packing leaves of each number: the oracle of packed kinds."""
    caches = native_caches(model)
    round_caches(caches, quantization)
    return caches


def round_caches(caches: Sequence[Any], quantization: Quantization) -> None:
    """Have these caches of mlx-lm store what packing leaves of each number, those they hold included."""
    for path, native in _flatten(caches):
        if _kind_of(path[0], native).make_packed is None:
            continue
        if native.keys is not None:
            native.keys, native.values = (
                pack(array, quantization).dense() for array in (native.keys, native.values)
            )
        native.update_and_fetch = _rounding(native.update_and_fetch, quantization)


def _rounding(update: Callable[..., Any], quantization: Quantization) -> Callable[..., Any]:
    def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
        return update(pack(keys, quantization).dense(), pack(values, quantization).dense())

    return update_and_fetch


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


def inspect_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Kinds and shapes of the model's caches; builds the graph of a few tokens and evaluates nothing.

    Raises:
        UnsupportedCacheError: a layer needs a kind that is not in KINDS, or stores nothing; or the model is
            known to be wrong, or fails on this device.
    """
    name = type(model).__module__.rpartition(".")[2]
    if name in REFUSED:
        raise UnsupportedCacheError(f"{name} is not served: {REFUSED[name]}")
    flat = list(_flatten(native_caches(model)))
    kinds = [_kind_of(path[0], native) for path, native in flat]
    seen = [_ShapeProbe() if kind.probes else native for kind, (_, native) in zip(kinds, flat, strict=True)]
    paths = [path for path, _ in flat]
    try:
        model(mx.zeros((1, _PROBE_TOKENS), mx.int32), cache=assemble(paths, seen))
    except MODEL_FAULTS as error:
        raise UnsupportedCacheError(f"{name} cannot run here: {' '.join(str(error).split())}") from error
    layers = []
    for index, (kind, (path, native), got) in enumerate(zip(kinds, flat, seen, strict=True)):
        shape = kind.shape(index, got)
        if shape is None:
            raise UnsupportedCacheError(f"layer {path[0]} stores nothing in its {type(native).__name__}")
        layers.append(Layer(kind, path, kind.group(native), kind.window(native), shape))
    return tuple(layers)


def packed_layers(layers: Sequence[Layer], quantization: Quantization) -> tuple[Layer, ...]:
    """The same layers, those with keys and values in their packed form.

    Raises:
        UnsupportedCacheError: a head's width is not a multiple of the group size, or no layer can be packed.
    """
    if not any(layer.kind.make_packed for layer in layers):
        raise UnsupportedCacheError("the model keeps no keys and values that could be quantised")
    return tuple(_packed(layer, quantization) for layer in layers)


def _packed(layer: Layer, quantization: Quantization) -> Layer:
    kind, shape = layer.kind, layer.shape
    if kind.make_packed is None or not isinstance(shape, LayerShape):
        return layer
    for dim in (shape.key_dim, shape.value_dim):
        if dim % quantization.group_size:
            raise UnsupportedCacheError(
                f"layer {layer.path[0]} has heads {dim} wide, not a multiple of group_size, "
                f"{quantization.group_size}"
            )
    make, form = kind.make_packed, QuantizedShape
    if quantization.start:
        if kind.make_delayed is None:
            raise UnsupportedCacheError(f"layer {layer.path[0]} can only be packed with start: 0")
        make, form = kind.make_delayed, DelayedShape
    return replace(
        layer,
        kind=replace(kind, make=make),
        shape=form(shape.index, shape.n_kv_heads, shape.key_dim, shape.value_dim, shape.dtype, quantization),
    )


def _flatten(natives: Sequence[Any]) -> list[tuple[Path, Any]]:
    flat: list[tuple[Path, Any]] = []
    for entry, native in enumerate(natives):
        if type(native) is CacheList:
            flat += [((entry, place), member) for place, member in enumerate(native.caches)]
        else:
            flat.append(((entry,), native))
    return flat


def group_specs(layers: Sequence[Layer], page_size: int, chunk: int = 0) -> tuple[GroupSpec, ...]:
    """Layers of one kind and window share page tables; groups come in order of their first layer.

    Args:
        chunk: prefill chunk in tokens, whole pages, at whose multiples rows may be packed; 0: one page.
    """
    names = list(dict.fromkeys(layer.group for layer in layers))
    specs: list[GroupSpec] = []
    for name in names:
        members = [layer for layer in layers if layer.group == name]
        state_bytes = sum(s.bytes_per_row for m in members if isinstance(s := m.shape, StateShape))
        spec = GroupSpec(
            name=name,
            layers=tuple(layer.shape.index for layer in members),
            window=members[0].window,
            page_size=ENDLESS if state_bytes else page_size,
            bytes_per_token=sum(layer.shape.bytes_per_token for layer in members),
            state_bytes=state_bytes,
        )
        delayed = [layer.shape for layer in members if isinstance(layer.shape, DelayedShape)]
        specs += _dense_then_packed(spec, delayed, chunk or page_size) if delayed else [spec]
    return tuple(specs)


def _dense_then_packed(packed: GroupSpec, shapes: Sequence[DelayedShape], chunk: int) -> list[GroupSpec]:
    """The two groups that rows of delayed layers pass through; all layers of a group are delayed alike."""
    assert len(shapes) == len(packed.layers), f"only some layers of {packed.name} are delayed"
    boundary = -(-shapes[0].quantization.start // chunk) * chunk
    successor = f"{packed.name}:packed"
    dense = replace(
        packed,
        name=f"{packed.name}:dense",
        bytes_per_token=sum(shape.dense.bytes_per_token for shape in shapes),
        until=boundary,
        successor=successor,
    )
    return [dense, replace(packed, name=successor, since=boundary)]
