"""A daemon whose sockets speak CURVE on loopback TCP, and raw peers that hold keys."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq
from wire_daemon import TENANTS, Daemon, Peer, runner
from wire_daemon import config as token_config

from mlxd.scheduler.client import Client
from mlxd.scheduler.config import Config, CurveConfig
from mlxd.scheduler.keys import KeyPair, write_keys

SERVER = KeyPair.make()
KEYS = {name: KeyPair.make() for name in TENANTS}


class KeyPeer(Peer):
    """A DEALER with keys of its own choice; `keys` None speaks in the clear."""

    def __init__(
        self,
        endpoint: str,
        keys: KeyPair | None,
        server_key: str = SERVER.public,
        *,
        routing_id: bytes = b"",
    ) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        if routing_id:
            self._socket.set(zmq.ROUTING_ID, routing_id)
        self._socket.set(zmq.LINGER, 0)
        if keys is not None:
            self._socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode())
            self._socket.set(zmq.CURVE_PUBLICKEY, keys.public.encode())
            self._socket.set(zmq.CURVE_SERVERKEY, server_key.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ALL)
        self._socket.connect(endpoint)

    def events(self, until: int, timeout_s: float = 5.0) -> list[tuple[str, int]]:
        """What libzmq tells of this connection, names and values, up to the first event of these kinds."""
        seen: list[tuple[str, int]] = []
        while self._monitor.poll(int(timeout_s * 1000)):
            event, _ = self._monitor.recv_multipart()
            kind = zmq.Event(int.from_bytes(event[:2], "little"))
            seen.append((kind.name, int.from_bytes(event[2:6], "little")))
            if kind & until:
                return seen
        raise AssertionError(f"nothing of the kind came in time: {seen}")

    def __exit__(self, *exc: object) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        super().__exit__(*exc)


class CurveDaemon(Daemon):
    """Its ordinary sockets are there, too."""

    @property
    def curve(self) -> CurveConfig:
        assert self.config.server.curve is not None
        return self.config.server.curve

    def submit(self, tenant: str = "acme", **options: Any) -> Peer:
        return _greeted(KeyPeer(self.curve.submit, KEYS[tenant], **options), tenant)

    def control(self, tenant: str = "acme") -> Peer:
        return _greeted(KeyPeer(self.curve.control, KEYS[tenant]), tenant)

    def client(self, tenant: str = "acme", **options: Any) -> Client:
        keys = {"key": KEYS[tenant].secret, "server_key": SERVER.public}
        return Client(self.curve.submit, **{"timeout_s": 5.0} | keys | options)


def _greeted(peer: KeyPeer, tenant: str) -> KeyPeer:
    assert peer.ask("hello", v=1)["tenant"] == tenant
    return peer


def curve_config(folder: Path, tenant: Mapping[str, Any] | None = None, **server: Any) -> Config:
    secret, _ = write_keys(folder, "server", SERVER)
    with ExitStack() as held:
        ports = [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in "sc"]
    curve = CurveConfig(
        secret_key_file=str(secret),
        submit=f"tcp://127.0.0.1:{ports[0]}",
        control=f"tcp://127.0.0.1:{ports[1]}",
    )
    made = token_config(folder, tenant, curve=curve, **server)
    tenants = tuple(msgspec.structs.replace(t, public_key=KEYS[t.name].public) for t in made.tenants)
    return msgspec.structs.replace(made, tenants=tenants)


@contextmanager
def curve_daemon(folder: Path, **options: Any) -> Iterator[CurveDaemon]:
    chosen = options.pop("runner", None) or runner()
    with CurveDaemon(curve_config(folder, **options), chosen) as running:
        running.wait_ready()
        yield running


class Relay:
    """Between a peer and a daemon: passes on what they send. `sent`: what the peer did."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._ends = {client: server, server: client}
        self.client, self.server = client, server
        self.sent: list[bytes] = []
        for end in self._ends:
            end.settimeout(0.02)

    def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> Iterator[bytes]:
        """Pass on until `condition`; yields what the client sent, and what the server did."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            for source, target in self._ends.items():
                with suppress(TimeoutError):
                    data = source.recv(2**16)
                    target.sendall(data)
                    if source is self.client:
                        self.sent.append(data)
                    yield data

    def from_client(self) -> bytes:
        """What the peer sends next, which is not passed on."""
        self.client.settimeout(5.0)
        return self.client.recv(2**16)


@contextmanager
def relayed(endpoint: str, tenant: str = "acme") -> Iterator[tuple[KeyPeer, Relay]]:
    host, port = endpoint.removeprefix("tcp://").split(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = KeyPeer(f"tcp://127.0.0.1:{listener.getsockname()[1]}", KEYS[tenant])
        with peer, listener.accept()[0] as client, socket.create_connection((host, int(port))) as server:
            yield peer, Relay(client, server)
