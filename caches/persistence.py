"""One page of a prefix as a file: safetensors whose metadata says what is in it, and of whom."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

FORMAT = "mlxd-page/1"
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_DIGEST_BYTES = 32
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
_ITEM_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}

Reason = Literal["truncated", "corrupt", "foreign"]


class PageFileError(Exception):
    """A file that is not the page it is named after; `reason` is a metric label."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One array's part of a page. `dtype` as safetensors writes it: "F32", "BF16", "U32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What every page of a group has in common; a page of another format is foreign.

    Attributes:
        model: fingerprint of the weights.
        signature: of the caches, all layers.
        page_size: positions between two keys.
        floor: shortest prefix from which the state may be resumed.
        planes: arrays of one page, all layers, in the order of their bytes in a payload.
    """

    model: str
    signature: str
    page_size: int
    floor: int
    planes: tuple[PlaneSpec, ...]

    @property
    def page_bytes(self) -> int:
        return sum(plane.num_bytes for plane in self.planes)


@dataclass(frozen=True, slots=True)
class PageName:
    """A page's place in a chain of prefixes.

    Attributes:
        key: keyed hash of all tokens up to the page's end, the same for all groups.
        parent: the same up to the page's start.
        index: full pages before it.
        group: which of the model's groups it is a page of.
    """

    key: bytes
    parent: bytes
    index: int
    group: int = 0

    @property
    def file(self) -> bytes:
        """Names the file: the key, or, for groups after the first, a hash of it and the group."""
        return file_of(self.key, self.group)


def file_of(key: bytes, group: int) -> bytes:
    """Names the file of a group's page."""
    return blake2b(key + group.to_bytes(4, "little"), digest_size=len(key)).digest() if group else key


class PageCodec:
    """Pages of one model to files and back.

    A file is a header that follows from format, name and digest alone, then the planes. So a header is right
    where it is, byte for byte, the one that would be written; the digest binds the planes to the page's key,
    and nobody without the secret can make one.
    """

    def __init__(self, formats: Sequence[PageFormat], secret: bytes) -> None:
        """`formats`: one a group. `secret`: at most 64 bytes."""
        self.formats = tuple(formats)
        self._secret = secret

    def encode(self, name: PageName, payload: bytes) -> tuple[bytes, bytes]:
        """Header and planes, to be written one after the other. `payload` has its format's `page_bytes`."""
        assert len(payload) == self.formats[name.group].page_bytes, f"{len(payload)} bytes are no page"
        return self._header(name, self._digest(name, payload)), payload

    def decode(self, name: PageName, data: bytes) -> memoryview:
        """The planes' bytes.

        Raises:
            PageFileError: the file is cut off, damaged, or of another format or page.
        """
        metadata = _metadata(data)
        digest = metadata.get("digest", "")
        header = self._header(name, digest)
        if data[: len(header)] != header:
            raise PageFileError("foreign", self._difference(name, metadata))
        payload = memoryview(data)[len(header) :]
        expected = self.formats[name.group].page_bytes
        if len(payload) < expected:
            raise PageFileError("truncated", f"{len(payload)} of {expected} bytes are there")
        if len(payload) > expected:
            raise PageFileError("corrupt", f"{len(payload) - expected} bytes follow the last plane")
        if self._digest(name, payload) != digest:
            raise PageFileError("corrupt", "the digest is not that of the planes")
        return payload

    def _header(self, name: PageName, digest: str) -> bytes:
        tensors: dict[str, object] = {"__metadata__": {**self._describe(name), "digest": digest}}
        start = 0
        for plane in self.formats[name.group].planes:
            end = start + plane.num_bytes
            tensors[plane.name] = {"dtype": plane.dtype, "shape": plane.shape, "data_offsets": (start, end)}
            start = end
        text = msgspec.json.encode(tensors)
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    def _describe(self, name: PageName) -> dict[str, str]:
        format = self.formats[name.group]
        return {
            "format": FORMAT,
            "model": format.model,
            "signature": format.signature,
            "page_size": str(format.page_size),
            "floor": str(format.floor),
            "offset": str((name.index + 1) * format.page_size),
            "tokens": name.key.hex(),
            "parent": name.parent.hex(),
        }

    def _difference(self, name: PageName, metadata: dict[str, str]) -> str:
        for field, expected in self._describe(name).items():
            if metadata.get(field) != expected:
                return f"{field} is {metadata.get(field, 'missing')!r}, not {expected!r}"
        return "the planes differ"

    def _digest(self, name: PageName, payload: bytes | memoryview) -> str:
        digest = blake2b(name.file, key=self._secret, digest_size=_DIGEST_BYTES)
        digest.update(payload)
        return digest.hexdigest()


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__")


def _metadata(data: bytes) -> dict[str, str]:
    """Raises PageFileError where there is no whole header."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES + length:
        raise PageFileError("truncated", f"{len(data)} bytes end inside the header")
    try:
        return msgspec.json.decode(data[_LENGTH_BYTES : _LENGTH_BYTES + length], type=_Header).metadata
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PageFileError("corrupt", f"the header is damaged: {error}") from error


def split_payload(planes: Sequence[PlaneSpec], payload: bytes | memoryview) -> list[memoryview]:
    """Each plane's bytes of one page."""
    view, parts, start = memoryview(payload), [], 0
    for plane in planes:
        parts.append(view[start : start + plane.num_bytes])
        start += plane.num_bytes
    return parts
