"""How a daemon starts, what stops it, and clients that are there before it."""

import asyncio
import json
import os
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from wire_daemon import Daemon, config, daemon, free_port, runner, token, tokenizer, wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.batching.text import Tokenizer
from mlxd.scheduler.client import Client
from mlxd.scheduler.config import Config
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    ConfigError,
    MlxdError,
    ModelError,
    RejectedError,
)
from mlxd.scheduler.server import Server

TOKENIZER = tokenizer()


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
def test_a_socket_that_is_not_there_is_told_at_once_or_when_the_wait_is_over(
    tmp_path: Path, wait_s: float
) -> None:
    endpoint, begun = f"ipc://{tmp_path}/nobody", time.monotonic()
    with (
        Client(endpoint, token="t", timeout_s=60, wait_s=wait_s) as client,
        pytest.raises(ClientTimeoutError, match=f"no daemon at {endpoint}: there is no such socket"),
    ):
        client.ping()
    assert wait_s <= time.monotonic() - begun < 5


def test_a_socket_that_this_user_may_not_use_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    endpoint = f"ipc://{tmp_path}/theirs"
    (tmp_path / "theirs").touch()
    with (
        Client(endpoint, token="t", timeout_s=60) as client,
        pytest.raises(ConfigError, match=f"'{endpoint}': Permission denied; the daemon is another user's"),
    ):
        client.ping()


def test_a_socket_that_cannot_be_looked_for_is_told_with_the_reason(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/{'x' * 300}"
    with (
        Client(endpoint, token="t", timeout_s=60, wait_s=60) as client,
        pytest.raises(ConfigError, match=f"endpoint '{endpoint}': File name too long"),
    ):
        client.ping()


def test_a_socket_where_nobody_answers_is_a_timeout_that_names_the_endpoint(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/nobody"
    (tmp_path / "nobody").touch()
    with (
        Client(endpoint, token="t", timeout_s=0.2) as client,
        pytest.raises(ClientTimeoutError, match=f"no answer from {endpoint} within 0.2 s"),
    ):
        client.ping()


def test_a_client_waits_for_a_daemon_that_comes_later_and_one_that_comes_back(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with Client(settings.server.submit, token=token("acme"), timeout_s=1) as client:
        with daemon(tmp_path):
            assert client.ping() == "running"
        with pytest.raises(MlxdError) as raised:
            wait_until(lambda: client.ping() == "")
        assert raised.value.code in ("connection_lost", "timeout")
        with daemon(tmp_path):
            assert client.generate("hi", SamplingParams(max_tokens=3)).usage.completion_tokens == 3


def test_while_the_model_loads_the_daemon_answers_and_admits_nobody(tmp_path: Path) -> None:
    starting = Daemon(config(tmp_path), runner())
    starting.loading.clear()
    with starting as served, served.client() as client:
        assert client.ping() == "starting"
        assert client.status().state == "starting"
        with served.client(wait_s=0.0) as hasty, pytest.raises(RejectedError) as raised:
            hasty.generate("hi")
        assert (raised.value.reason, raised.value.retryable) == ("loading", True)
        served.loading.set()
        served.wait_ready()
        assert client.generate("hi", SamplingParams(max_tokens=3)).usage.completion_tokens == 3
    assert served.exit_code == 0


def test_a_client_that_may_wait_is_served_by_a_daemon_that_loads(tmp_path: Path) -> None:
    starting = Daemon(config(tmp_path), runner())
    starting.loading.clear()
    done_loading = threading.Timer(0.3, starting.loading.set)
    with starting as served, served.client(wait_s=10.0) as client:
        assert client.ping() == "starting"
        done_loading.start()
        assert client.generate("hi", SamplingParams(max_tokens=3)).usage.completion_tokens == 3
    done_loading.join()


def test_a_client_that_may_wait_is_served_over_tcp_by_a_daemon_that_comes_later(tmp_path: Path) -> None:
    addresses = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("submit", "control")}
    sampling = SamplingParams(max_tokens=3)
    with (
        Client(addresses["submit"], token=token("acme"), timeout_s=0.5, wait_s=10.0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(client.generate, "hi", sampling)
        time.sleep(1.0)
        assert not answer.done(), "it waits longer than its timeout"
        with daemon(tmp_path, **addresses):
            assert answer.result(10.0).usage.completion_tokens == 3


def test_the_daemon_is_starting_until_its_tokenizer_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = threading.Event()

    def load(config: Config) -> Tokenizer:
        assert loading.wait(5.0)
        return TOKENIZER

    monkeypatch.setattr("mlxd.scheduler.server.load_model_tokenizer", load)
    address = f"127.0.0.1:{free_port()}"
    starting = Daemon(config(tmp_path, metrics=address), runner())
    starting.server._tokenizer = None
    with starting as served, served.client() as client:
        wait_until(lambda: served.engine.snapshot.state == "running")
        assert (client.ping(), client.status().state) == ("starting", "starting")
        assert health(address) == (503, "starting", "the model is loading")
        with served.client(wait_s=0.0) as hasty, pytest.raises(RejectedError, match="loading"):
            hasty.generate("hi")
        loading.set()
        served.wait_ready()
        assert client.status().state == "running"
        assert health(address) == (200, "running", "")


def health(address: str) -> tuple[int, str, str]:
    """Status, state and reason."""
    try:
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=5.0) as answer:
            status, body = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
    said = json.loads(body)
    return status, said["state"], said["reason"]


def serve(settings: Any, **options: Any) -> int:
    return asyncio.run(Server(settings, tokenizer=TOKENIZER, **options).serve(handle_signals=False))


def test_a_model_that_cannot_be_served_is_the_error_of_serve(tmp_path: Path) -> None:
    class Broken(Daemon):
        def _load(self, config: object, progress: object) -> Any:
            raise ModelError("config.json is missing")

    broken = Broken(config(tmp_path), runner())
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        asyncio.run(broken.server.serve(handle_signals=False))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"submit": "tcp://0.0.0.0:5555"}, "beyond loopback there are only"),
        ({"control": "tcp://192.168.1.1:5555"}, "beyond loopback there are only"),
        ({"metrics": "127.0.0.1:99999"}, "metrics"),
        ({"control": "ipc:///nowhere/at/all"}, "/nowhere/at does not exist"),
    ],
)
def test_addresses_that_cannot_be_used_stop_the_start(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        serve(config(tmp_path, **settings))
    assert not list(tmp_path.iterdir()), "something was left behind"


def test_a_second_daemon_at_the_same_place_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path) as served:
        with pytest.raises(ConfigError, match="another daemon is listening there"):
            serve(config(tmp_path))
        with served.client() as client:
            assert client.ping() == "running"
