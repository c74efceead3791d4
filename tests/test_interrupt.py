"""Ctrl-C at any moment of a verb: no traceback, and exit code 130."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

SIGNAL_AT_IMPORT = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Sender(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)

number, module = signal.Signals[sys.argv.pop(1)], sys.argv.pop(1)
sys.meta_path.insert(0, Sender())
from mlxd.scheduler.__main__ import main
main()
"""
TRACE = """
version: 1
tenants: [{name: a}]
load: [{tenant: a, per_s: 5, until_s: 1, prompt_tokens: [1, 9], output_tokens: [1, 5]}]
"""
CONFIG = f"version: 1\ntenants: [{{name: a, token_sha256: '{'0' * 64}'}}]\n"


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, errors


@pytest.mark.parametrize(
    ("module", "verb"),
    [
        ("mlxd.scheduler.cli", "status"),
        ("typer", "status"),
        ("msgspec", "generate x"),
        ("zmq", "status"),
        ("yaml", "check FILE"),
        ("mlxd.scheduler.server", "serve FILE"),
        ("prometheus_client", "serve FILE"),
        ("matplotlib", "simulate FILE --plot FILE.svg"),
    ],
)
def test_ctrl_c_while_something_is_imported_ends_without_a_word(
    module: str, verb: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(TRACE if "simulate" in verb else CONFIG)
    arguments = verb.replace("FILE", str(path)).split()
    command = [sys.executable, "-c", SIGNAL_AT_IMPORT, "SIGINT", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert ended(process) == (130, "")


@pytest.mark.parametrize("module", ["mlxd.scheduler.server", "prometheus_client"])
def test_a_reload_that_comes_before_the_daemon_can_take_it_ends_nothing(module: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(CONFIG + f"server: {{submit: 'ipc://{tmp_path}/none/s'}}\n")
    command = [sys.executable, "-c", SIGNAL_AT_IMPORT, "SIGHUP", module, "serve", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        code, errors = ended(process)
    assert (code, errors.splitlines()[-1].endswith("none does not exist")) == (2, True)


@pytest.mark.parametrize("verb", ["status", "generate x", "resume r", "drain"])
def test_ctrl_c_while_the_daemon_is_waited_for_ends_without_a_word(verb: str, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    command = [sys.executable, "-m", "mlxd.scheduler", *verb.split(), "--endpoint", endpoint, "--token", "t"]
    with (
        zmq.Context.instance().socket(zmq.ROUTER) as daemon,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        daemon.bind(endpoint)
        assert b"hello" in daemon.recv_multipart()[1], "the verb says hello, and waits for an answer"
        process.send_signal(signal.SIGINT)
        assert ended(process) == (130, "")


def test_ctrl_c_stays_ignored_where_it_was(tmp_path: Path) -> None:
    """As for a job in the background of a shell."""
    pipe = tmp_path / "out"
    script = "import signal; from mlxd.scheduler.__main__ import main; main()"
    command = [sys.executable, "-c", script, "--version"]
    with pipe.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
        )
    while process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.005)
    assert process.returncode == 0
    assert pipe.read_text().startswith("mlxd ")
