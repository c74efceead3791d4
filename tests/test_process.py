"""The daemon as a process: how it starts, drains, is killed and fails, as its users and supervisor see it."""

import os
import re
import signal
import socket
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import faulty_daemon
import msgspec
import pytest
from daemon_process import (
    DaemonProcess,
    daemon_process,
    process_config,
    refusal,
    write_config,
    write_tiny_model,
)
from wire_daemon import TENANTS, TERMINAL, Peer, wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config import Config
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    ConnectionLostError,
    RejectedError,
    RequestFailedError,
)

FOREVER = SamplingParams(max_tokens=8_000, temperature=0, ignore_eos=True)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    return process_config(tmp_path, model)


def assert_ended_cleanly(daemon: DaemonProcess, exit_code: int = 0) -> None:
    assert daemon.wait() == exit_code, daemon.log
    assert "Traceback" not in daemon.log
    for address in (daemon.config.server.submit, daemon.config.server.control):
        assert not Path(address.removeprefix("ipc://")).exists()


def test_a_hangup_reloads_the_file_and_ends_nothing(config: Config, tmp_path: Path) -> None:
    with daemon_process(tmp_path, config) as daemon, daemon.client("acme") as client:
        stream = client.stream("hi", greedy(400))
        next(stream)
        changed = [msgspec.structs.replace(tenant, weight=2.0) for tenant in config.tenants]
        write_config(tmp_path, msgspec.structs.replace(config, tenants=changed))
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "reloaded acme: weight 1.0 -> 2.0" in daemon.log)
        (tmp_path / "daemon.yaml").write_text("version: 2")
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "daemon.yaml:1: version is 2; it must be 1" in daemon.log)
        assert [chunk.finish_reason for chunk in stream][-1] == "length"
        daemon.terminate()
        assert_ended_cleanly(daemon)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_requests_finish_and_turns_new_ones_away(
    config: Config, tmp_path: Path, number: signal.Signals
) -> None:
    with daemon_process(tmp_path, config) as daemon, daemon.client() as client:
        expected = client.generate("hello", greedy(400)).token_ids
        stream = client.stream("hello", greedy(400))
        ids = [*next(stream).token_ids]
        daemon.process.send_signal(number)
        wait_until(lambda: client.ping() == "draining")
        with pytest.raises(RejectedError, match="draining") as refused:
            client.generate("late", greedy(1))
        ids += [token for chunk in stream for token in chunk.token_ids]
        assert_ended_cleanly(daemon)
    assert refused.value.reason == "draining"
    assert tuple(ids) == expected


def test_a_second_signal_ends_open_requests_with_an_error(config: Config, tmp_path: Path) -> None:
    with daemon_process(tmp_path, config) as daemon, daemon.client() as client:
        stream = client.stream("hello", FOREVER)
        next(stream)
        daemon.terminate()
        wait_until(lambda: client.ping() == "draining")
        asked = time.monotonic()
        daemon.terminate()
        with pytest.raises(RequestFailedError) as ended:
            list(stream)
        assert ended.value.code == "draining"
        assert_ended_cleanly(daemon)
        assert time.monotonic() - asked < 5.0


def test_a_killed_daemon_is_noticed_soon_and_started_again_over_its_sockets(
    config: Config, tmp_path: Path
) -> None:
    with daemon_process(tmp_path, config) as daemon, daemon.client() as client:
        expected = client.generate("hello", greedy(50))
        stream = client.stream("hello", FOREVER)
        next(stream)
        daemon.kill()
        killed = time.monotonic()
        with pytest.raises(ConnectionLostError):
            list(stream)
        assert time.monotonic() - killed < 2.0
        with daemon.client(timeout_s=0.5) as other, pytest.raises(ClientTimeoutError):
            other.ping()
        assert time.monotonic() - killed < 4.0
        with daemon_process(tmp_path, config, name="again") as again:
            assert client.generate("hello", greedy(50)) == expected
            again.terminate()
            assert_ended_cleanly(again)


# what is set to what, exit code, the line; {taken} is a port, {folder} holds damaged/ and no-socket
REFUSED = [
    ("version", 2, 2, r"{file}:1: version is 2; it must be .*"),
    ("scheduler.max_rows", 0, 2, r"{file}:1: scheduler.max_rows is 0; it must be .*"),
    ("server.submit", "tcp://0.0.0.0:7000", 2, r"{file}:1: server.submit is 'tcp://0.0.0.0:7000'; .*"),
    (
        "server.submit",
        "ipc://{folder}/no-socket",
        2,
        r"ipc://{folder}/no-socket: a file that is not.*",
    ),
    ("server.control", "ipc://{folder}/none/c", 2, r"ipc://\S*: the folder {folder}/none does not exist"),
    ("server.metrics", "{taken}", 2, r"server.metrics: .* '{taken}': Address already in use"),
    ("model.path", "~nobody-here/m", 2, r"{file}:1: model.path is '~nobody-here/m', which is no folder, .*"),
    ("model.path", "{folder}/none", 2, r"{file}:1: model.path is '{folder}/none', which is no folder, .*"),
    ("model.path", "{folder}/damaged", 2, r"{file}:1: model.path is '{folder}/damaged': .* is damaged: .*"),
    ("model.max_model_len", 8193, 2, r"{file}:1: model.max_model_len is 8193; the context of \S+ is 8192"),
    ("cache.budget", "900TiB", 2, r"{file}:1: cache.budget is '900TiB', \d+ bytes; it must be .* free .*"),
    ("scheduler.prefill_chunk", 100, 2, r"{file}:1: scheduler.prefill_chunk is 100; .* multiple of .* 64.*"),
]


