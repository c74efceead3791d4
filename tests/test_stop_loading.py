"""Stopping while the model loads: soon, with exit code 0, and with nothing of MLX left on the thread."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from daemon_process import SERVE, process_config, write_config
from msgspec.structs import replace
from scheduling import make_config, submission
from wire_daemon import Daemon, wait_until
from wire_daemon import config as wire_config
from wire_daemon import runner as fake_runner

from mlxd.batching import trials
from mlxd.batching.errors import ModelError
from mlxd.batching.model import resolve
from mlxd.batching.runner import Progress, Runner, ignore_progress
from mlxd.batching.user_cache import exclusive_lock
from mlxd.scheduler import daemon_verbs, server
from mlxd.scheduler.config import Config, DecodeConfig
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import EngineFailedError
from mlxd.scheduler.model_runner import load_model_runner

WAIT_S = 10.0
CONSTANTS_BYTES = 2_000
"""MLX keeps those of what it compiled; the tiny model and its pages are many times as much."""
STAGES = ("load", "tune", "self-test", "trace")
HANGING_LOAD = """
import time
from mlxd.batching import load

def hang(folder, progress, *more, **named):
    progress("load", 0.0)
    time.sleep(600)

load.load_model = hang
from mlxd.scheduler.__main__ import main
main()
"""


class Stopped(Exception):
    """What a progress call raises here to end a load."""


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    """Of a daemon that goes through every stage, the last of them for long."""
    settings = process_config(tmp_path, model)
    return replace(settings, decode=DecodeConfig(compile="on", warmup_s=60))


class EndlessLoad:
    """A runner factory that tells its progress for ever."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.error: BaseException | None = None

    def __call__(self, config: Config, progress: Progress) -> Runner:
        try:
            while True:
                progress("load", 0.5)
                self.told.set()
                time.sleep(0.001)
        except Exception as error:
            self.error = error
            raise


def test_an_engine_that_loads_ends_at_its_next_sign_of_progress(caplog: pytest.LogCaptureFixture) -> None:
    loading = EndlessLoad()
    engine = Engine(make_config(), runner_factory=loading)
    engine.start(lambda events: None)
    assert loading.told.wait(WAIT_S)
    assert engine.stop(WAIT_S)
    assert loading.error is not None
    assert (engine.snapshot.state, engine.snapshot.error) == ("stopped", "")
    assert caplog.records == []
    with pytest.raises(EngineFailedError, match="stopped before the model was loaded"):
        engine.wait_ready(WAIT_S)
    with pytest.raises(EngineFailedError, match="stopped before the model was loaded"):
        engine.submit(submission("x"))
    assert engine.stop(0.0)


def test_who_waits_for_the_model_is_told_of_the_stop() -> None:
    loading = EndlessLoad()
    engine = Engine(make_config(), runner_factory=loading)
    engine.start(lambda events: None)
    stopper = threading.Timer(0.05, engine.stop)
    stopper.start()
    with pytest.raises(EngineFailedError, match="stopped before the model was loaded"):
        engine.wait_ready(WAIT_S)
    stopper.join()


def test_a_drain_while_the_model_loads_ends_the_daemon_well(tmp_path: Path) -> None:
    loading = EndlessLoad()
    daemon = Daemon(wire_config(tmp_path), fake_runner())
    daemon.engine._factory = loading
    with daemon:
        assert loading.told.wait(WAIT_S)
        asked = time.monotonic()
        daemon.server.request_drain()
        daemon.join()
    assert daemon.exit_code == 0
    assert time.monotonic() - asked < 2.0


