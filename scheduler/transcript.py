"""What one request has answered so far, kept so that any part of it can be told again."""

from bisect import bisect_right
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from mlxd.batching.plan import TokenLogprobs
from mlxd.scheduler import messages as wire

_TOKEN_BYTES = 5
_LOGPROB_BYTES = 16


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A transcript that has ended, as plain data."""

    texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    terminal: wire.Terminal


class Transcript:
    """Grows by pieces, then gets its one terminal message.

    Piece i is the text that became certain with token i. Text that was held back until the end is one more
    piece, without a token. A chunk's `seq` is the number of its first piece.

    Attributes:
        terminal: None while the request is open.
        num_logprobs: of drawn tokens and of likely ones, together.
    """

    def __init__(self, request_id: str) -> None:
        self.terminal: wire.Terminal | None = None
        self.num_logprobs = 0
        self._id = request_id
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """Pieces so far."""
        return len(self._texts)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """About what all pieces take on the wire."""
        return self._ends[-1] if self._ends else 0

    def bytes_from(self, seq: int) -> int:
        """About what the pieces from `seq` on take on the wire."""
        return self.num_bytes - (self._ends[min(seq, len(self)) - 1] if seq and self._ends else 0)

    def add(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """A piece a token, the text with the last one. Without tokens: the text that was left at the end."""
        texts = [""] * (len(token_ids) - 1) + [text]
        self._token_ids += token_ids
        self._logprobs += logprobs
        end = self.num_bytes
        for index, piece in enumerate(texts):
            end += _TOKEN_BYTES + len(piece.encode())
            if logprobs:
                num_logprobs = 1 + len(logprobs[index].top)
                self.num_logprobs += num_logprobs
                end += _LOGPROB_BYTES * num_logprobs
            self._texts.append(piece)
            self._ends.append(end)

    def chunk(self, seq: int, max_bytes: int) -> wire.Chunk | None:
        """Pieces from `seq` on as one message of about `max_bytes`; None where there are none."""
        if seq >= len(self):
            return None
        limit = self.num_tokens if seq < self.num_tokens else len(self)
        start = self._ends[seq - 1] if seq else 0
        stop = max(seq + 1, min(limit, bisect_right(self._ends, start + max_bytes)))
        return wire.Chunk(
            id=self._id,
            seq=seq,
            text="".join(self._texts[seq:stop]),
            token_ids=tuple(self._token_ids[seq:stop]),
            logprobs=tuple(self._logprobs[seq:stop]) or UNSET,
        )

    def whole(self, done: wire.Done) -> wire.Done:
        """`done` with the whole answer in it."""
        return wire.Done(
            id=self._id,
            finish_reason=done.finish_reason,
            usage=done.usage,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs) or UNSET,
        )

    def record(self) -> Record:
        """What `restored` makes the same transcript from."""
        assert self.terminal is not None, "an open request is not recorded"
        return Record(
            texts=tuple(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            terminal=self.terminal,
        )

    @classmethod
    def restored(cls, request_id: str, record: Record) -> "Transcript":
        transcript = cls(request_id)
        num_tokens = len(record.token_ids)
        for index, token in enumerate(record.token_ids):
            transcript.add(record.texts[index], (token,), record.logprobs[index : index + 1])
        for text in record.texts[num_tokens:]:
            transcript.add(text, ())
        transcript.terminal = record.terminal
        return transcript
