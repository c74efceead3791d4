"""The decode batch on the device: where each row's latest token lies, and the rows' sampling state."""

from collections.abc import Sequence

import mlx.core as mx

from mlxd.batching.plan import DecodeEntry
from mlxd.batching.sampler_state import Draw, SamplingBatch


class Batch:
    """Follows a batch from step to step, as rows join and leave.

    Rows keep no fixed place: a step lists its rows in joining order, and a row's latest token is found in the
    last step's draw by index. So a join or a leave moves a few integers and no row's keys or values.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._slots: dict[int, int] = {}
        self._tokens: mx.array | None = None
        self.sampling: SamplingBatch | None = None

    def arrange(
        self, entries: Sequence[DecodeEntry], bucket: int
    ) -> tuple[mx.array, mx.array, SamplingBatch]:
        """Inputs of the coming step, which has `bucket` rows, at least one an entry.

        Returns:
            tokens, positions: int32 [bucket], rows past the entries idle at position 0; the sampling state.
        """
        if self.sampling is None or not self.sampling.serves(entries, bucket):
            self.sampling = SamplingBatch(entries, bucket, self._vocab_size, self.sampling)
        positions = mx.array([e.position for e in entries] + [0] * (bucket - len(entries)), dtype=mx.int32)
        return self._input_tokens(entries, bucket), positions, self.sampling

    def _input_tokens(self, entries: Sequence[DecodeEntry], bucket: int) -> mx.array:
        drawn = self._tokens
        known = [0 if entry.token is None else entry.token for entry in entries] + [0] * (
            bucket - len(entries)
        )
        if drawn is None or all(entry.token is not None for entry in entries):
            return mx.array(known, dtype=mx.int32)
        size = drawn.shape[0]
        places = [
            self._slots[entry.row.row_id] if entry.token is None else size + i
            for i, entry in enumerate(entries)
        ] + [i % size for i in range(len(entries), bucket)]
        if places == list(range(size)):
            return drawn
        return mx.concatenate([drawn, mx.array(known, dtype=mx.int32)])[mx.array(places, dtype=mx.int32)]

    def adopt(self, entries: Sequence[DecodeEntry], draw: Draw) -> None:
        """The step went out: its tokens are the next one's input."""
        self._tokens = draw.tokens
        self._slots = {entry.row.row_id: i for i, entry in enumerate(entries)}
