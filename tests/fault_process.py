"""A daemon of `fault_points` as a process, and what is asked of it."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from wire_daemon import Peer, config, tokenizer, wait_until

from mlxd.batching.fake_runner import fake_completion
from mlxd.scheduler.config import Config, JournalConfig, SchedulerConfig

PROGRAM = Path(__file__).parent / "fault_points.py"
NUM_TOKENS = 120
TIMEOUT_S = 3.0
"""Longer than a busy machine makes a step take."""


def body(seed: int, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    return {"prompt": "hello", "sampling": {"max_tokens": num_tokens, "seed": seed}}


def expected(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    text = tokenizer()
    return fake_completion(text.encode("hello"), seed, num_tokens, text.vocab_size)


def tokens(messages: list[dict[str, Any]]) -> list[int]:
    return [token for message in messages for token in message.get("token_ids", ())]


def durable_config(folder: Path, *, step_timeout_s: float = 60.0, **journal: Any) -> Config:
    return msgspec.structs.replace(
        config(folder, heartbeat_ms=200),
        scheduler=SchedulerConfig(step_timeout_s=step_timeout_s),
        journal=JournalConfig(**({"durability": "accepted", "path": f"{folder}/journal"} | journal)),
    )


@dataclass
class FaultProcess:
    config: Config
    process: "subprocess.Popen[bytes]"
    log_path: Path
    arm_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def arm(self) -> None:
        """From now on its point breaks."""
        self.arm_path.touch()

    def peer(self) -> Peer:
        return Peer(self.config.server.submit).hello("acme")

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            is_alive = self.process.poll() is None
            is_told = "ready model=fake" in self.log
            assert is_told or is_alive, self.log
            return is_told

        wait_until(is_ready, 20.0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def fault_process(
    folder: Path, config: Config, point: str = "none", action: str = "none"
) -> Iterator[FaultProcess]:
    path, log_path, arm_path = folder / "daemon.json", folder / "daemon.log", folder / "armed"
    arm_path.unlink(missing_ok=True)
    path.write_bytes(msgspec.json.encode(config))
    with log_path.open("wb") as log:
        command = (sys.executable, PROGRAM, point, action, path, arm_path)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    daemon = FaultProcess(config, process, log_path, arm_path)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.kill()


class Collector:
    """Reads a peer on a thread of its own, until its daemon says nothing more."""

    def __init__(self, peer: Peer) -> None:
        self.messages: list[dict[str, Any]] = []
        self._peer = peer
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._is_over.is_set():
            try:
                self.messages.append(self._peer.receive(0.2))
            except AssertionError:
                continue

    def of(self, request_id: str) -> list[dict[str, Any]]:
        return [message for message in list(self.messages) if message.get("id") == request_id]

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
