"""Where the daemon may be reached: which addresses it takes."""

import pytest

from mlxd.scheduler.addresses import MAX_IPC_PATH_BYTES, check_socket_address, split_host_port


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///run/mlxd/s",
        "tcp://127.0.0.1:1",
        "tcp://127.1.2.3:65535",
        "tcp://localhost:7000",
        "tcp://[::1]:7000",
    ],
)
def test_unix_sockets_and_loopback_are_accepted(address: str) -> None:
    check_socket_address(address)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "it must be ipc:///PATH or tcp://"),
        ("/tmp/x", "it must be ipc:///PATH or tcp://"),
        ("http://127.0.0.1:1", "it must be ipc:///PATH or tcp://"),
        ("ipc://", "its path must be absolute"),
        ("ipc://x.sock", "its path must be absolute"),
        ("ipc://@abstract", "its path must be absolute"),
        ("ipc:///tmp/", "its path must be absolute and name a file"),
        ("ipc:///" + "x" * MAX_IPC_PATH_BYTES, f"its path has {MAX_IPC_PATH_BYTES + 1} bytes"),
        ("ipc:///" + "ä" * (MAX_IPC_PATH_BYTES // 2 + 1), "a socket's path has at most"),
        ("tcp://*:7000", "it must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "it must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "it must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:0", "its port must be from 1"),
        ("tcp://10.0.0.1:7000", "beyond loopback there are only"),
        ("tcp://example.com:7000", "beyond loopback there are only"),
        ("tcp://[::]:7000", "beyond loopback there are only"),
    ],
)
def test_other_addresses_are_refused(address: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^is '.*'; ") as caught:
        check_socket_address(address)
    assert reason in str(caught.value)


def test_the_longest_socket_path_is_accepted() -> None:
    check_socket_address("ipc:///" + "x" * (MAX_IPC_PATH_BYTES - 1))


@pytest.mark.parametrize(
    ("text", "parts"),
    [("0.0.0.0:0", ("0.0.0.0", 0)), ("host.name:9464", ("host.name", 9464)), ("[::1]:1", ("::1", 1))],
)
def test_a_metrics_address_is_host_and_port(text: str, parts: tuple[str, int]) -> None:
    assert split_host_port(text) == parts
