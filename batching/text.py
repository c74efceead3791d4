"""Text to token ids and back; no model needed, safe to use from any thread."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from mlxd.batching.chat_template import ChatTemplate
from mlxd.batching.errors import InvalidPromptError, ModelError
from mlxd.batching.model_files import MAX_TEXT_BYTES, declared_eos_token_ids, read_optional_json_object
from mlxd.batching.text_stream import (
    ByteLevelDecoder,
    TextStream,
    TokenBytes,
    TokenDecoder,
    WindowDecoder,
    special_token_ids,
)
from mlxd.caches.files import read_file

__all__ = ["TextStream", "Tokenizer"]

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else a batch of one text makes a thread a core

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A model folder's tokenizer, with its chat template and its end-of-text tokens.

    Attributes:
        vocab_size: highest token id + 1.
        max_token_chars: characters of text that one token stands for at most; None where no bound is known.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: ChatTemplate | None = None,
        add_bos: bool | None = None,
    ) -> None:
        """
        Args:
            special_tokens: "bos_token", "eos_token", ... -> token.
            eos_token_ids: in addition to the eos token.
            add_bos: begin every prompt with the bos token, never do, or None: as the backend does.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._add_bos = add_bos
        self._bos = special_tokens.get("bos_token", "")
        self._bos_id = backend.token_to_id(self._bos) if self._bos else None
        eos_id = backend.token_to_id(special_tokens.get("eos_token", ""))
        self.eos_token_ids = eos_token_ids | ({eos_id} if eos_id is not None else set())
        self.max_token_chars = _max_token_chars(backend)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._special = special_token_ids(backend)
        self._token_bytes = TokenBytes(backend) if _is_byte_level(backend) else None

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json; a folder without one goes through transformers, which builds it.

        Raises:
            ModelError: there is no tokenizer, it is damaged, or its chat template is.
        """
        config = read_optional_json_object(folder / "tokenizer_config.json")
        special_tokens = {name: token for name in _SPECIAL_TOKENS if (token := _content(config, name))}
        add_bos = config.get("add_bos_token")
        return cls(
            _read_backend(folder),
            special_tokens=special_tokens,
            eos_token_ids=declared_eos_token_ids(folder),
            chat_template=ChatTemplate.load(folder, special_tokens),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the bos token where the tokenizer adds one and the text has none.

        Raises:
            InvalidPromptError: the text holds half a surrogate pair.
        """
        spelled_out = bool(self._bos) and text.startswith(self._bos)
        ids = self._encode(text, add_special_tokens=not spelled_out)
        if spelled_out or self._add_bos is None or self._bos_id is None:
            return ids
        bare = ids[1:] if ids[:1] == [self._bos_id] else ids
        return [self._bos_id, *bare] if self._add_bos else bare

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins.

        Args:
            messages: each with "role" and "content".
        Raises:
            InvalidPromptError: no chat template, a malformed message, or one the template refuses.
        """
        if self._chat_template is None:
            raise InvalidPromptError("this model has no chat template; send a prompt instead of messages")
        return self._encode(self._chat_template.render(messages), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all `ids` at once; special and unknown tokens are left out."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A new row's text, token by token. `stop`: strings that end it and are not part of it."""
        decoder: TokenDecoder
        if self._token_bytes is not None:
            decoder = ByteLevelDecoder(self._token_bytes)
        else:
            decoder = WindowDecoder(self._backend, self._special)
        return TextStream(decoder, stop)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # `encode` would hold Python's lock, and so every thread, until it is done.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids
        except TypeError as error:
            raise InvalidPromptError("the prompt is not valid Unicode text") from error


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    try:
        if path.exists():
            return Backend.from_buffer(read_file(path, MAX_TEXT_BYTES))
        # Slow to import, and most folders do without.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise ModelError(f"{path if path.exists() else folder} holds no usable tokenizer: {error}") from error


def _is_byte_level(backend: Backend) -> bool:
    return isinstance(backend.decoder, decoders.ByteLevel)


def _max_token_chars(backend: Backend) -> int | None:
    """A normalizer may shrink the text, and an added token may swallow the spaces beside it."""
    added = backend.get_added_tokens_decoder().values()
    if not _is_byte_level(backend) or backend.normalizer is not None:
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    return max(len(token) for token in backend.get_vocab(with_added_tokens=True))


def _content(config: Mapping[str, object], name: str) -> str:
    """A special token as the config spells it: plain, or an object with its content. Raises ModelError."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return ""
    try:
        token.encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"tokenizer_config.json: {name} is {token!r}, which is no text") from error
    return token
