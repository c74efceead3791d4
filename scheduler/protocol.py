"""Frames to messages and back. Nothing a client sends makes `decode` raise anything but ProtocolError."""

import difflib
import re
from typing import Any, Literal, NoReturn, get_args

import msgspec

from mlxd.scheduler.errors import ProtocolError
from mlxd.scheduler.frames import check_json, check_msgpack
from mlxd.scheduler.messages import (
    CLIENT_MESSAGE_TYPES,
    MAX_ID_LENGTH,
    PROTOCOL_VERSION,
    ClientMessage,
    ServerMessage,
)
from mlxd.scheduler.schema import field_names, type_at

Encoding = Literal["msgpack", "json"]

EXTENSION_PREFIX = "x_"
"""Top-level fields that begin so are skipped; every other unknown field is an error."""

_encode_msgpack = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode
_decode_reply_msgpack = msgspec.msgpack.Decoder(ServerMessage).decode
_decode_reply_json = msgspec.json.Decoder(ServerMessage).decode


def encoding_of(frame: bytes) -> Encoding:
    return "json" if frame[:1] == b"{" else "msgpack"


def kind_of(message: ClientMessage | ServerMessage) -> str:
    """The message's `type` on the wire."""
    return str(message.__struct_config__.tag)


def encode(message: ClientMessage | ServerMessage, encoding: Encoding = "msgpack") -> bytes:
    return _encode_json(message) if encoding == "json" else _encode_msgpack(message)


def decode_reply(frame: bytes) -> ServerMessage:
    """The client's side: unknown fields of a newer daemon are skipped.

    Raises:
        ProtocolError: "decode".
    """
    try:
        return _decode_reply_json(frame) if encoding_of(frame) == "json" else _decode_reply_msgpack(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            "decode", f"the daemon sent a message that this client cannot read: {error}"
        ) from None


def decode(frame: bytes, max_bytes: int) -> ClientMessage:
    """Read what a client sent.

    Raises:
        ProtocolError: "decode", "too_large", "unsupported" or "invalid_param"; `request_id` and `about` are
            set where the frame tells them, `field` where one field is at fault.
    """
    if len(frame) > max_bytes:
        raise ProtocolError("too_large", f"the message has {len(frame)} bytes; the limit is {max_bytes}")
    encoding = encoding_of(frame)
    body = _read_map(frame, encoding)
    try:
        _check_kind(body)
        fields = {k: value for k, value in body.items() if not str(k).startswith(EXTENSION_PREFIX)}
        message: ClientMessage = msgspec.convert(fields, ClientMessage, str_keys=encoding == "json")
        return message
    except msgspec.ValidationError as error:
        problem = _invalid_param(str(error), _TYPES[str(body["type"])])
    except ProtocolError as error:
        problem = error
    raise _located(problem, body.get("type"), body.get("id"))


def _located(problem: ProtocolError, kind: object, request_id: object) -> ProtocolError:
    """`problem` with what tells its client which of its messages is meant."""
    if kind in CLIENT_MESSAGE_TYPES:
        problem.about = str(kind)
    if isinstance(request_id, str) and len(request_id) <= MAX_ID_LENGTH:
        problem.request_id = request_id
    return problem


def _read_map(frame: bytes, encoding: Encoding) -> dict[Any, object]:
    try:
        if encoding == "json":
            check_json(frame)
            return msgspec.json.decode(frame, type=dict[Any, object])
        check_msgpack(frame)
        return msgspec.msgpack.decode(frame, type=dict[Any, object])
    except msgspec.MsgspecError as error:
        where = "" if "(byte " in str(error) else f" (byte {len(frame)})"
        raise ProtocolError("decode", f"not a {encoding} map: {error}{where}") from None


def _check_kind(body: dict[Any, object]) -> None:
    version, kind = body.get("v", PROTOCOL_VERSION), body.get("type")
    if type(version) is int and version != PROTOCOL_VERSION:
        _unsupported("v", f"protocol version {version}; supported: {PROTOCOL_VERSION}")
    if kind is None:
        _unsupported("type", f"no message type; supported: {', '.join(CLIENT_MESSAGE_TYPES)}")
    if kind not in CLIENT_MESSAGE_TYPES:
        _unsupported("type", f"unknown message type; supported: {', '.join(CLIENT_MESSAGE_TYPES)}")


def _unsupported(field: str, message: str) -> NoReturn:
    raise ProtocolError("unsupported", message, field=field)


_TYPES: dict[str, type] = {str(kind.__struct_config__.tag): kind for kind in get_args(ClientMessage)}
_VALIDATION = re.compile(r"(?P<problem>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_NAMED_FIELD = re.compile(r"Object (?P<fault>contains unknown|missing required) field `(?P<name>[^`]*)`")
_ANY_KEY = "[...]"
MAX_NAME_LENGTH = 64
"""A client's own field names are told back so far."""


def _invalid_param(text: str, kind: type) -> ProtocolError:
    """From msgspec's "Expected `int`, got `str` - at `$.sampling.seed`"; it never quotes values."""
    found = _VALIDATION.fullmatch(text)
    assert found is not None
    problem, path = found["problem"], _cut((found["path"] or "").removesuffix(_ANY_KEY))
    named = _NAMED_FIELD.fullmatch(problem)
    if named is None:
        problem = problem.replace("`", "")
        return ProtocolError("invalid_param", f"{path}: {problem}" if path else problem, field=path)
    name = _cut(named["name"])
    field = f"{path}.{name}" if path else name
    if named["fault"] == "missing required":
        return ProtocolError("invalid_param", f"{field} is missing", field=field)
    hint = _hint(name, kind, path)
    return ProtocolError("invalid_param", f"{field} is not a field; {hint}", field=field)


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[:MAX_NAME_LENGTH]}..."


def _hint(name: str, kind: type, path: str) -> str:
    """What may have been meant in place of the field `name` of the map at `path`."""
    keys = [int(index) if index else key for key, index in re.findall(r"(\w+)|\[(\d+)\]", path)]
    known = field_names(type_at(kind, keys))
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
