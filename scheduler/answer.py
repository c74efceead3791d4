"""From a request's tokens to its client's text."""

import logging
from dataclasses import replace
from typing import Literal

from msgspec import UNSET

from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.text import TextStream
from mlxd.scheduler import messages as wire
from mlxd.scheduler.events import Finished, Tokens, Usage

logger = logging.getLogger(__name__)


class Answer:
    """Turns the events of one accepted request into its messages; exactly one of them is terminal.

    `ended_by` is set when the text ends a request whose tokens could go on: "stop" at a stop string, "failed"
    where the detokenizer raised. The engine has to be told then; tokens that still come are dropped.
    """

    def __init__(self, request_id: str, text: TextStream, ending: frozenset[int], *, stream: bool) -> None:
        """`ending`: token ids that end the request; they are in its ids and not in its text."""
        self.ended_by: Literal["", "stop", "failed"] = ""
        self._id = request_id
        self._text = text
        self._ending = ending
        self._stream = stream
        self._seq = 0
        self._num_tokens = 0
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def tokens(self, event: Tokens) -> wire.Chunk | None:
        if self.ended_by:
            return None
        self._num_tokens += len(event.token_ids)
        piece = self._push([token for token in event.token_ids if token not in self._ending])
        if self._text.stopped and not self.ended_by:
            self.ended_by = "stop"
        return self._emit(piece, event.token_ids, event.logprobs)

    def finished(self, event: Finished) -> list[wire.ServerMessage]:
        """The rest of the text, if any was held back, and the terminal message; nothing for a client gone."""
        if self.ended_by == "failed":
            return [wire.Error(id=self._id, code="internal", message="the text of this request failed")]
        if self.ended_by == "stop":
            return [self._done("stop", replace(event.usage, completion_tokens=self._num_tokens))]
        match event.outcome:
            case "stop" | "length" as reason:
                rest = self._push(None)
                if self.ended_by:
                    return self.finished(event)
                last = self._emit(rest, (), ()) if rest else None
                return [*([last] if last else []), self._done(reason, event.usage)]
            case "cancelled":
                return [wire.Cancelled(id=self._id, usage=event.usage)]
            case "client_gone":
                return []
            case "slow_client":
                message = "the client did not read its messages"
                return [wire.Error(id=self._id, code="slow_client", message=message)]
            case _:
                return [wire.Error(id=self._id, code=event.error_code or "internal", message=event.error)]

    def _push(self, token_ids: list[int] | None) -> str:
        """Text that may be sent; None ends the stream."""
        try:
            return self._text.finish() if token_ids is None else self._text.push(token_ids)
        except Exception:  # a tokenizer is foreign code: whatever it raises ends this request alone
            logger.exception("detokenizer failed id=%s", self._id)
            self.ended_by = "failed"
            return ""

    def _emit(
        self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> wire.Chunk | None:
        if not self._stream:
            self._texts.append(text)
            self._token_ids += token_ids
            self._logprobs += logprobs
            return None
        self._seq += 1
        return wire.Chunk(
            id=self._id, seq=self._seq - 1, text=text, token_ids=token_ids, logprobs=logprobs or UNSET
        )

    def _done(self, reason: Literal["stop", "length"], usage: Usage) -> wire.Done:
        if self._stream:
            return wire.Done(id=self._id, finish_reason=reason, usage=usage)
        return wire.Done(
            id=self._id,
            finish_reason=reason,
            usage=usage,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs) or UNSET,
        )
