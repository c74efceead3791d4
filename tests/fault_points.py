"""A daemon without a model in which one named point breaks: `python fault_points.py POINT ACTION CONFIG ARM`.

The point works as always until the file ARM exists. ACTION: raise, hang, kill, or starve: finds no memory
once and removes the file. With none of these, or with "quick" steps that take no time, nothing breaks.
"poison": each step of the request with POISON_SEED kills.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wire_daemon import runner, tokenizer

from mlxd.batching.errors import OutOfMemoryError
from mlxd.batching.fake_runner import FakePendingStep, FakeRunner
from mlxd.batching.plan import DecodeEntry
from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.scheduler.config import Config
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.frontend import Frontend
from mlxd.scheduler.inbox import Inbox
from mlxd.scheduler.journal_file import JournalFile
from mlxd.scheduler.logs import configure_logging
from mlxd.scheduler.open_requests import OpenRequests
from mlxd.scheduler.scheduler import Scheduler
from mlxd.scheduler.server import Server
from mlxd.scheduler.snapshot import SnapshotMaker

STEP_S = 0.01
POISON_SEED = 666
ENGINE_POINTS = {
    "take a command": (Inbox, "take", "before"),
    "queue a request": (Scheduler, "submit", "before"),
    "plan a step": (Scheduler, "schedule", "before"),
    "launch a step": (FakeRunner, "launch", "before"),
    "wait for a step": (FakePendingStep, "wait", "before"),
    "take a step's tokens": (Scheduler, "postprocess", "before"),
    "end a request": (OpenRequests, "finish", "before"),
    "tell a snapshot": (SnapshotMaker, "make", "before"),
    "tell events": (Frontend, "post", "before"),
}
JOURNAL_POINTS = {
    "begin a write": (JournalFile, "write", "before"),
    "within a write": (JournalFile, "_apply", "after"),
    "after a write": (JournalFile, "write", "after"),
}
POINTS: dict[str, tuple[type, str, str]] = ENGINE_POINTS | JOURNAL_POINTS


def act(action: str, arm: Path) -> None:
    if action == "starve":
        arm.unlink()
        raise OutOfMemoryError("[malloc] Unable to allocate 4096 bytes.")
    if action == "raise":
        raise RuntimeError("a fault as asked")
    if action == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGKILL)


def break_at(point: str, action: str, arm: Path) -> None:
    owner, name, when = POINTS[point]
    call: Callable[..., Any] = getattr(owner, name)

    def broken(*args: Any, **options: Any) -> Any:
        if when == "before" and arm.exists():
            act(action, arm)
        result = call(*args, **options)
        if when == "after" and arm.exists():
            act(action, arm)
        return result

    setattr(owner, name, broken)


def poison(entry: DecodeEntry) -> None:
    if entry.row.seed == POISON_SEED:
        os.kill(os.getpid(), signal.SIGKILL)


def main(point: str, action: str, path: str, arm: str) -> int:
    configure_logging("info")
    config = Config.load(path)
    recorder = PrometheusRecorder([tenant.name for tenant in config.tenants], version="test")
    step_s = 0.0 if action == "quick" else STEP_S
    fault = poison if action == "poison" else None
    made = runner(step_s, decode_fault=fault)
    engine = Engine(config, runner_factory=lambda config, progress: made, recorder=recorder)
    if point in POINTS:
        break_at(point, action, Path(arm))
    server = Server(config, engine=engine, recorder=recorder, tokenizer=tokenizer())
    exit_code = asyncio.run(server.serve())
    if server.left_engine_behind:
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
