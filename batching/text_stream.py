"""Token ids in, text out, as early as it is certain."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER_BYTES = 4


class TokenDecoder(Protocol):
    """Decodes one row's tokens; what `push` and `finish` return adds up to the whole text."""

    def push(self, token: int) -> str:
        """The text that became certain; empty in the middle of a character."""
        ...

    def finish(self) -> str:
        """What is left: a replacement character for an unfinished one."""
        ...


class ByteLevelDecoder:
    """For tokenizers whose tokens are spelled bytes: exact, each byte is looked at once."""

    def __init__(self, token_bytes: "TokenBytes") -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._token_bytes[token])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, filled as tokens are met; none for special and unknown ones. Shared."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = special_token_ids(tokenizer)
        self._byte_of = _spelled_bytes()

    def __missing__(self, token: int) -> bytes:
        spelled = None if token in self._special else self._tokenizer.id_to_token(token)
        self[token] = found = b"" if spelled is None else self._bytes(spelled)
        return found

    def _bytes(self, spelled: str) -> bytes:
        try:
            return bytes(self._byte_of[character] for character in spelled)
        except KeyError:  # an added token stands for itself
            return spelled.encode()


class WindowDecoder:
    """For any other tokenizer: decodes the newest tokens behind earlier ones, which give a space its meaning.

    Text waits while it ends in a replacement character, for at most as many tokens as a character has bytes.
    """

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        if token in self._special or self._tokenizer.id_to_token(token) is None:
            return ""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER_BYTES:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        return self._new_text() if self._pending else ""

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(known) :]


class TextStream:
    """The text of one row, cut at its first stop string.

    Attributes:
        stopped: a stop string was met; the text is complete and later tokens are ignored.
        num_tokens: tokens taken in, the one that completed the stop string included.
    """

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str] = ()) -> None:
        """`stop`: none of them empty."""
        self.stopped = False
        self.num_tokens = 0
        self._decoder = decoder
        self._stop = tuple(stop)
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that can be shown now: whole characters, and nothing that may yet become a stop string."""
        shown = []
        for token in ids:
            if self.stopped:
                break
            self.num_tokens += 1
            shown.append(self._advance(self._decoder.push(token)))
        return "".join(shown)

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        if self.stopped:
            return ""
        shown = self._advance(self._decoder.finish())
        rest, self._held = self._held, ""
        return shown + rest

    def _advance(self, new: str) -> str:
        if not new or not self._stop:
            return new
        text = self._held + new
        if (cut := self._first_stop(text)) is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        held_from = min(_possible_start(text, stop) for stop in self._stop)
        self._held = text[held_from:]
        return text[:held_from]

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string begins that is complete first, so that token borders make no difference."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def _possible_start(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that `stop` begins with; `len(text)` where there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that are never part of a text."""
    return frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)


def _spelled_bytes() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes as they are, the others from U+0100 on, in order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