@contextmanager
def starting(
    config: Config, folder: Path, serve: Sequence[str] = SERVE
) -> Iterator[tuple["subprocess.Popen[bytes]", Callable[[], str]]]:
    """A daemon that is not ready yet, and what it wrote so far; killed on the way out."""
    path = folder / "daemon.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            (*serve, write_config(folder, config)), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield process, path.read_text
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("stage", "number"), [("load", signal.SIGTERM), ("tune", signal.SIGINT), ("trace", signal.SIGTERM)]
)
def test_a_signal_while_the_model_loads_ends_the_process_and_says_so(
    config: Config, tmp_path: Path, stage: str, number: signal.Signals
) -> None:
    with starting(config, tmp_path) as (process, log):
        wait_until(lambda: f"mlxd: {stage} " in log(), 60.0)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0, log()
        lines = [line for line in log().splitlines() if not line.startswith("mlxd: ")]
    assert len(lines) == 2, lines
    assert "draining" in lines[0]
    assert lines[1].endswith("ended exit_code=0")
    assert "mlxd: trace 100%" not in log()


def test_a_load_that_hangs_is_left_behind_at_the_second_signal(config: Config, tmp_path: Path) -> None:
    with starting(config, tmp_path, (sys.executable, "-c", HANGING_LOAD, "serve")) as (process, log):
        wait_until(lambda: "mlxd: load " in log(), 60.0)
        process.terminate()
        wait_until(lambda: "draining" in log(), WAIT_S)
        process.terminate()
        assert process.wait(WAIT_S) == 1, log()
    assert "engine did not stop within" in log()
    assert "Traceback" not in log()


@pytest.mark.parametrize("stage", STAGES)
def test_a_load_that_is_stopped_leaves_no_array_behind(config: Config, stage: str) -> None:
    def stop_at(now: str, share: float) -> None:
        if now == stage and share > 0.3 * (stage in ("load", "self-test")):
            raise Stopped

    assert left_bytes(config, stop_at, Stopped) < CONSTANTS_BYTES


def test_a_load_that_fails_leaves_no_array_behind(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "fault_in", lambda *arguments, **named: "off by one")
    assert left_bytes(config, ignore_progress, ModelError) < CONSTANTS_BYTES


def left_bytes(config: Config, progress: Progress, error: type[Exception]) -> int:
    """MLX memory that a load on a thread of its own still holds after its end by `error`, which is kept."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            load_model_runner(config, progress).close()
        except error as end:
            raised.append(end)

    before = mx.get_active_memory()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(raised) == 1
    return int(mx.get_active_memory() - before)


def test_a_stopped_load_gives_its_streams_back_last(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    held_bytes: list[int] = []
    clear_streams = mx.clear_streams

    def clear() -> None:
        held_bytes.append(mx.get_active_memory() - before)
        clear_streams()

    def stop(stage: str, share: float) -> None:
        if stage == "trace":
            raise Stopped

    monkeypatch.setattr(mx, "clear_streams", clear)
    before = mx.get_active_memory()
    left_bytes(config, stop, Stopped)
    assert len(held_bytes) == 1
    assert held_bytes[0] < CONSTANTS_BYTES


def test_a_wait_for_another_process_that_pulls_the_model_can_be_given_up(tmp_path: Path) -> None:
    def give_up() -> None:
        raise Stopped

    lock = tmp_path / "lock"
    with (
        exclusive_lock(lock, while_waiting=give_up),
        pytest.raises(Stopped),
        exclusive_lock(lock, while_waiting=give_up),
    ):
        raise AssertionError("the lock was free")


def test_a_download_from_the_hub_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def download(name: str, **options: Any) -> str:
        go_on.wait(WAIT_S)
        return name

    shares = iter([0.0, 0.0])

    def stop_at_third(stage: str, share: float) -> None:
        if next(shares, None) is None:
            raise Stopped

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(Stopped):
        resolve("owner/model", stop_at_third)
    go_on.set()
    assert resolve("owner/model", ignore_progress) == Path("owner/model")


def test_an_engine_that_is_left_behind_is_not_waited_for_by_python_either(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Left:
        left_engine_behind = True

        def __init__(self, config: Config, path: Path, on_progress: Progress) -> None:
            pass

        async def serve(self) -> int:
            return 1

    def leave(code: int) -> None:
        raise SystemExit(f"at once: {code}")

    monkeypatch.setattr(daemon_verbs, "configure_logging", lambda level: None)
    monkeypatch.setattr(server, "Server", Left)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="at once: 1"):
        daemon_verbs.serve(write_config(tmp_path, config), "error")
