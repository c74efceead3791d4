"""A whole daemon on real ipc sockets with a runner that needs no model, and raw peers to speak to it."""

import asyncio
import hashlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
from text_tokenizers import byte_level

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.batching.text import Tokenizer
from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.scheduler.client import Client
from mlxd.scheduler.config import Config, ServerConfig, TenantConfig
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.server import Server

TERMINAL = {"done", "error", "cancelled", "rejected"}
TENANTS = ("acme", "beta", "admin")


def token(tenant: str) -> str:
    return f"{tenant}-token"


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), special_tokens={"eos_token": "<eos>"})


def runner(step_s: float = 0.0, *, max_model_len: int = 4096, **options: Any) -> FakeRunner:
    """`step_s`: what a step takes."""
    return FakeRunner(
        fake_memory(max_model_len=max_model_len),
        vocab_size=tokenizer().vocab_size,
        decode_s=step_s,
        sleep=time.sleep if step_s else None,
        **options,
    )


def config(folder: Path, tenant: Mapping[str, Any] | None = None, **server: Any) -> Config:
    """`tenant`: settings of every tenant; `server`: of the server section."""
    tenants = tuple(
        TenantConfig(
            name=name,
            token_sha256=hashlib.sha256(token(name).encode()).hexdigest(),
            operator=name == "admin",
            **(tenant or {}),
        )
        for name in TENANTS
    )
    settings = {
        "submit": f"ipc://{folder}/s",
        "control": f"ipc://{folder}/c",
        "metrics": "127.0.0.1:0",
        "heartbeat_ms": 100,
        "drain_timeout_s": 5.0,
    }
    return Config(version=1, tenants=tenants, server=ServerConfig(**(settings | server)))


class Peer:
    """A raw DEALER socket; messages are plain maps."""

    def __init__(self, endpoint: str, *, rcvhwm: int = 1000, routing_id: bytes = b"") -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        if routing_id:
            self._socket.set(zmq.ROUTING_ID, routing_id)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, rcvhwm)
        self._socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def raw(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def send(self, type: str, **fields: Any) -> None:
        self.raw(msgspec.msgpack.encode({"type": type, **fields}))

    def receive(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The next message that is no keepalive."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.receive_any(deadline - time.monotonic())
            if message["type"] != "keepalive":
                return message

    def receive_any(self, timeout_s: float = 5.0) -> dict[str, Any]:
        assert self._socket.poll(max(0, int(timeout_s * 1000))), "no message came in time"
        frame = self._socket.recv()
        return msgspec.json.decode(frame) if frame[:1] == b"{" else msgspec.msgpack.decode(frame)

    def is_silent(self, for_s: float = 0.2) -> bool:
        return not self._socket.poll(int(for_s * 1000))

    def ask(self, type: str, **fields: Any) -> dict[str, Any]:
        self.send(type, **fields)
        return self.receive()

    def hello(self, tenant: str) -> Self:
        assert self.ask("hello", v=1, token=token(tenant))["type"] == "hello"
        return self

    def until_terminal(self, request_id: str, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """Messages of this request up to its terminal one; others' are dropped."""
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["type"] not in TERMINAL:
            message = self.receive(timeout_s)
            if message.get("id") == request_id:
                messages.append(message)
        return messages


class Daemon:
    """Serves on a thread of its own between `__enter__` and `__exit__`, which drains it."""

    def __init__(
        self, config: Config, runner: FakeRunner, text: Tokenizer | None = None, path: Path | None = None
    ) -> None:
        """`path`: the configuration's file, if it has one."""
        self.config = config
        self.runner = runner
        self.recorder = PrometheusRecorder(TENANTS, version="test")
        self.loading = threading.Event()
        self.loading.set()
        self.exit_code: int | None = None
        self.engine = Engine(config, runner_factory=self._load, recorder=self.recorder, seed=1)
        self.server = Server(
            config, path=path, engine=self.engine, recorder=self.recorder, tokenizer=text or tokenizer()
        )
        self._thread = threading.Thread(target=self._serve)

    def _load(self, config: Config, progress: object) -> FakeRunner:
        self.loading.wait()
        return self.runner

    def _serve(self) -> None:
        self.exit_code = asyncio.run(self.server.serve(handle_signals=False))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.request_drain()
        if exc[0] is not None:
            self.server.request_drain()
        self.join()

    def join(self, timeout_s: float = 10.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the daemon did not stop"

    def wait_ready(self) -> Self:
        with self.control("acme") as peer:
            wait_until(lambda: peer.ask("ping")["state"] == "running")
        return self

    def submit(self, tenant: str = "acme", **options: Any) -> Peer:
        return Peer(self.config.server.submit, **options).hello(tenant)

    def control(self, tenant: str = "acme") -> Peer:
        return Peer(self.config.server.control).hello(tenant)

    def client(self, tenant: str = "acme", **options: Any) -> Client:
        return Client(
            self.config.server.submit, token=token(tenant), **{"timeout_s": 5.0, "wait_s": 5.0} | options
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.recorder.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def daemon(folder: Path, **options: Any) -> Iterator[Daemon]:
    """A ready daemon. `runner`, `text` and `tenant` as above, the rest goes to the server section."""
    chosen = options.pop("runner", None) or runner()
    text = options.pop("text", None)
    with daemon_of(config(folder, **options), chosen, text) as running:
        yield running


@contextmanager
def daemon_of(config: Config, runner: FakeRunner, text: Tokenizer | None = None) -> Iterator[Daemon]:
    """A ready daemon with this configuration."""
    with Daemon(config, runner, text) as running:
        yield running.wait_ready()


def wait_until(condition: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
