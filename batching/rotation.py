"""Rotary embeddings in a decode step: angles are computed once, and attention may rotate by itself.

A model's embedding is asked what it makes of unit vectors; so its cosines and sines are known, whatever its
kind, and are those of all layers that rotate alike. What is rotated is noted until it attends: MLX computes
nothing that nobody reads, so an attention that rotates by itself reads what was rotated instead. Where a
model does anything else with queries or keys on their way they are not found here, and are read as they come.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxd.batching.device import on_cpu
from mlxd.caches.mlx_lm_import import rope_utils

_KNOWN = (
    nn.RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)
_TRIED_POSITIONS = (0, 1, 1000)
_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Rotary:
    """Which numbers of a head's first `dims` are turned together: neighbours, or those dims / 2 apart."""

    dims: int
    neighbours: bool

    @property
    def _pairs(self) -> tuple[int, int]:
        return (self.dims // 2, 2) if self.neighbours else (2, self.dims // 2)

    def units(self) -> mx.array:
        """float32 [1, 1, 1, dims]: 1 for the first of each pair, 0 for the second."""
        first = mx.array([1.0, 0.0]).reshape((1, 2) if self.neighbours else (2, 1))
        return mx.broadcast_to(first, self._pairs).reshape(1, 1, 1, self.dims)

    def factors(self, turns: mx.array) -> tuple[mx.array, mx.array]:
        """float32 [B, 1, 1, *pairs] each: of a number, and of the other one of its pair.

        Args:
            turns: float32 [B, dims], the units as they are turned: a pair's cosine and its sine.
        """
        axis = -1 if self.neighbours else -2
        cosines, sines = mx.split(turns.reshape(-1, 1, 1, *self._pairs), 2, axis)
        return mx.concatenate([cosines, cosines], axis), mx.concatenate([-sines, sines], axis)

    def turn(self, heads: mx.array, factors: tuple[mx.array, mx.array]) -> mx.array:
        """[B, heads, 1, head_dim], turned; computed in float32."""
        pairs = heads[..., : self.dims].reshape(*heads.shape[:-1], *self._pairs)
        others = pairs[..., ::-1] if self.neighbours else pairs[..., ::-1, :]
        turned = _turned(pairs, others, *factors).astype(heads.dtype).reshape(*heads.shape[:-1], self.dims)
        if self.dims == heads.shape[-1]:
            return turned
        return mx.concatenate([turned, heads[..., self.dims :]], axis=-1)


@mx.compile
def _turned(x: mx.array, other: mx.array, of_x: mx.array, of_other: mx.array) -> mx.array:
    return x * of_x + other * of_other


@dataclass(frozen=True, slots=True)
class Turns:
    """One rotary embedding in a step. `table`: float32 [B, dims], see `Rotary.factors`."""

    rotary: Rotary
    table: mx.array
    factors: tuple[mx.array, mx.array]


class Rotations:
    """What is rotated in the step that is being built; of one thread."""

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._turns: dict[bytes, Turns] = {}
        self._origins: dict[int, tuple[mx.array, mx.array, Turns]] = {}

    @contextmanager
    def during(self, positions: mx.array) -> Iterator[None]:
        """Know, until the block ends, what is rotated by these positions, int32 [B]."""
        self._positions = positions
        try:
            yield
        finally:
            self._positions = None
            self._turns.clear()
            self._origins.clear()

    def turns(self, rope: "NotedRope", offset: object) -> Turns | None:
        """None where these are not the step's positions."""
        if self._positions is None or offset is not self._positions:
            return None
        if rope.identity not in self._turns:
            table = _table(rope.rope, rope._units, self._positions)
            self._turns[rope.identity] = Turns(rope.rotary, table, rope.rotary.factors(table))
        return self._turns[rope.identity]

    def note(self, rotated: mx.array, origin: mx.array, turns: Turns) -> None:
        self._origins[id(rotated)] = rotated, origin, turns

    def origin(self, rotated: mx.array) -> tuple[mx.array, Turns] | None:
        """What became this very array, and by which turns; None where that is not known."""
        found = self._origins.get(id(rotated))
        return None if found is None else found[1:]


class NotedRope(nn.Module):
    """A rotary embedding whose rotations are noted.

    Attributes:
        identity: equal for embeddings that rotate alike.
    """

    def __init__(self, rope: nn.Module, rotary: Rotary, rotations: Rotations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rope = rope
        self.rotary = rotary
        self.rotations = rotations
        self._units = rotary.units()  # with an underscore it is no parameter of the model
        table = np.array(_table(rope, self._units, mx.array(_TRIED_POSITIONS, mx.int32)))
        self.identity = repr(rotary).encode() + table.tobytes()

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        turns = self.rotations.turns(self, offset) if x.ndim == 4 and x.shape[2] == 1 else None
        if turns is None:
            rotated: mx.array = self.rope(x, offset=offset)
            return rotated
        # MLX's own takes a dozen operations there.
        rotated = self.rotary.turn(x, turns.factors) if on_cpu() else self.rope(x, offset=offset)
        self.rotations.note(rotated, x, turns)
        return rotated

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.get("rope"), name)


def note_rotations(model: nn.Module) -> Rotations:
    """Have the rotations of the model's embeddings of known kinds noted; once for all that ask."""
    noted = [module for module in model.modules() if isinstance(module, NotedRope)]
    rotations = noted[0].rotations if noted else Rotations()
    for module in model.modules():
        if not isinstance(module, NotedRope):
            for name, child in list(module.items()):
                if type(child) in _KNOWN and (rotary := _rotary(child)) is not None:
                    module[name] = NotedRope(child, rotary, rotations)
    return rotations


def _rotary(rope: Any) -> Rotary | None:
    """None where it does something else than to turn pairs."""
    if isinstance(rope, rope_utils.SuScaledRoPE):
        rotary = Rotary(rope.dim, neighbours=False)
    else:
        rotary = Rotary(rope.dims, rope.traditional)
    positions = mx.array(_TRIED_POSITIONS, mx.int32)
    heads = mx.random.normal((len(_TRIED_POSITIONS), 2, 1, rotary.dims), key=mx.random.key(0))
    turned = rotary.turn(heads, rotary.factors(_table(rope, rotary.units(), positions)))
    is_known = mx.allclose(turned, rope(heads, offset=positions), atol=_ROUNDING)
    return rotary if is_known.item() else None


def _table(rope: nn.Module, units: mx.array, positions: mx.array) -> mx.array:
    """float32 [B, dims], the units as the embedding turns them."""
    rows, dims = positions.shape[0], units.shape[-1]
    # MLX's CUDA rotation reads rows that are broadcast as if they were apart.
    turned: mx.array = rope(mx.contiguous(mx.broadcast_to(units, (rows, 1, 1, dims))), offset=positions)
    return turned.reshape(rows, dims)