@pytest.mark.parametrize(("setting", "value", "exit_code", "line"), REFUSED)
def test_a_start_that_cannot_be_is_one_line_and_an_exit_code(
    config: Config, tmp_path: Path, setting: str, value: Any, exit_code: int, line: str
) -> None:
    (tmp_path / "no-socket").touch()
    (tmp_path / "damaged").mkdir()
    write_tiny_model(tmp_path / "damaged")
    os.truncate(tmp_path / "damaged" / "model.safetensors", 20_000)
    with ExitStack() as stack:
        # Only where it is meant: the port could be the one that the configuration was just given.
        port = 0
        if value == "{taken}":
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        names = {
            "{folder}": str(tmp_path),
            "{file}": str(tmp_path / "refused.yaml"),
            "{taken}": f"127.0.0.1:{port}",
        }
        document = with_setting(config, setting, filled(value, names) if isinstance(value, str) else value)
        code, lines = refusal(write_config(tmp_path, document, "refused"))
    assert (code, len(lines)) == (exit_code, 1), lines
    assert re.fullmatch("mlxd: " + filled(line, names), lines[0])


def with_setting(config: Config, setting: str, value: Any) -> dict[str, Any]:
    """The configuration as a document, with one value changed: "server.submit"."""
    document = part = msgspec.to_builtins(config)
    *sections, key = setting.split(".")
    for section in sections:
        part = part[section]
    part[key] = value
    return document


def filled(text: str, names: dict[str, str]) -> str:
    for name, meaning in names.items():
        text = text.replace(name, meaning)
    return text


def test_a_second_daemon_is_refused_and_the_first_goes_on(config: Config, tmp_path: Path) -> None:
    other_port = process_config(tmp_path, config.model.path)
    with daemon_process(tmp_path, config) as first, first.client() as client:
        code, lines = refusal(write_config(tmp_path, other_port, "second"))
        assert (code, lines) == (2, [f"mlxd: {config.server.submit}: another daemon is listening there"])
        assert client.generate("hello", greedy(5)).usage.completion_tokens == 5
        first.terminate()
        assert_ended_cleanly(first)


@pytest.mark.slow
def test_twenty_starts_and_stops_end_well(config: Config, tmp_path: Path) -> None:
    for number in range(20):
        with daemon_process(tmp_path, config) as daemon, daemon.client() as client:
            client.generate("hello", greedy(1 + number))
            daemon.terminate()
            assert_ended_cleanly(daemon)


def ends(peer: Peer, count: int) -> list[tuple[str, str]]:
    """(id, error code) of as many terminal messages; nothing comes after them."""
    found: list[tuple[str, str]] = []
    while len(found) < count:
        message = peer.receive()
        if message["type"] in TERMINAL:
            found.append((message["id"], message["code"]))
    with pytest.raises(AssertionError, match="no message came"):
        peer.receive(0.2)
    return sorted(found)


@pytest.mark.parametrize(("fault", "exit_code"), [("raise", 1), ("hang", 3)])
def test_a_broken_engine_ends_every_request_once_and_the_daemon_with_its_code(
    model: Path, tmp_path: Path, fault: str, exit_code: int
) -> None:
    config = process_config(tmp_path, model, scheduler={"step_timeout_s": 3.0})
    command = (sys.executable, faulty_daemon.__file__, fault)
    with daemon_process(tmp_path, config, command) as daemon, ExitStack() as stack:
        peers = [stack.enter_context(daemon.peer(tenant)) for tenant in TENANTS]
        assert daemon.is_healthy()
        for peer, number in product(peers, range(4)):
            sampling = {"max_tokens": 8_000, "ignore_eos": True}
            peer.send("generate", id=str(number), prompt="hello", sampling=sampling)
        wait_until(lambda: not daemon.is_healthy(), 20.0)
        assert daemon.wait() == exit_code, daemon.log
        for peer in peers:
            assert ends(peer, 4) == [(str(number), "engine_failed") for number in range(4)]
    assert ("the device is gone" in daemon.log) == (fault == "raise")
    assert ("watchdog: no step for" in daemon.log) == (fault == "hang")
    assert ("faulty_daemon.py" in daemon.log) is True
