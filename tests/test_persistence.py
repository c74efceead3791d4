"""A page's file: what is in it, and that nothing else passes for it."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxd.caches.persistence import PageCodec, PageFileError, PageFormat, PageName, PlaneSpec

PLANES = (PlaneSpec("layers.0.0", "F32", (2, 4, 3)), PlaneSpec("layers.0.1", "BF16", (2, 4, 5)))
FORMAT = PageFormat("weights", "kv:paged:4", 4, 0, PLANES)
SECRET = b"s" * 32
NAME = PageName(key=b"k" * 32, parent=b"p" * 32, index=2)
PAYLOAD = bytes(np.random.default_rng(0).integers(0, 256, FORMAT.page_bytes, dtype=np.uint8))
CODEC = PageCodec((FORMAT,), SECRET)
FILE = b"".join(CODEC.encode(NAME, PAYLOAD))
HEADER_END = 8 + int.from_bytes(FILE[:8], "little")


def with_metadata(**changes: str | None) -> bytes:
    """The file, some metadata replaced or taken out."""
    header = json.loads(FILE[8:HEADER_END])
    header["__metadata__"] = {k: v for k, v in (header["__metadata__"] | changes).items() if v is not None}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + PAYLOAD


METADATA = json.loads(FILE[8:HEADER_END])["__metadata__"]


def reason_of(data: bytes, name: PageName = NAME, codec: PageCodec = CODEC) -> str:
    with pytest.raises(PageFileError) as caught:
        codec.decode(name, data)
    return caught.value.reason


def test_a_page_comes_back_bit_for_bit() -> None:
    assert bytes(CODEC.decode(NAME, FILE)) == PAYLOAD


def test_a_file_is_safetensors_with_its_planes_and_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    path.write_bytes(FILE)
    arrays, metadata = mx.load(str(path), return_metadata=True)
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "layers.0.0": (mx.float32, (2, 4, 3)),
        "layers.0.1": (mx.bfloat16, (2, 4, 5)),
    }
    assert np.array(arrays["layers.0.1"].view(mx.uint8)).tobytes() == PAYLOAD[-80:]
    digest = metadata.pop("digest")
    assert len(digest) == 64
    assert {k: v for k, v in metadata.items() if k in METADATA} == {
        "format": "mlxd-page/1",
        "model": "weights",
        "signature": "kv:paged:4",
        "page_size": "4",
        "floor": "0",
        "offset": "12",
        "tokens": NAME.key.hex(),
        "parent": NAME.parent.hex(),
    }


@pytest.mark.parametrize("field", sorted(METADATA))
@pytest.mark.parametrize("value", ["0" * 64, "", 'x"y', None])
def test_a_changed_or_missing_header_field_is_never_taken(field: str, value: str | None) -> None:
    reason = "corrupt" if field == "digest" and value is not None else "foreign"
    assert reason_of(with_metadata(**{field: value})) == reason


def test_the_unchanged_header_is_the_one_that_passes() -> None:
    assert with_metadata() == FILE


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, HEADER_END - 1, HEADER_END, HEADER_END + 1, len(FILE) - 1])
def test_a_file_that_ends_early_is_truncated(size: int) -> None:
    assert reason_of(FILE[:size]) == "truncated"


def test_a_file_that_goes_on_is_corrupt() -> None:
    assert reason_of(FILE + b"\0") == "corrupt"


@pytest.mark.parametrize("position", range(0, len(FILE), 7))
def test_a_flipped_bit_anywhere_is_seen(position: int) -> None:
    damaged = bytearray(FILE)
    damaged[position] ^= 0x10
    assert reason_of(bytes(damaged)) in {"truncated", "corrupt", "foreign"}


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"__metadata__": 1}', b"\xff\xfe", b"{" * 100])
def test_a_header_that_is_no_header_is_corrupt(text: bytes) -> None:
    assert reason_of(len(text).to_bytes(8, "little") + text + PAYLOAD) == "corrupt"


@pytest.mark.parametrize(
    "format",
    [
        replace(FORMAT, model="other weights"),
        replace(FORMAT, signature="kv:paged-quant:8:64:4"),
        replace(FORMAT, page_size=8),
        replace(FORMAT, floor=64),
        replace(FORMAT, planes=PLANES[:1]),
        replace(FORMAT, planes=(replace(PLANES[0], dtype="U32"), PLANES[1])),
        replace(FORMAT, planes=(replace(PLANES[0], shape=(4, 2, 3)), PLANES[1])),
    ],
)
def test_a_page_of_another_format_is_foreign(format: PageFormat) -> None:
    assert reason_of(FILE, codec=PageCodec((format,), SECRET)) == "foreign"


@pytest.mark.parametrize(
    "name", [replace(NAME, key=b"o" * 32), replace(NAME, parent=b"o" * 32), replace(NAME, index=1)]
)
def test_a_page_under_another_pages_name_is_foreign(name: PageName) -> None:
    assert reason_of(FILE, name) == "foreign"


def test_planes_under_another_pages_header_are_corrupt() -> None:
    other = replace(NAME, key=b"o" * 32)
    digest = json.loads(FILE[8:HEADER_END])["__metadata__"]["digest"]
    forged = CODEC.encode(other, PAYLOAD)[0]
    own = json.loads(forged[8:])["__metadata__"]["digest"]
    assert reason_of(forged.replace(own.encode(), digest.encode()) + PAYLOAD, other) == "corrupt"


def test_without_the_secret_nobody_makes_a_page() -> None:
    forged = b"".join(PageCodec((FORMAT,), b"guess").encode(NAME, PAYLOAD))
    assert reason_of(forged) == "corrupt"
