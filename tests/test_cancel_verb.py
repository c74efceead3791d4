"""What ends a request: `mlxd cancel`, Ctrl-C, and leaving a stream; against a daemon whose requests last."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from wire_daemon import Daemon, daemon, runner, token

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import cli
from mlxd.scheduler.client import Client
from mlxd.scheduler.errors import RequestFailedError

Capture = pytest.CaptureFixture[str]


def begin(running: Daemon, request_id: str, ends: list[str]) -> threading.Thread:
    """A request of acme's whose reader puts the code of its end into `ends`; returns once it has a token."""
    has_begun = threading.Event()

    def read() -> None:
        try:
            with Client(running.config.server.submit, token=token("acme")) as client:
                for _ in client.stream("the dog", SamplingParams(max_tokens=3000), request_id=request_id):
                    has_begun.set()
            ends.append("done")
        except RequestFailedError as error:
            ends.append(error.code)

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(10)
    return thread


def test_a_cancel_ends_a_request_of_ones_own_alone(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    with daemon(tmp_path, runner=runner(0.01)) as running:
        monkeypatch.setenv("MLXD_ENDPOINT", running.config.server.submit)
        reader = begin(running, "story", ends)
        monkeypatch.setenv("MLXD_TOKEN", token("beta"))
        assert cli.run(["cancel", "story"]) == 1
        refused = capsys.readouterr()
        assert (refused.out, refused.err.splitlines()[-1]) == ("", "mlxd: no open request has the id 'story'")
        monkeypatch.setenv("MLXD_TOKEN", token("acme"))
        assert cli.run(["cancel", "story"]) == 0
        assert capsys.readouterr().out == "cancelling story\n"
        reader.join(10)
        assert cli.run(["cancel", "story"]) == 1
    assert ends == ["cancelled"]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("prompts", [["the dog"], ["the dog", "the fox", "the end"]], ids=len)
def test_ctrl_c_ends_all_that_was_asked_though_requests_outlive_their_clients(
    prompts: list[str], tmp_path: Path
) -> None:
    with daemon(tmp_path, runner=runner(0.01), resume_grace_s=60.0) as running:
        endpoint = running.config.server.submit
        command = [sys.executable, "-m", "mlxd.scheduler", "generate", "--max-tokens", "3000", *prompts]
        environment = {**os.environ, "MLXD_ENDPOINT": endpoint, "MLXD_TOKEN": token("acme")}
        with Client(endpoint, token=token("acme")) as client:
            # Ctrl-C is as in a terminal, also where the tests run in the background.
            interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            with subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, preexec_fn=interruptible
            ) as asked:
                wait_until(lambda: client.status().running == len(prompts))
                asked.send_signal(signal.SIGINT)
                assert asked.wait(10) == 130
            wait_until(lambda: client.status().running == 0)


def test_a_stream_that_is_left_ends_though_its_client_closes_at_once(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(0.01), resume_grace_s=60.0) as running:
        endpoint = running.config.server.submit
        for _ in range(20):
            with Client(endpoint, token=token("acme")) as client:
                stream = client.stream("the dog", SamplingParams(max_tokens=3000))
                next(stream)
                stream.close()
        with Client(endpoint, token=token("acme")) as client:
            wait_until(lambda: client.status().running == 0)
