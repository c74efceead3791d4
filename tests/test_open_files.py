"""Connections are open files: the limit is raised where it can be, and told where it does not do."""

import asyncio
import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from wire_daemon import config

from mlxd.scheduler import open_files
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.login import Login
from mlxd.scheduler.open_files import allow_open_files, check_open_files
from mlxd.scheduler.server import Server
from mlxd.scheduler.transport import ZmqTransport

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "most", "limit"),
    [
        (1024, 4096, ENDLESS, 4096),
        (1024, 2**20, ENDLESS, 65_536),
        (100_000, 2**20, ENDLESS, 100_000),
        (256, ENDLESS, ENDLESS, 65_536),
        (256, ENDLESS, 10_240, 10_240),
        (256, ENDLESS, 1_000, 256),
        (4096, 4096, ENDLESS, 4096),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int, limit: int
) -> None:
    """`most`: what the system allows, whatever the hard limit says."""
    limits = [soft, hard]

    def setrlimit(_which: int, new: tuple[int, int]) -> None:
        if most != ENDLESS and new[0] > most:
            raise ValueError("current limit exceeds maximum limit")
        limits[:] = new

    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _which: tuple(limits))
    monkeypatch.setattr(open_files.resource, "setrlimit", setrlimit)
    assert allow_open_files() == limit
    assert limits == [limit, hard]


def test_clients_that_need_more_files_than_there_may_be_are_a_configuration_error() -> None:
    check_open_files(256, 256, 2048)
    with pytest.raises(ConfigError, match=r"5000, which takes 11024 open files; .* 4096, .* 1536"):
        check_open_files(5000, 256, 4096)


def test_a_daemon_with_too_many_clients_does_not_start(tmp_path: Path) -> None:
    server = Server(config(tmp_path, max_clients=2**20))
    with pytest.raises(ConfigError, match=r"server.max_clients is 1048576, .* open files"):
        asyncio.run(server.serve(handle_signals=False))
    assert not any(tmp_path.iterdir())


def test_mlx_lm_leaves_the_limit_as_it_is() -> None:
    """In a process of its own: whichever test came first imported it here."""
    script = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (512, 1024)); import mlxd.batching.model;"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (512, 1024), r.getrlimit(r.RLIMIT_NOFILE)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_client_without_a_file_left_for_a_socket_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: zmq.asyncio.Context, kind: int) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.asyncio.Context, "socket", fail)
    endpoint = f"ipc://{tmp_path}"
    with pytest.raises(ConfigError, match=f"no socket for {endpoint}: Too many open files"):
        asyncio.run(ZmqTransport.connect(endpoint, Login(token="t"), timeout_s=1.0))
