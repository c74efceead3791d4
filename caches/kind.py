"""What a kind of cache says of itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxd.caches.contract import RowCache
from mlxd.caches.paged import LayerShape
from mlxd.caches.recurrent import StateShape
from mlxd.caches.row_group import RowGroup

Shape = LayerShape | StateShape


@dataclass(frozen=True, slots=True)
class Kind:
    """One cache kind.

    Attributes:
        native: the class in mlx-lm that it stands in for, matched exactly.
        group: name of the group that a layer of it belongs to; layers of one name share page tables.
        window: the sliding window of such a cache, None for full attention.
        shape: (flat index, what a short forward left) -> the layer's shape, None where it stored nothing.
        make: the cache of one layer: (shape, group, num_pages).
        probes: whether that forward gets a probe in place of the native cache.
        make_packed: its packed form, of a QuantizedShape; None where there is nothing to pack.
        make_delayed: its form that is packed on its way, of a DelayedShape; None where there is none.
    """

    native: type
    group: Callable[[Any], str]
    window: Callable[[Any], int | None]
    shape: Callable[[int, Any], Shape | None]
    make: Callable[[Any, RowGroup, int], RowCache]
    probes: bool = True
    make_packed: Callable[[Any, RowGroup, int], RowCache] | None = None
    make_delayed: Callable[[Any, RowGroup, int], RowCache] | None = None
