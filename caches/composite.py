"""Several caches in one layer: the model sees them as a list, everything else one by one."""

from collections.abc import Sequence

Path = tuple[int, ...]
"""A cache's place in the model's list: (entry,), or (entry, place in it) where an entry holds several."""


class CompositeStandIn:
    """What a layer gets that keeps several caches."""

    def __init__(self, members: Sequence[object]) -> None:
        self._members = tuple(members)

    def __getitem__(self, index: int) -> object:
        return self._members[index]


def assemble(paths: Sequence[Path], stand_ins: Sequence[object]) -> list[object]:
    """The list a model expects: stand-ins in its own order, those of one entry together."""
    entries: dict[int, list[object]] = {}
    alone: dict[int, bool] = {}
    for path, stand_in in zip(paths, stand_ins, strict=True):
        entries.setdefault(path[0], []).append(stand_in)
        alone[path[0]] = len(path) == 1
    return [
        members[0] if alone[entry] else CompositeStandIn(members)
        for entry, members in sorted(entries.items())
    ]
