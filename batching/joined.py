"""Projections of one input as one product: a model computes the same in fewer and larger operations.

mlx-lm's modules call `q_proj(x)`, `k_proj(x)` and `v_proj(x)` one after the other. Here each of these becomes
a part of one layer that has all their weights: the part that is called first computes for all, the others
take what is theirs. Which projections belong together is heard, not known by name: those that a module
calls with the same array, each time that it is called.
"""

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.rewriting import fault_in, logprobs
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of

logger = logging.getLogger(__name__)

_KNOWN = (nn.Linear, nn.QuantizedLinear)
"""Layers whose arrays all begin with the outputs: to join each array is to join the outputs."""


def join_projections(model: nn.Module, dtype: mx.Dtype) -> str:
    """Rewrite `model` in place; leave it as it was where it would then compute something else.

    Joined layers' arrays are freed one group after the other: memory grows by one group at most.

    Args:
        dtype: of activations, which says how much is taken for rounding.
    Returns:
        What was joined, for people.
    """
    try:
        together, expected = _listen(model)
    except MODEL_FAULTS as error:
        return f"nothing: {summary_of(error)}"
    joins = [_Join(parent, names) for parent, group in together for names in _of_one_form(parent, group)]
    if not joins:
        return "nothing: no layers that it knows share their input"
    fault = fault_in(model, expected, dtype)
    if fault is not None:
        logger.warning("projections are not joined: the model %s then", fault)
        for join in joins:
            join.undo()
        return f"nothing: the model {fault} then"
    counts = Counter("+".join(join.names) for join in joins)
    return ", ".join(f"{names} of {count} modules" for names, count in counts.items())


class _Listener:
    """Stands in for a layer and notes the arrays that it is called with.

    Attributes:
        is_watched: whether anything but its result is looked at, which a part of a join does not have.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.inputs: list[mx.array] = []
        self.is_watched = False

    def __call__(self, x: mx.array) -> mx.array:
        self.inputs.append(x)
        result: mx.array = self.layer(x)
        return result

    def __getattr__(self, name: str) -> Any:
        self.is_watched = True
        return getattr(self.layer, name)


def _listen(model: nn.Module) -> tuple[list[tuple[nn.Module, list[str]]], mx.array]:
    """Modules with names of layers that they call with the same arrays; and what the model computes."""
    modules = list({id(module): module for module in model.modules()}.values())
    holders = Counter(id(child) for module in modules for child in module.values())
    heard: list[tuple[nn.Module, dict[str, _Listener]]] = []
    for module in modules:
        layers = {n: x for n, x in module.items() if type(x) in _KNOWN and holders[id(x)] == 1}
        if len(layers) > 1:
            heard.append((module, {name: _Listener(layer) for name, layer in layers.items()}))
    for module, listeners in heard:
        dict.update(module, listeners)
    try:
        computed = logprobs(model)
    finally:
        for module, listeners in heard:
            dict.update(module, {name: listener.layer for name, listener in listeners.items()})
    together = [(module, names) for module, listeners in heard for names in _with_same_inputs(listeners)]
    return together, computed


def _with_same_inputs(listeners: dict[str, _Listener]) -> Iterator[list[str]]:
    by_inputs: dict[tuple[int, ...], list[str]] = {}
    for name, listener in listeners.items():
        if listener.inputs and not listener.is_watched:
            by_inputs.setdefault(tuple(map(id, listener.inputs)), []).append(name)
    for inputs, names in by_inputs.items():
        if len(names) > 1 and len(set(inputs)) == len(inputs):
            yield names


def _of_one_form(module: nn.Module, names: Sequence[str]) -> Iterator[list[str]]:
    """Those whose arrays can be joined."""
    by_form: dict[object, list[str]] = {}
    for name in names:
        by_form.setdefault(_form(module[name]), []).append(name)
    yield from (group for group in by_form.values() if len(group) > 1)


def _form(layer: nn.Module) -> tuple[object, ...]:
    arrays = sorted((name, array.shape[1:], array.dtype) for name, array in _arrays(layer).items())
    packing = (layer.bits, layer.group_size, layer.mode) if isinstance(layer, nn.QuantizedLinear) else None
    return type(layer), packing, str(arrays)


def _arrays(layer: nn.Module) -> dict[str, mx.array]:
    return {name: array for name, array in layer.items() if isinstance(array, mx.array)}


class _Product:
    """A layer whose outputs its parts divide among them: computed for the first that asks.

    It keeps an input and its outputs until each part has asked for its own. A part that asks twice, or with
    another array, has it computed anew.
    """

    def __init__(self, layer: nn.Module, ends: Sequence[int]) -> None:
        self._layer = layer
        self._ends = list(ends)
        self._input: mx.array | None = None
        self._outputs: dict[int, mx.array] = {}

    def part(self, index: int, x: mx.array) -> mx.array:
        if x is not self._input or index not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(mx.split(self._layer(x), self._ends[:-1], axis=-1)))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output


class _Part(nn.Module):
    """What a module calls in the place of one of its joined layers.

    Attributes:
        joined: the layer with all the weights, held by the first part alone so that it is counted once.
    """

    def __init__(self, product: _Product, index: int, joined: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._product = product
        self._index = index
        if joined is not None:
            self.joined = joined

    def __call__(self, x: mx.array) -> mx.array:
        return self._product.part(self._index, x)


class _Join:
    """Layers of one module that were joined.

    Attributes:
        names: of the layers in the module.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._module = module
        layers = [module[name] for name in names]
        self._ends = list(accumulate(layer.weight.shape[0] for layer in layers))
        joined = self._joined = copy.copy(layers[0])
        for name in _arrays(joined):
            joined[name] = mx.concatenate([layer[name] for layer in layers])
        mx.eval(joined.parameters())
        product = _Product(joined, self._ends)
        for index, name in enumerate(names):
            module[name] = _Part(product, index, None if index else joined)
        del layers
        mx.clear_cache()  # freed arrays of these sizes are asked for by nobody

    def undo(self) -> None:
        for name, (start, end) in zip(self.names, pairwise((0, *self._ends)), strict=True):
            layer = self._module[name] = copy.copy(self._joined)
            for key, array in _arrays(layer).items():
                layer[key] = mx.contiguous(array[start:end])
            mx.eval(layer.parameters())
