"""What the command makes of standard streams that are closed, take nothing more or lack characters."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mlxd.scheduler.client_verbs import Input, _as_json
from mlxd.scheduler.progress import ProgressBars
from mlxd.scheduler.results import Completion, Usage

MLXD = (sys.executable, "-m", "mlxd.scheduler")
CONFIG = f"version: 1\ntenants: [{{name: a, token_sha256: '{'0' * 64}'}}]\n"
AFTER_OPENING = """
import os, socket, sys
from mlxd.scheduler.standard_streams import open_standard_streams
open_standard_streams()
with socket.socket() as opened:
    numbers = (sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno(), opened.fileno())
print("nowhere")
sys.exit(numbers[:3] != (0, 1, 2) or numbers[3] < 3 or sys.stdin.read() != "")
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_nothing_else_gets_the_number_of_a_standard_stream_that_is_closed(closed: str) -> None:
    script = (sys.executable, "-c", AFTER_OPENING)
    run = subprocess.run(("sh", "-c", f'"$@" {closed}', "sh", *script), stdin=subprocess.DEVNULL, check=False)
    assert run.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        (("--version",), ">&-", 0),
        (("serve", "FILE"), "<&- >&- 2>&-", 2),
        (("generate", "-"), "<&-", 1),
        (("chat",), "<&-", 0),
    ],
    ids=str,
)
def test_a_verb_runs_without_its_standard_streams(
    arguments: tuple[str, ...], closed: str, code: int, tmp_path: Path
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(CONFIG + "model: {path: /nowhere}\n")
    command = [*MLXD, *(str(path) if each == "FILE" else each for each in arguments)]
    environment = {**os.environ, "MLXD_TOKEN": "t", "MLXD_ENDPOINT": f"ipc://{tmp_path}/none"}
    run = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, env=environment, check=False
    )
    assert run.returncode == code
    assert b"Traceback" not in run.stderr


@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), ("token", "a"), ("simulate", "FILE")], ids=str
)
def test_a_stdout_that_takes_nothing_is_one_line(arguments: tuple[str, ...], tmp_path: Path) -> None:
    trace = Path(__file__).parent.parent / "examples/traces/two_tenants.yaml"
    command = [*MLXD, *(str(trace) if each == "FILE" else each for each in arguments)]
    with open(os.devnull, "rb") as not_for_writing:
        run = subprocess.run(command, stdout=not_for_writing, stderr=subprocess.PIPE, check=False)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == b"mlxd: input or output: Bad file descriptor"
    assert b"Traceback" not in run.stderr


def test_a_character_that_stdout_lacks_is_printed_as_its_escape() -> None:
    script = (
        "from mlxd.scheduler.standard_streams import open_standard_streams; open_standard_streams();"
        "print('caf\\xe9 \\u0552')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=False)
    assert (run.stdout, run.stderr) == (b"caf\xe9 \\u0552\n", b"")


def test_json_is_whole_in_any_encoding() -> None:
    answer = Completion("caf\xe9 \U0001f600", (1, 2), "stop", Usage(1, 2, 0), ())
    line = _as_json(0, Input("\u0552"), answer)
    assert line.isascii()
    assert (json.loads(line)["prompt"], json.loads(line)["text"]) == ("\u0552", answer.text)


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


class _Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize(("stream", "is_terminal"), [(_Full, False), (_Broken, False), (_Full, True)])
def test_progress_that_cannot_be_shown_stops_nothing(stream: type[io.StringIO], is_terminal: bool) -> None:
    with ProgressBars(Console(file=stream(), force_terminal=is_terminal)) as bars:
        for fraction in (0.0, 0.5, 1.0):
            bars("load", fraction)
