"""How a daemon ends: drained, failed or hung, and what its clients are told."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from wire_daemon import TERMINAL, daemon, runner, token, wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.client import Client
from mlxd.scheduler.errors import (
    EngineFailedError,
    MlxdError,
    RejectedError,
    RequestFailedError,
)

SERVE = """
import asyncio, sys
from pathlib import Path
from wire_daemon import Daemon, config, runner
sys.exit(asyncio.run(Daemon(config(Path(sys.argv[1])), runner(0.005)).server.serve()))
"""


def test_a_drain_finishes_what_runs_and_admits_nothing(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(0.005)) as served, served.client("admin") as client:
        stream = client.stream("hi", SamplingParams(max_tokens=100))
        chunks = [next(stream)]
        client.drain()
        with pytest.raises(RejectedError) as raised:
            client.generate("too late")
        chunks += stream
        served.join()
    assert raised.value.reason == "draining"
    assert (chunks[-1].finish_reason, sum(len(chunk.token_ids) for chunk in chunks)) == ("length", 100)
    assert served.exit_code == 0


def test_a_drain_that_takes_too_long_ends_requests_with_an_error(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, runner=runner(0.005), drain_timeout_s=0.2) as served,
        served.client("admin") as client,
    ):
        stream = client.stream("hi", SamplingParams(max_tokens=4000))
        next(stream)
        client.drain()
        with pytest.raises(RequestFailedError) as raised:
            list(stream)
        served.join()
    assert raised.value.code == "draining"
    assert served.exit_code == 0


def test_a_second_drain_does_not_wait(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, runner=runner(0.005), drain_timeout_s=60.0) as served,
        served.client("admin") as client,
    ):
        stream = client.stream("hi", SamplingParams(max_tokens=4000))
        next(stream)
        client.drain()
        client.drain()
        with pytest.raises(MlxdError):
            list(stream)
        served.join(5.0)


def test_a_failed_step_ends_every_request_and_the_daemon(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(0.002, fail_at_step=30)) as served:
        with served.submit() as peer:
            for number in range(5):
                peer.send("generate", id=str(number), prompt="hi", sampling={"max_tokens": 100})
            ends = [peer.until_terminal(str(number))[-1] for number in range(1)]
            while len(ends) < 5:
                if (message := peer.receive())["type"] in TERMINAL:
                    ends.append(message)
        served.join()
    assert {(m["type"], m["code"]) for m in ends} == {("error", "engine_failed")}
    assert len({m["id"] for m in ends}) == 5
    assert served.exit_code == 1


def test_an_engine_that_hangs_is_left_behind_and_clients_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxd.scheduler.server.STOP_TIMEOUT_S", 0.1)
    with (
        daemon(tmp_path, runner=runner(hang_at_step=3), drain_timeout_s=0.1) as served,
        served.client("admin") as client,
    ):
        stream = client.stream("hi", SamplingParams(max_tokens=100))
        next(stream)
        client.drain()
        with pytest.raises(EngineFailedError, match="does not answer"):
            list(stream)
        served.join()
        served.runner.resume.set()
    assert served.exit_code == 1


def test_sigterm_drains(tmp_path: Path) -> None:
    tests = str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", SERVE, str(tmp_path)], cwd=tests) as process:
        with Client(f"ipc://{tmp_path}/s", token=token("acme"), timeout_s=20, wait_s=20) as client:
            wait_until(lambda: client.ping() == "running", 20)
            stream = client.stream("hi", SamplingParams(max_tokens=100))
            chunks = [next(stream)]
            process.send_signal(signal.SIGTERM)
            chunks += stream
        assert sum(len(chunk.token_ids) for chunk in chunks) == 100
        assert process.wait(10) == 0
    assert not list(tmp_path.iterdir())


def test_clients_raise_what_ended_the_engine(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, runner=runner(0.002, fail_at_step=30)) as served,
        served.client() as client,
        pytest.raises(EngineFailedError),
    ):
        client.generate("hi", SamplingParams(max_tokens=100))
