"""`mlxd cancel`, against a daemon whose requests last."""

import threading
from pathlib import Path

import pytest
from wire_daemon import Daemon, daemon, runner, token

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
                for _ in client.stream("the dog", request_id=request_id):
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
