"""Checks a frame's structure before anything is built from it: depth, sizes, duplicate keys, odd numbers.

A msgpack header may claim four billion items in five bytes, and decoders take the last of two equal keys;
both are refused here. The grammar itself is left to the decoder that runs after.
"""

import math
import re
import struct

import msgspec

from mlxd.scheduler.errors import ProtocolError

MAX_DEPTH = 8
MAX_STRING_BYTES = 2**20
MAX_ITEMS = 2**18
MAX_TOTAL_ITEMS = MAX_ITEMS + 2**12
"""Of all lists and maps of a frame together."""
MAX_NODES = 2**15
"""What costs more to read than a number in a list: a frame's texts, keys, lists and maps together."""
_MARKS_A_NODE = 3
"""JSON: with the commas and the brackets that close."""


def decode_error(message: str, offset: int) -> ProtocolError:
    return ProtocolError("decode", f"{message} at byte {offset}")


def _check_limit(what: str, size: int, limit: int, offset: int) -> None:
    if size > limit:
        raise ProtocolError("too_large", f"{what} {size} at byte {offset} is over the limit of {limit}")


_JSON_TOKEN = re.compile(
    rb"""
      (?P<string> " (?: [^"\\]++ | \\. )*+ " ) (?P<colon> \s*+ : )?
    | (?P<flat> \[ [^"\[\]{}:]*+ \] )
    | (?P<mark> [{}\[\],"] )
    """,
    re.VERBOSE | re.DOTALL,
)


def check_json(frame: bytes) -> None:
    """Raises ProtocolError "decode" or "too_large"; grammar errors may pass."""
    try:
        frame.decode()
    except UnicodeDecodeError as error:
        raise decode_error("invalid UTF-8", error.start) from None
    keys: list[set[str]] = []
    items: list[int] = []
    total = 0
    for nodes, token in enumerate(_JSON_TOKEN.finditer(frame)):
        at = token.start()
        _check_limit("number of marks", nodes, _MARKS_A_NODE * MAX_NODES, at)
        if token["string"]:
            _check_limit("string length", len(token["string"]) - 2, MAX_STRING_BYTES, at)
            if token["colon"] and keys:
                _add_key(keys[-1], msgspec.json.decode(token["string"], type=str), at)
        elif token["flat"]:
            _check_limit("depth", len(items) + 1, MAX_DEPTH, at)
            length = token["flat"].count(b",") + 1
            _check_limit("list length", length, MAX_ITEMS, at)
            total += length
            _check_limit("number of all items", total, MAX_TOTAL_ITEMS, at)
        elif token["mark"] in b"{[":
            keys.append(set())
            items.append(1)
            _check_limit("depth", len(items), MAX_DEPTH, at)
        elif token["mark"] == b"," and items:
            items[-1] += 1
            _check_limit("number of items", items[-1], MAX_ITEMS, at)
        elif token["mark"] in b"}]" and items:
            keys.pop()
            items.pop()


def _add_key(seen: set[str], key: str, at: int) -> None:
    if key in seen:
        raise decode_error("duplicate key", at)
    seen.add(key)


def check_msgpack(frame: bytes) -> None:
    """Raises ProtocolError "decode" or "too_large". Extension types, bytes and odd keys are refused."""
    try:
        end = _Msgpack(frame).check(0, 0)
    except (IndexError, struct.error):
        raise decode_error("truncated", len(frame)) from None
    if end > len(frame):
        raise decode_error("truncated", len(frame))
    if end < len(frame):
        raise decode_error("trailing bytes", end)


def _scalar_sizes() -> list[int]:
    """Bytes of a value by its first byte, for null, booleans and integers; 0 for all others."""
    sizes = [1] * 0x80 + [0] * 0x60 + [1] * 0x20
    for lead in (0xC0, 0xC2, 0xC3):
        sizes[lead] = 1
    for lead, size in zip((0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3), (1, 2, 4, 8) * 2, strict=True):
        sizes[lead] = 1 + size
    return sizes


_SCALAR_SIZES = _scalar_sizes()
_FLOATS = {0xCA: struct.Struct(">f"), 0xCB: struct.Struct(">d")}
_LENGTHS = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}
_STRINGS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


class _Msgpack:
    """Walks one value; every method takes its first byte's offset and returns the offset after it."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._nodes = 0
        self._items = 0

    def check(self, at: int, depth: int) -> int:
        lead = self._frame[at]
        if size := _SCALAR_SIZES[lead]:
            return at + size
        self._nodes += 1
        _check_limit("number of values", self._nodes, MAX_NODES, at)
        if 0xA0 <= lead <= 0xBF or lead in _STRINGS:
            return self._string(at)[1]
        if lead in _FLOATS:
            return self._float(at)
        if 0x90 <= lead <= 0x9F or lead in _LISTS:
            return self._list(at, depth + 1)
        if 0x80 <= lead <= 0x8F or lead in _MAPS:
            return self._map(at, depth + 1)
        raise decode_error(f"unsupported msgpack type 0x{lead:02x}", at)

    def _length(self, at: int, short: int, widths: dict[int, int]) -> tuple[int, int]:
        """A header's count and the offset after it; `short` masks the count out of a one-byte header."""
        lead = self._frame[at]
        if lead not in widths:
            return lead & short, at + 1
        width = widths[lead]
        (count,) = _LENGTHS[width].unpack_from(self._frame, at + 1)
        return int(count), at + 1 + width

    def _string(self, at: int) -> tuple[str, int]:
        size, start = self._length(at, 0x1F, _STRINGS)
        _check_limit("string length", size, MAX_STRING_BYTES, at)
        try:
            text = self._frame[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise decode_error("invalid UTF-8", start + error.start) from None
        return text, start + size

    def _float(self, at: int) -> int:
        real = _FLOATS[self._frame[at]]
        (value,) = real.unpack_from(self._frame, at + 1)
        if not math.isfinite(value):
            raise decode_error("a number that is not finite", at)
        return at + 1 + real.size

    def _list(self, at: int, depth: int) -> int:
        _check_limit("depth", depth, MAX_DEPTH, at)
        count, end = self._length(at, 0x0F, _LISTS)
        _check_limit("list length", count, MAX_ITEMS, at)
        self._add_items(count, at)
        frame, sizes = self._frame, _SCALAR_SIZES
        for _ in range(count):
            # Long lists are token ids: a call a token would be most of the cost.
            size = sizes[frame[end]]
            end = end + size if size else self.check(end, depth)
        return end

    def _map(self, at: int, depth: int) -> int:
        _check_limit("depth", depth, MAX_DEPTH, at)
        count, end = self._length(at, 0x0F, _MAPS)
        _check_limit("number of items", count, MAX_ITEMS, at)
        self._add_items(count, at)
        self._nodes += count
        _check_limit("number of values", self._nodes, MAX_NODES, at)
        seen: set[str] = set()
        for _ in range(count):
            end = self.check(self._key(end, seen), depth)
        return end

    def _add_items(self, count: int, at: int) -> None:
        self._items += count
        _check_limit("number of all items", self._items, MAX_TOTAL_ITEMS, at)

    def _key(self, at: int, seen: set[str]) -> int:
        lead = self._frame[at]
        if 0xA0 <= lead <= 0xBF or lead in _STRINGS:
            key, end = self._string(at)
        else:
            end = at + _SCALAR_SIZES[lead]
            if end == at or lead in (0xC0, 0xC2, 0xC3):
                raise decode_error("a key that is neither string nor integer", at)
            key = "#" + repr(msgspec.msgpack.decode(self._frame[at:end], type=int))
        _add_key(seen, key, at)
        return end
