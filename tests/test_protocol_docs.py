"""What docs/protocol.md says is what the code does."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from test_docs import code_blocks
from wire_daemon import daemon, token

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import messages as wire
from mlxd.scheduler.door import HELLO_WITHIN_S, MAX_STRANGERS
from mlxd.scheduler.frames import MAX_DEPTH, MAX_ITEMS, MAX_NODES, MAX_STRING_BYTES, MAX_TOTAL_ITEMS
from mlxd.scheduler.frontend import MAX_STRANGER_BYTES
from mlxd.scheduler.protocol import decode, decode_reply, kind_of
from mlxd.scheduler.reading import TURN_S

PAGE = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
TEXT = PAGE.read_text()
JSON_LINES = [
    line
    for block in code_blocks(PAGE, "json")
    for line in re.findall(r"^\{.*?\}$", block, re.MULTILINE | re.DOTALL)
]


def table_rows(heading: str) -> dict[str, str]:
    """First column -> second, of the tables under this heading."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", section, re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize("line", JSON_LINES)
def test_examples_are_messages(line: str) -> None:
    frame = line.encode()
    kind = msgspec.json.decode(frame)["type"]
    reply = kind != "generate" and "token" not in msgspec.json.decode(frame)
    message = decode_reply(frame) if reply else decode(frame, 2**20)
    assert kind_of(message) == kind


def test_every_message_is_listed_with_its_fields() -> None:
    section = TEXT.split("\n## Messages\n")[1].split("\n## ")[0]
    ours, theirs = section.split("From the daemon:")
    for text, union in ((ours, wire.ClientMessage), (theirs, wire.ServerMessage)):
        rows = dict(re.findall(r"^\| `([a-z]+)` \| (.*)$", text, re.MULTILINE))
        assert set(rows) >= {kind_of_type(message) for message in get_args(union)}
        for message in get_args(union):
            if message is not wire.StatusReply:
                named = set(re.findall(r"`([a-z_]+)\??`", rows[kind_of_type(message)]))
                assert set(message.__struct_fields__) - {"v"} <= named


def kind_of_type(message: type[msgspec.Struct]) -> str:
    return str(message.__struct_config__.tag)


def test_every_sampling_field_is_listed_with_its_default() -> None:
    section = TEXT.split("`sampling` has these fields")[1].split("From the daemon")[0]
    listed = set(re.findall(r"`([a-z_]+)`", section.split("|---|---|---|")[1]))
    assert listed == set(SamplingParams.__struct_fields__)
    assert f"| `max_tokens` | {SamplingParams().max_tokens} |" in section


def test_limits_are_the_codes() -> None:
    assert MAX_STRING_BYTES == 2**20
    assert "1 MiB (`max_string_bytes`)" in TEXT
    assert f"{MAX_ITEMS:,} (`max_items`)" in TEXT
    assert f"| nesting | {MAX_DEPTH} (`max_depth`)" in TEXT
    assert f"of a message together | {MAX_TOTAL_ITEMS:,} |" in TEXT
    assert f"of a message together | {MAX_NODES:,} |" in TEXT
    assert f"| message before hello | {MAX_STRANGER_BYTES:,} bytes |" in TEXT
    assert f"connections without hello on a socket | {MAX_STRANGERS} |" in TEXT
    assert f"closed after {HELLO_WITHIN_S:g} seconds" in TEXT
    assert f"more than {TURN_S * 1000:g} ms" in TEXT


def test_every_code_of_the_sources_is_listed() -> None:
    sources = "".join(path.read_text() for path in (PAGE.parent.parent / "scheduler").glob("*.py"))
    codes = set(re.findall(r'ProtocolError\(\s*"([a-z_]+)"', sources))
    codes |= set(re.findall(r'Error\(\s*(?:id=[^,]+, )?code="([a-z_]+)"', sources))
    assert codes - {"id_conflict"} <= set(table_rows("Errors"))
    reasons = set(re.findall(r'Reject(?:edError|ed)\(\s*(?:key, )?"([a-z_]+)"', sources))
    assert reasons <= set(table_rows("Errors"))


def test_the_raw_client_of_the_page_works(tmp_path: Path) -> None:
    program = next(block for block in code_blocks(PAGE, "python") if "zmq.DEALER" in block)
    with daemon(tmp_path) as served:
        command = [sys.executable, "-c", program, served.config.server.submit, token("acme"), "hello"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert "'completion_tokens': 32" in run.stdout
    assert run.stderr == ""


def test_the_raw_client_of_the_page_ends_with_an_error_where_the_daemon_answers_one(tmp_path: Path) -> None:
    program = next(block for block in code_blocks(PAGE, "python") if "zmq.DEALER" in block)
    with daemon(tmp_path) as served:
        command = [sys.executable, "-c", program, served.config.server.submit, "wrong", "hello"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (run.returncode, run.stderr) == (1, "")
    assert "unauthenticated" in run.stdout


def test_the_example_of_testing_works() -> None:
    program = next(block for block in code_blocks(PAGE, "python") if "FakeDaemon" in block)
    exec(compile(program, str(PAGE), "exec"), {})
