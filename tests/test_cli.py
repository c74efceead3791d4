"""The command line: exit codes, one-line errors, help, tokens."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from mlxd.scheduler import cli, client_verbs, daemon_verbs
from mlxd.scheduler.access import Access
from mlxd.scheduler.config import Config
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    ConfigError,
    ConnectionLostError,
    InvalidParamError,
    InvalidPromptError,
    ModelError,
    RejectedError,
    UnauthenticatedError,
)
from mlxd.scheduler.identity import identify
from mlxd.scheduler.keys import KeyPair, write_keys
from mlxd.scheduler.login import Login
from mlxd.scheduler.tokens import make_token, read_token, token_hash

VERBS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
Run = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLXD_TOKEN", "MLXD_KEY", "MLXD_SERVER_KEY", "MLXD_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def one_error_line(capsys: Run) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"mlxd: [^\n]+\n", captured.err)
    return captured.err.removeprefix("mlxd: ").removesuffix("\n")


def test_the_version_is_printed(capsys: Run) -> None:
    assert cli.run(["--version"]) == 0
    assert re.fullmatch(r"mlxd \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_without_a_verb_help_is_printed(capsys: Run) -> None:
    assert cli.run([]) == 0
    out = capsys.readouterr().out
    assert all(
        verb in out
        for verb in ("serve", "check", "generate", "chat", "status", "cancel", "drain", "pull", "token")
    )
    assert "..." not in out.split("Commands:")[1], "a verb's short help is cut off"


def test_without_what_to_do_with_keys_help_is_printed(capsys: Run) -> None:
    assert cli.run(["keys"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\nCommands:\n  new " in captured.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example_that_parses(verb: str, capsys: Run) -> None:
    assert cli.run([verb, "--help"]) == 0
    out = capsys.readouterr().out
    example = re.search(r"Example: mlxd (.+)", out)
    assert example is not None
    assert example[1].startswith(verb)
    assert set(re.findall(r"--[a-z-]+", example[1])) <= {
        option for parameter in VERBS[verb].params for option in parameter.opts
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["generate"], "Missing argument 'PROMPT'"),
        (["generate", "--temprature", "1", "x"], "No such option: --temprature"),
        (["generate", "--max-tokens", "x", "y"], "Invalid value for '--max-tokens'"),
        (["generate", "--timeout", "0", "--token", "t", "y"], "Invalid value for '--timeout'"),
        (["generate", "x"], "no token: give --token, --tenant-key FILE or MLXD_TOKEN"),
        (
            ["generate", "--token", "t", "--temperature", "-1", "x"],
            "sampling.temperature is -1.0; it must be",
        ),
        (["generate", "--token", "t", "--stop", "", "x"], "sampling.stop[0] is empty; it must have 1 to 256"),
        (["generate", "--token", "t", "--logprobs", "3", "x"], "--logprobs shows in JSON alone; add --json"),
        (
            ["generate", "--token", "t", "--priority", "high", "x"],
            "Invalid value for '--priority': 'high' is not one of 'interactive', 'normal', 'batch'",
        ),
        (
            ["status", "--token", "t", "--endpoint", "192.0.2.2:7700"],
            "endpoint '192.0.2.2:7700' has no scheme; write tcp://192.0.2.2:7700",
        ),
        (
            ["status", "--token", "t", "--endpoint", "/run/mlxd.sock"],
            "endpoint '/run/mlxd.sock' has no scheme; write ipc:///run/mlxd.sock",
        ),
        (["serve"], "Missing argument 'CONFIG'"),
        (["serve", "/nowhere.yaml"], "/nowhere.yaml: cannot be read: No such file or directory"),
        (["check", "/nowhere.yaml"], "/nowhere.yaml: cannot be read: No such file or directory"),
        (
            ["serve", "x.yaml", "--log-level", "loud"],
            "--log-level is 'loud'; it must be debug, info, warning or error",
        ),
        (["pull", "nothing"], "MODEL is 'nothing', which is no folder, hub name or built-in model"),
        (["token", "a b"], "the tenant's name is 'a b'; it must be 1 to 64 letters"),
        (["status", "--tenant-key", "/nowhere"], "/nowhere: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: list[str], message: str, capsys: Run) -> None:
    assert cli.run(arguments) == 2
    assert message in one_error_line(capsys)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x.yaml: is empty"), 2),
        (InvalidParamError("temperature", -1, "a number from 0 to 100"), 2),
        (InvalidPromptError("prompt is empty"), 2),
        (ModelError("no such model\nand a second line"), 1),
        (RejectedError("queue_full", "try later", retryable=True), 1),
        (UnauthenticatedError(), 1),
        (ConnectionLostError("the daemon went away"), 1),
        (ClientTimeoutError("no answer"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_exit_code(
    error: BaseException, code: int, capsys: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: str) -> None:
        raise error

    monkeypatch.setattr(daemon_verbs, "pull", fail)
    assert cli.run(["pull", "x"]) == code
    if isinstance(error, KeyboardInterrupt):
        assert capsys.readouterr() == ("", "")
    else:
        assert one_error_line(capsys) == " ".join(str(error).split())


def test_the_exit_code_of_serve_is_the_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_verbs, "serve", lambda path, log_level: 1)
    assert cli.run(["serve", str(tmp_path)]) == 1


def test_a_closed_pipe_ends_quietly() -> None:
    script = "import sys; from mlxd.scheduler.cli import run; sys.exit(run(['--help']))"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = subprocess.run(
            [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert (process.returncode, process.stderr) == (1, b"")


def test_mlx_is_not_imported_before_a_verb_runs() -> None:
    script = "import sys, mlxd.scheduler.cli, mlxd.scheduler.server; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_new_token_fits_the_configuration_and_the_two_are_apart(capsys: Run) -> None:
    assert cli.run(["token", "acme"]) == 0
    captured = capsys.readouterr()
    token = re.fullmatch(r"the token of acme, kept nowhere: (\S{43})\n", captured.err)
    assert token is not None
    (tenant,) = Config.parse(f"version: 1\ntenants:\n{captured.out}").tenants
    assert (tenant.name, tenant.token_sha256) == ("acme", token_hash(token[1]))


def test_a_token_file_is_its_owners_alone_and_a_tenant_key(tmp_path: Path, capsys: Run) -> None:
    path = tmp_path / "acme.token"
    assert cli.run(["token", "acme", "--out", str(path)]) == 0
    captured = capsys.readouterr()
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_hash(read_token(None, path)) in captured.out
    assert captured.err == ""
    assert cli.run(["token", "acme", "--out", str(path)]) == 2
    assert "cannot be made: File exists" in one_error_line(capsys)


def test_two_tokens_differ() -> None:
    assert make_token("acme").token != make_token("acme").token


def test_a_token_file_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "acme.token"
    path.write_text("from-the-file\n")
    seen: list[Access] = []
    monkeypatch.setenv("MLXD_TOKEN", "from-the-environment")
    monkeypatch.setenv("MLXD_ENDPOINT", "ipc:///run/x.sock")
    monkeypatch.setattr(client_verbs, "drain", seen.append)
    assert cli.run(["drain"]) == cli.run(["drain", "--tenant-key", str(path)]) == 0
    assert [access.login.token for access in seen] == ["from-the-environment", "from-the-file"]
    assert {access.endpoint for access in seen} == {"ipc:///run/x.sock"}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A token, a tenant's secret key and a server's public one."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "token").write_text("from-a-file\n")
    key, _ = write_keys(folder, "acme", KeyPair.make())
    _, server = write_keys(folder, "server", KeyPair.make())
    return {"token": folder / "token", "key": key, "server": server}


TOKEN = {"MLXD_TOKEN": "t"}
KEYS = {"MLXD_KEY": "key", "MLXD_SERVER_KEY": "server"}


@pytest.mark.parametrize(
    ("options", "environment", "speaks"),
    [
        ({}, TOKEN, "t"),
        ({}, KEYS, "key"),
        ({"token": "o"}, TOKEN | KEYS, "o"),
        ({"tenant_key": "token"}, TOKEN | KEYS, "from-a-file"),
        ({"key": "key", "server_key": "server"}, TOKEN | KEYS, "key"),
        ({"key": "key"}, TOKEN | KEYS, "key"),
        ({"server_key": "server"}, TOKEN | KEYS, "key"),
        ({"tenant_key": "token"}, TOKEN, "from-a-file"),
        ({"key": "key", "server_key": "server"}, TOKEN, "key"),
        ({"token": "o"}, KEYS, "o"),
    ],
)
def test_an_option_beats_the_environment(
    options: dict[str, str], environment: dict[str, str], speaks: str, secrets: dict[str, Path]
) -> None:
    login = identified(options, environment, secrets)
    assert login.token == ("" if speaks == "key" else speaks)
    assert (login.keys is not None) == (speaks == "key")


@pytest.mark.parametrize(
    ("options", "environment", "sources"),
    [
        ({"token": "o", "key": "key"}, {}, "--token and --key"),
        ({"token": "o", "server_key": "server"}, {}, "--token and --server-key"),
        ({"tenant_key": "token", "key": "key"}, {}, "--tenant-key and --key"),
        ({"token": "o", "tenant_key": "token"}, {}, "--token and --tenant-key"),
        ({}, TOKEN | KEYS, "MLXD_TOKEN and MLXD_KEY"),
    ],
)
def test_two_credentials_of_one_place_are_refused_by_their_names(
    options: dict[str, str], environment: dict[str, str], sources: str, secrets: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=f"{sources} are both given"):
        identified(options, environment, secrets)


def identified(options: dict[str, str], environment: dict[str, str], secrets: dict[str, Path]) -> Login:
    paths = {name: secrets.get(options.get(name, "")) for name in ("tenant_key", "key", "server_key")}
    variables = {name: str(secrets.get(value, value)) for name, value in environment.items()}
    return identify(options.get("token"), **paths, environment=variables)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"two\nlines", "é".encode()])
def test_a_file_without_one_token_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="holds no token"):
        read_token(None, path)
