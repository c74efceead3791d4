"""From a request's tokens to its client's text."""

import logging
from dataclasses import replace
from typing import Literal

from mlxd.batching.text import TextStream
from mlxd.scheduler import messages as wire
from mlxd.scheduler.events import Finished, Tokens
from mlxd.scheduler.transcript import Transcript

logger = logging.getLogger(__name__)


class Answer:
    """Turns the events of one accepted request into its transcript.

    `ended_by` is set when the text ends a request whose tokens could go on: "stop" at a stop string, "failed"
    where the detokenizer raised. The engine has to be told then; tokens that still come are dropped.
    """

    def __init__(
        self, transcript: Transcript, request_id: str, text: TextStream, ending: frozenset[int]
    ) -> None:
        """`ending`: token ids that end the request; they are in its ids and not in its text."""
        self.ended_by: Literal["", "stop", "failed"] = ""
        self._transcript = transcript
        self._id = request_id
        self._text = text
        self._ending = ending

    def tokens(self, event: Tokens) -> None:
        if self.ended_by:
            return
        piece = self._push([token for token in event.token_ids if token not in self._ending])
        if self._text.stopped and not self.ended_by:
            self.ended_by = "stop"
        self._transcript.add(piece, event.token_ids, event.logprobs)

    def finished(self, event: Finished) -> None:
        """Add the rest of the text, if any was held back, and the terminal message."""
        if event.outcome in ("stop", "length") and not self.ended_by:
            rest = self._push(None)
            if rest:
                self._transcript.add(rest, ())
        self._transcript.terminal = self._terminal(event)

    def _terminal(self, event: Finished) -> wire.Terminal:
        if self.ended_by == "failed":
            return wire.Error(id=self._id, code="internal", message="the text of this request failed")
        if self.ended_by == "stop":
            usage = replace(event.usage, completion_tokens=self._transcript.num_tokens)
            return wire.Done(id=self._id, finish_reason="stop", usage=usage)
        return terminal_of(event)

    def _push(self, token_ids: list[int] | None) -> str:
        """Text that may be sent; None ends the stream."""
        try:
            return self._text.finish() if token_ids is None else self._text.push(token_ids)
        except Exception:  # a tokenizer is foreign code: whatever it raises ends this request alone
            logger.exception("detokenizer failed id=%s", self._id)
            self.ended_by = "failed"
            return ""


def terminal_of(event: Finished) -> wire.Terminal:
    """What a client is told of a request that the engine ended, or that never got there."""
    request_id = event.key.request_id
    match event.outcome:
        case "stop" | "length" as reason:
            return wire.Done(id=request_id, finish_reason=reason, usage=event.usage)
        case "cancelled" | "client_gone":
            return wire.Cancelled(id=request_id, usage=event.usage)
        case "slow_client":
            message = "the client did not read its messages"
            return wire.Error(id=request_id, code="slow_client", message=message)
        case _:
            return wire.Error(id=request_id, code=event.error_code or "internal", message=event.error)
