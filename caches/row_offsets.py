"""How far each row has come: what every kind keeps of it, the same way."""

import mlx.core as mx


class RowOffsets:
    """Committed positions of the rows bound last, in the group's order; a base of the kinds."""

    _offsets: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self._offsets)

    @property
    def row_offsets(self) -> tuple[int, ...]:
        return self._offsets

    @property
    def offset(self) -> int:
        return max(self._offsets, default=0)

    @property
    def rope_offsets(self) -> mx.array | None:
        return mx.array(self._offsets, dtype=mx.int32) if self._offsets else None
