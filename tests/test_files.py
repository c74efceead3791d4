"""Files that somebody names are read within a bound, and nothing is waited for: at every door."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxd.batching.chat_template import ChatTemplate
from mlxd.batching.errors import ModelError
from mlxd.batching.model_files import inspect
from mlxd.batching.text import Tokenizer
from mlxd.caches import files
from mlxd.caches.disk_store import DiskStore
from mlxd.caches.files import read_file
from mlxd.scheduler import cli
from mlxd.scheduler.config import Config
from mlxd.scheduler.document import MAX_BYTES
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.frames import MAX_STRING_BYTES
from mlxd.scheduler.keys import read_keys, read_public_key
from mlxd.scheduler.replay import MAX_CSV_BYTES
from mlxd.scheduler.tokens import MAX_FILE_BYTES, read_token
from mlxd.scheduler.trace import Trace

NO_FILE = "it is a pipe or a device, not a file"


def sparse(path: Path, num_bytes: int) -> Path:
    """A file of so many zeros that takes no room."""
    with path.open("wb") as file:
        file.truncate(num_bytes)
    path.chmod(0o600)
    return path


def pipe(path: Path) -> Path:
    """One that nobody writes to."""
    os.mkfifo(path, 0o600)
    return path


def test_a_file_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes, the limit"):
        read_file(path, 4)


def test_a_file_that_grows_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "open_file", lambda path, max_bytes: io.BytesIO(b"12345"))
    with pytest.raises(OSError, match="it has more than 4 bytes, the limit"):
        read_file("f", 4)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (pipe, NO_FILE),
        (lambda path: Path("/dev/zero"), NO_FILE),
        (lambda path: path.parent, "Is a directory"),
        (lambda path: path, "No such file or directory"),
        (lambda path: Path(f"{path}\0"), "embedded null byte"),
    ],
    ids=["pipe", "device", "folder", "nothing", "no name"],
)
def test_what_is_no_file_is_told_at_once(make: Callable[[Path], Path], reason: str, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - strerror is compared
        read_file(make(tmp_path / "it"), 10)
    assert caught.value.strerror == reason


def trace_with(path: Path) -> Path:
    trace = path.with_name("trace.yaml")
    trace.write_text(f"version: 1\ntenants: [{{name: a}}]\nreplay: {{csv: '{path}'}}\n")
    return trace


DOORS: dict[str, tuple[Callable[[Path], object], int]] = {
    "config": (Config.load, MAX_BYTES),
    "trace": (Trace.load_file, MAX_BYTES),
    "recording": (lambda path: Trace.load_file(trace_with(path)).arrivals(path.parent), MAX_CSV_BYTES),
    "token": (lambda path: read_token(None, path), MAX_FILE_BYTES),
    "secret key": (read_keys, 256),
    "public key": (read_public_key, 256),
}


@pytest.mark.parametrize(("read", "max_bytes"), DOORS.values(), ids=DOORS)
def test_every_door_names_the_path_and_the_limit(
    read: Callable[[Path], object], max_bytes: int, tmp_path: Path
) -> None:
    too_large = sparse(tmp_path / "large", 2**40)
    for path, reason in (
        (too_large, f"it has more than {max_bytes} bytes, the limit"),
        (pipe(tmp_path / "pipe"), NO_FILE),
        (Path("/dev/zero"), NO_FILE),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            read(path)
        assert str(caught.value) == f"{path}: cannot be read: {reason}"


@pytest.mark.parametrize("verb", ["serve", "check", "simulate"])
@pytest.mark.parametrize("make", [pipe, lambda path: Path("/dev/zero")], ids=["pipe", "device"])
def test_verbs_end_with_one_line(
    verb: str, make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path / "it")
    assert cli.run([verb, str(path)]) == 2
    assert capsys.readouterr().err == f"mlxd: {path}: cannot be read: {NO_FILE}\n"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", inspect),
        ("model.safetensors", inspect),
        ("tokenizer_config.json", Tokenizer.load),
        ("chat_template.jinja", lambda folder: ChatTemplate.load(folder, {})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("make", [pipe, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_model_folder_is_refused_for_what_is_no_file(
    name: str, read: Callable[[Path], object], make: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name} cannot be read: {NO_FILE}"):
        read(tmp_path)


def test_a_tokenizer_is_a_file(tmp_path: Path) -> None:
    pipe(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match=rf"tokenizer\.json holds no usable tokenizer: .*{NO_FILE}"):
        Tokenizer.load(tmp_path)


def test_a_header_of_weights_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    weights = sparse(tmp_path / "model.safetensors", 2**40)
    with weights.open("r+b") as file:
        file.write((2**39).to_bytes(8, "little"))
    with pytest.raises(ModelError, match=r"has a header of 549755813888 bytes; the limit is \d+"):
        inspect(tmp_path)


def test_a_secret_of_the_disk_tier_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    DiskStore(tmp_path, 2**20).close()
    (secret,) = (path for path in tmp_path.iterdir() if path.stat().st_size == 32)
    secret.unlink()
    pipe(secret)
    with pytest.raises(OSError, match=NO_FILE):
        DiskStore(tmp_path, 2**20)


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_standard_input_without_end_is_refused(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXD_TOKEN", "t")
    with open("/dev/zero", encoding="utf-8") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        assert cli.run([verb, *(["-"] if verb == "generate" else [])]) == 2
    error = f"mlxd: standard input has more than {MAX_STRING_BYTES} characters, the limit\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_standard_input_that_is_no_text_is_refused(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXD_TOKEN", "t")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    assert cli.run([verb, *(["-"] if verb == "generate" else [])]) == 2
    assert capsys.readouterr().err == "mlxd: standard input is not UTF-8 text\n"


@pytest.mark.parametrize(
    "arguments",
    [["generate", b"\xff"], ["status", "--token", b"\xff"], ["check", b"\xff.yaml"], [b"\xff"]],
    ids=str,
)
def test_an_argument_that_is_no_text_is_one_line(arguments: list[str | bytes]) -> None:
    command = [sys.executable, "-m", "mlxd.scheduler", *arguments]
    run = subprocess.run(command, capture_output=True, check=False)
    assert (run.returncode, run.stdout) == (2, b"")
    assert re.fullmatch(rb"mlxd: the argument '\\udcff[.a-z]*' is not UTF-8 text\n", run.stderr)
