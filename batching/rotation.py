"""Rotary embeddings that attention may compute by itself: a step's rotations are noted until it attends.

MLX computes nothing that nobody reads. So a model's own rotation is built as ever, and an attention that
knows what was rotated, and how, reads that instead. Where a model does anything else with queries or keys on
their way they are not found here, and are read as they come.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxd.caches.mlx_lm_import import rope_utils

_WITH_PERIODS = (rope_utils.Llama3RoPE, rope_utils.ProportionalRoPE)


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary embedding of the first `dims` numbers of a head.

    Attributes:
        neighbours: a pair is two numbers side by side, not `dims / 2` apart.
        frequencies: float32 [dims / 2], radians a position.
    """

    dims: int
    neighbours: bool
    frequencies: mx.array = field(compare=False, repr=False)

    @classmethod
    def of_periods(cls, dims: int, neighbours: bool, periods: npt.NDArray[np.float64]) -> "Rotary":
        """`periods`: [dims / 2], positions a radian; infinite where nothing turns."""
        return cls(dims, neighbours, mx.array(1 / periods, mx.float32))

    def __call__(self, x: mx.array, positions: mx.array) -> mx.array:
        """[B, heads, 1, head_dim] of these positions, int32 [B], rotated by MLX."""
        periods = 1 / self.frequencies
        return mx.fast.rope(
            x, self.dims, traditional=self.neighbours, base=None, scale=1.0, offset=positions, freqs=periods
        )


class Rotations:
    """What was rotated in the step that is being built, one of a thread at a time."""

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._origins: dict[int, tuple[mx.array, mx.array, Rotary]] = {}

    @contextmanager
    def during(self, positions: mx.array) -> Iterator[None]:
        """Remember, until the block ends, what is rotated by these positions, int32 [B]."""
        self._positions = positions
        try:
            yield
        finally:
            self._positions = None
            self._origins.clear()

    def note(self, rotated: mx.array, origin: mx.array, rotary: Rotary, offset: object) -> None:
        if offset is self._positions:
            self._origins[id(rotated)] = rotated, origin, rotary

    def origin(self, rotated: mx.array) -> tuple[mx.array, Rotary] | None:
        """What became this very array by which rotation; None where that is not known."""
        found = self._origins.get(id(rotated))
        return None if found is None else found[1:]


class _Noted(nn.Module):
    """A rotary embedding that notes what it rotates."""

    def __init__(self, rope: nn.Module, rotary: Rotary, rotations: Rotations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rope = rope
        self.rotary = rotary
        self.rotations = rotations

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        rotated: mx.array = self.rope(x, offset=offset)
        self.rotations.note(rotated, x, self.rotary, offset)
        return rotated

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.get("rope"), name)


def note_rotations(model: nn.Module) -> Rotations:
    """Have the model's rotary embeddings of known kinds note what they rotate; once for all that ask."""
    noted = [module for module in model.modules() if isinstance(module, _Noted)]
    rotations = noted[0].rotations if noted else Rotations()
    for module in model.modules():
        if not isinstance(module, _Noted):
            for name, child in list(module.items()):
                if (rotary := _rotary(child)) is not None:
                    module[name] = _Noted(child, rotary, rotations)
    return rotations


def _rotary(module: Any) -> Rotary | None:
    """None where it is no rotary embedding, or one of a kind that is not known."""
    if type(module) is nn.RoPE:
        periods = module.base ** (np.arange(0, module.dims, 2) / module.dims) / module.scale
    elif type(module) in _WITH_PERIODS:
        periods = np.array(module._freqs, np.float64)
    else:
        return None
    return Rotary.of_periods(module.dims, module.traditional, periods)
