"""Several caches in one layer, or in one model: the model sees them as a list, everything else as one."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from mlxd.caches.contract import RowCache
from mlxd.caches.signatures import check_claims, join_signatures, signature_of

if TYPE_CHECKING:
    import mlx.core as mx

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


class Composite:
    """A model's caches as one: they hold the same rows, and what holds for it holds for all of them.

    Args:
        caches: all caches of the model, flat.
        paths: their places; members of one entry are named together in the signature.
    """

    def __init__(self, caches: Sequence[RowCache], paths: Sequence[Path]) -> None:
        self._members = tuple(caches)
        self._paths = tuple(paths)

    def signature(self) -> str:
        """In the model's order, those of one entry joined by "+": "ssm+kv:paged:64*4,kv:paged:64".

        Raises:
            SignatureError: a member cannot say what it is, or two of different kinds say the same.
        """
        check_claims(self._members)
        pairs = zip(self._paths, self._members, strict=True)
        entries = groupby(pairs, key=lambda pair: pair[0][0])
        return join_signatures(
            ["+".join(signature_of(member) for _, member in entry) for _, entry in entries]
        )

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """Raises ValueError where members disagree: some took part in a step and others did not."""
        offsets = {member.row_offsets for member in self._members}
        if len(offsets) > 1:
            raise ValueError(f"caches of one model disagree about their rows: {sorted(offsets)}")
        return next(iter(offsets), ())

    @property
    def offset(self) -> int:
        return max(self.row_offsets, default=0)

    @property
    def minimum_reusable_offset(self) -> int:
        return max(member.minimum_reusable_offset for member in self._members)

    def bytes_per_token(self) -> int:
        return sum(member.bytes_per_token() for member in self._members)

    def max_append_tokens(self) -> float:
        return min(member.max_append_tokens() for member in self._members)

    @property
    def state_needs_dispose(self) -> bool:
        return any(member.state_needs_dispose for member in self._members)

    def state(self) -> "list[mx.array]":
        return [array for member in self._members for array in member.state()]

    def is_trimmable(self) -> bool:
        return all(member.is_trimmable() for member in self._members)

    def trim(self, num_tokens: int, *, bypass: bool = False) -> None:
        """Raises ValueError, and trims none, where a member is not trimmable."""
        if not bypass and not self.is_trimmable():
            names = {signature_of(member) for member in self._members if not member.is_trimmable()}
            raise ValueError(f"cannot be trimmed: {', '.join(sorted(names))}")
        for member in self._members:
            member.trim(num_tokens, bypass=bypass)

    def spec_round_begin(self) -> None:
        for member in self._members:
            member.spec_round_begin()

    def spec_round_commit(self) -> None:
        for member in self._members:
            member.spec_round_commit()

    def spec_round_rollback(self, keep: Sequence[int]) -> None:
        """Members hold the same rows, so the first of them refuses a wrong `keep` before any is changed."""
        for member in self._members:
            member.spec_round_rollback(keep)

    def reset(self) -> None:
        for member in self._members:
            member.reset()

    def dispose(self) -> None:
        for member in self._members:
            member.dispose()
