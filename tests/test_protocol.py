"""Frames to messages: what is read, and what every broken frame is told."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import messages as wire
from mlxd.scheduler.errors import ProtocolError
from mlxd.scheduler.events import Usage
from mlxd.scheduler.frames import MAX_DEPTH, MAX_ITEMS, MAX_NODES, MAX_STRING_BYTES
from mlxd.scheduler.protocol import Encoding, decode, decode_reply, encode, encoding_of, kind_of

MAX_BYTES = 4 * 2**20
GENERATE = {"type": "generate", "id": "r1", "prompt": "hi"}
ENCODERS = {"json": msgspec.json.encode, "msgpack": msgspec.msgpack.encode}


def refusal(frame: bytes, max_bytes: int = MAX_BYTES) -> ProtocolError:
    with pytest.raises(ProtocolError) as raised:
        decode(frame, max_bytes)
    return raised.value


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(v=1, token="secret", client="test"),
        wire.Generate(id="a", prompt="text"),
        wire.Generate(id="a", messages=(wire.ChatMessage(role="user", content="hi"),), stream=False),
        wire.Generate(id="a", token_ids=(1, 2), sampling=SamplingParams(logit_bias={3: -1.5}, stop=("x",))),
        wire.Cancel(id="a"),
        wire.Status(),
        wire.Ping(id="p"),
        wire.Drain(),
        wire.Reload(id="r"),
    ],
    ids=kind_of,
)
def test_client_messages_survive_both_encodings(message: wire.ClientMessage, encoding: Encoding) -> None:
    frame = encode(message, encoding)
    assert encoding_of(frame) == encoding
    assert decode(frame, MAX_BYTES) == message


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(
    "message",
    [
        wire.Chunk(id="a", seq=3, text="é", token_ids=(1,), logprobs=(TokenLogprobs(-0.5, ((1, -0.5),)),)),
        wire.Done(id="a", finish_reason="stop", usage=Usage(1, 2), text="x", token_ids=(4, 5)),
        wire.Rejected(id="a", reason="never_fits", message="m", retryable=False),
        wire.Error(code="decode", message="m"),
        wire.KeepAlive(state="idle"),
    ],
    ids=kind_of,
)
def test_daemon_messages_survive_both_encodings(message: wire.ServerMessage, encoding: Encoding) -> None:
    assert decode_reply(encode(message, encoding)) == message


def test_optional_fields_are_left_out_and_every_message_has_version_and_type() -> None:
    assert msgspec.json.decode(encode(wire.Error(code="decode", message="m"), "json")) == {
        "type": "error",
        "v": 1,
        "code": "decode",
        "message": "m",
    }


def test_clients_skip_fields_of_a_newer_daemon() -> None:
    assert decode_reply(b'{"type":"accepted","v":1,"id":"a","new":1}') == wire.Accepted(id="a")


def test_replies_that_cannot_be_read_are_protocol_errors() -> None:
    with pytest.raises(ProtocolError, match="this client cannot read"):
        decode_reply(b"\xc1")


@pytest.mark.parametrize("encode_body", ENCODERS.values(), ids=ENCODERS)
def test_fields_that_begin_with_x_are_skipped_at_the_top_alone(encode_body) -> None:
    assert decode(encode_body(GENERATE | {"x_trace": {"any": [1]}}), MAX_BYTES).id == "r1"
    error = refusal(encode_body(GENERATE | {"sampling": {"x_temperature": 1}}))
    assert error.field == "sampling.x_temperature"


def deep(levels: int) -> dict[str, object]:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return GENERATE | {"x_deep": value}


NAN, INFINITY = struct.pack(">d", float("nan")), struct.pack(">d", float("inf"))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "truncated at byte 0"),
        (b"\xc1", "0xc1 at byte 0"),
        (b"garbage", "at byte"),
        (b"\x81\xa4type", "truncated at byte 6"),
        (b"\x81\xa4typ", "truncated at byte 5"),
        (b"\x81\xa1a\xd2\x00", "truncated"),
        (b"\x80\x00", "trailing bytes at byte 1"),
        (b"\x93\x01\x02\x03", "not a msgpack map"),
        (b"\x81\xa1a\xd4\x01\x00", "0xd4 at byte 3"),
        (b"\x81\xa1a\xc4\x01\x00", "0xc4 at byte 3"),
        (b"\x82\xa1a\x01\xa1a\x02", "duplicate key at byte 4"),
        (b"\x82\x05\x01\xcc\x05\x02", "duplicate key at byte 3"),
        (b"\x81\xc0\x01", "key that is neither"),
        (b"\x81\x90\x01", "key that is neither"),
        (b"\x81\xa1a\xa2\xc3\x28", "invalid UTF-8 at byte 4"),
        (b"\x81\xa1a\xcb" + NAN, "not finite at byte 3"),
        (b"\x81\xa1a\xcb" + INFINITY, "not finite at byte 3"),
        (b'{"a"', "byte"),
        (b'{"a":1}x', "byte 8"),
        (b'{"a":\xff}', "invalid UTF-8 at byte 5"),
        (b'{"a":1,"a":2}', "duplicate key at byte 7"),
        (b'{"a":1,"\\u0061":2}', "duplicate key at byte 7"),
        (b'{"x_a":{"b":1,"b":2}}', "duplicate key at byte 14"),
        (b'{"a":NaN}', "byte 5"),
        (b'{"a":Infinity}', "byte 5"),
        (b'{"a":1e999}', "out of range"),
        (b'{"a":"\\ud800"}', "not a json map"),
        (b"{]", "not a json map"),
    ],
)
def test_what_is_neither_msgpack_nor_json_says_where_and_echoes_nothing(frame: bytes, words: str) -> None:
    error = refusal(frame)
    assert (error.code, words in str(error)) == ("decode", True), str(error)
    assert "byte" in str(error)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"\xdf\xff\xff\xff\xff", f"4294967295 at byte 0 is over the limit of {MAX_ITEMS}"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "list length 4294967295 at byte 3"),
        (b"\x81\xa1a\xdb\xff\xff\xff\xff", f"4294967295 at byte 3 is over the limit of {MAX_STRING_BYTES}"),
        (msgspec.json.encode(deep(MAX_DEPTH)), f"depth {MAX_DEPTH + 1}"),
        (msgspec.msgpack.encode(deep(MAX_DEPTH)), f"depth {MAX_DEPTH + 1}"),
        (b'{"a":' + b"[" * 100_000, f"depth {MAX_DEPTH + 1}"),
        (b"\x81\xa1a" + b"\x91" * 100_000, f"depth {MAX_DEPTH + 1}"),
        (b'{"a":[' + b"1," * MAX_ITEMS + b"1]}", f"list length {MAX_ITEMS + 1}"),
        (b'{"a":[' + b'"",' * MAX_ITEMS + b'""]}', f"is over the limit of {3 * MAX_NODES}"),
        (b'{"a":[' + b"{}," * MAX_ITEMS + b'""]}', f"is over the limit of {3 * MAX_NODES}"),
        (b'{"a":[' + b"[1,2,3]," * 2**17 + b'""]}', f"is over the limit of {3 * MAX_NODES}"),
        (b'{"a":[' + (b"[" + b"1," * 2**17 + b"1],") * 3 + b"1]}", f"items {3 * 2**17 + 3}"),
        (b"\x81\xa1a\xdd\x00\x00\xff\xff" + b"\x90" * 0xFFFF, f"number of values {MAX_NODES + 1}"),
        (b"\x81\xa1a\xdd\x00\x00\xff\xff" + b"\x81\xa0\xc0" * 0xFFFF, f"is over the limit of {MAX_NODES}"),
        (
            b"\x81\xa1a\x93" + (b"\xdd\x00\x02\x00\x00" + b"\x01" * 2**17) * 3,
            f"number of all items {3 * 2**17 + 4}",
        ),
        (b'{"a":"' + b"x" * (MAX_STRING_BYTES + 1) + b'"}', f"string length {MAX_STRING_BYTES + 1}"),
    ],
    ids=range(16),
)  # fmt: skip
def test_what_is_too_large_is_told_the_limit(frame: bytes, words: str) -> None:
    error = refusal(frame)
    assert (error.code, words in str(error)) == ("too_large", True), str(error)


def test_a_frame_over_the_byte_limit_is_not_looked_at() -> None:
    error = refusal(b"\xc1" * 11, max_bytes=10)
    assert (error.code, str(error)) == ("too_large", "the message has 11 bytes; the limit is 10")


@pytest.mark.parametrize("encode_body", ENCODERS.values(), ids=ENCODERS)
def test_what_is_just_within_the_limits_is_read(encode_body) -> None:
    ids = tuple(range(100_000))
    body = deep(MAX_DEPTH - 1) | {"token_ids": ids, "x_text": "x" * MAX_STRING_BYTES}
    assert decode(encode_body(body), MAX_BYTES).token_ids == ids


@pytest.mark.parametrize("encode_body", ENCODERS.values(), ids=ENCODERS)
@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"type": "generat"}, "unsupported", "type"),
        ({"type": None}, "unsupported", "type"),
        ({"type": 5}, "unsupported", "type"),
        ({"v": 2}, "unsupported", "v"),
        ({"v": "1"}, "invalid_param", "v"),
        ({"v": True}, "invalid_param", "v"),
        ({"temprature": 1.0}, "invalid_param", "temprature"),
        ({"sampling": {"temprature": 1.0}}, "invalid_param", "sampling.temprature"),
        ({"sampling": {"max_tokens": "5"}}, "invalid_param", "sampling.max_tokens"),
        ({"sampling": {"max_tokens": True}}, "invalid_param", "sampling.max_tokens"),
        ({"sampling": {"max_tokens": 5.0}}, "invalid_param", "sampling.max_tokens"),
        ({"sampling": {"temperature": "hot"}}, "invalid_param", "sampling.temperature"),
        ({"sampling": {"logit_bias": {"x": 1}}}, "invalid_param", "sampling.logit_bias"),
        ({"sampling": []}, "invalid_param", "sampling"),
        ({"prompt": 5}, "invalid_param", "prompt"),
        ({"token_ids": ["1"]}, "invalid_param", "token_ids[0]"),
        ({"messages": [{"role": "user"}]}, "invalid_param", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "invalid_param", "messages[0].name"),
        ({"id": ""}, "invalid_param", "id"),
        ({"id": 5}, "invalid_param", "id"),
        ({"id": "x" * 129}, "invalid_param", "id"),
        ({"stream": 1}, "invalid_param", "stream"),
    ],
    ids=str,
)
def test_wrong_fields_are_named_with_the_request(encode_body, change, code: str, field: str) -> None:
    error = refusal(encode_body(GENERATE | change))
    assert (error.code, error.field) == (code, field), str(error)
    assert error.request_id == ("r1" if "id" not in change else change["id"] if change["id"] == "" else "")
    if code == "unsupported":
        assert "supported: " in str(error)


def test_values_are_never_echoed() -> None:
    error = refusal(msgspec.json.encode(GENERATE | {"sampling": {"seed": "my secret"}}))
    assert "secret" not in str(error)


def test_numbers_beyond_64_bits_reach_the_range_check() -> None:
    message = decode(
        msgspec.json.encode(GENERATE)[:-1] + b',"sampling":{"seed":18446744073709551616}}', MAX_BYTES
    )
    assert message.sampling.seed == 2**64


def mutated(frame: bytes) -> st.SearchStrategy[bytes]:
    """The frame cut off or with one byte changed."""
    index = st.integers(0, len(frame) - 1)
    cut = index.map(lambda i: frame[:i])
    changed = st.tuples(index, st.integers(0, 255)).map(
        lambda change: frame[: change[0]] + bytes([change[1]]) + frame[change[0] + 1 :]
    )
    return cut | changed


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
KEYS = st.text(max_size=4) | st.integers(0, 9)
VALUES = st.recursive(
    SCALARS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(
    st.sampled_from(["type", "v", "id", "prompt", "sampling", "token", "x_y", "messages"]), VALUES
)
WHOLE = wire.Generate(
    id="a",
    messages=(wire.ChatMessage(role="user", content="é"),),
    sampling=SamplingParams(seed=1, logit_bias={1: 0.5}, stop=("x",)),
)
FRAMES = (
    st.binary(max_size=64)
    | st.binary(max_size=64).map(lambda tail: b"{" + tail)
    | BODIES.map(lambda body: msgspec.msgpack.encode({"type": "generate"} | body))
    | BODIES.map(lambda body: msgspec.json.encode({"type": "hello"} | body))
    | mutated(encode(WHOLE))
    | mutated(encode(WHOLE, "json"))
)


@given(FRAMES)
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    try:
        message = decode(frame, MAX_BYTES)
    except ProtocolError as refused:
        code = refused.code
    else:
        code = ""
        assert decode(encode(message), MAX_BYTES) == message
    assert code in {"", "decode", "too_large", "unsupported", "invalid_param"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 1}, "temprature is not a field; known are v, id, prompt, messages, token_ids, "),
        ({"promt": "x"}, "promt is not a field; did you mean prompt?"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature is not a field; did you mean temperature?"),
        (
            {"messages": [{"role": "user", "contents": "x"}]},
            "messages[0].contents is not a field; did you mean content?",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ],
)
def test_a_field_that_is_none_is_told_with_what_was_meant(fields: dict[str, object], message: str) -> None:
    frame = msgspec.json.encode({"type": "generate", "id": "r"} | fields)
    with pytest.raises(ProtocolError) as caught:
        decode(frame, 2**20)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "body",
    [GENERATE | {"p" * 100_000: 1}, GENERATE | {"sampling": {"p" * 100_000: 1}}],
    ids=["top", "nested"],
)
def test_names_that_a_client_made_up_are_told_back_cut(body: dict[str, object]) -> None:
    error = refusal(msgspec.msgpack.encode(body))
    assert "p" * 64 + "..." in error.field
    assert "p" * 65 not in str(error)
    assert len(str(error)) < 400
