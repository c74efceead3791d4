"""The daemon as a process of its own: started from a file, watched over HTTP, ended by signals."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry
from scraping import Scraped
from text_tokenizers import byte_level
from wire_daemon import Peer, config, token, wait_until

from mlxd.scheduler.client import Client
from mlxd.scheduler.config import CacheConfig, Config, DecodeConfig, ModelConfig, SchedulerConfig
from mlxd.scheduler.errors import ClientTimeoutError, ConnectionLostError

SERVE = (sys.executable, "-m", "mlxd.scheduler", "serve")
START_TIMEOUT_S = 120.0
QUICK_START = DecodeConfig(compile="off", attention="in_place", warmup_s=1)
_PROGRESS = re.compile(r"mlxd: [\w-]+ \d+%")
_SCRAPE_INTERVAL_S = 0.02


def write_tiny_model(folder: Path, **changes: object) -> None:
    """A random float32 llama of two layers whose tokens have no near ties, with a byte-level tokenizer.

    `changes`: of its config.
    """
    sizes = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": byte_level().get_vocab_size(),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **changes,
    }
    model = llama.Model(llama.ModelArgs.from_dict(sizes))
    key = mx.random.key(7)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        key, own = mx.random.split(key)
        gain = 2.0 / value.shape[-1] ** 0.5
        weights[name] = gain * mx.random.normal(value.shape, key=own) if value.ndim > 1 else value
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(sizes))
    byte_level().save(str(folder / "tokenizer.json"))


def process_config(
    folder: Path,
    model: Path | str,
    *,
    server: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    decode: DecodeConfig = QUICK_START,
    budget: str = "64MiB",
    max_model_len: int = 8192,
) -> Config:
    """Tenants acme, beta and admin; sockets in `folder`, a metrics port that nobody else has."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    return msgspec.structs.replace(
        config(folder, **({"metrics": metrics, "heartbeat_ms": 500} | dict(server or {}))),
        model=ModelConfig(path=str(model), max_model_len=max_model_len),
        scheduler=SchedulerConfig(**({"max_rows": 16, "prefill_chunk": 64} | dict(scheduler or {}))),
        cache=CacheConfig(budget=budget),
        decode=decode,
    )


class _Page:
    """A scrape's text as a collector, so that a registry reads it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def collect(self) -> Iterable[Metric]:
        return text_string_to_metric_families(self._text)


@dataclass
class DaemonProcess:
    """A daemon that was started. `log_path`: what it wrote on stdout and stderr."""

    config: Config
    process: "subprocess.Popen[bytes]"
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def client(self, tenant: str = "acme", **options: Any) -> Client:
        return Client(self.config.server.submit, token=token(tenant), **{"timeout_s": 10.0} | options)

    def peer(self, tenant: str = "acme") -> Peer:
        return Peer(self.config.server.submit).hello(tenant)

    def scrape(self) -> Scraped:
        with urllib.request.urlopen(f"http://{self.config.server.metrics}/metrics", timeout=5) as reply:
            text = reply.read().decode()
        registry = CollectorRegistry()
        registry.register(_Page(text))  # type: ignore[arg-type]
        return Scraped(registry)

    def is_healthy(self) -> bool:
        """What a supervisor's probe sees; a closed port is no health either."""
        try:
            with urllib.request.urlopen(f"http://{self.config.server.metrics}/healthz", timeout=5) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def wait_ready(self) -> Self:
        wait_until(self._takes_requests, START_TIMEOUT_S)
        return self

    def _takes_requests(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            with self.client(timeout_s=1.0) as client:
                return client.ping() == "running"
        except (ClientTimeoutError, ConnectionLostError):
            return False

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, timeout_s: float = 15.0) -> int:
        return self.process.wait(timeout_s)


@contextmanager
def daemon_process(
    folder: Path, config: Config, command: tuple[str, ...] = SERVE, name: str = "daemon"
) -> Iterator[DaemonProcess]:
    """`command CONFIG_FILE`, ready; killed on the way out if it still runs. `name`: of its files."""
    log_path = folder / f"{name}.log"
    with log_path.open("wb") as log:
        arguments = (*command, write_config(folder, config, name))
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
    daemon = DaemonProcess(config, process, log_path)
    try:
        yield daemon.wait_ready()
    finally:
        daemon.kill()


def write_config(folder: Path, config: object, name: str = "daemon") -> Path:
    """As a file; JSON is YAML."""
    path = folder / f"{name}.yaml"
    path.write_bytes(msgspec.json.encode(config))
    return path


def refusal(path: Path) -> tuple[int, list[str]]:
    """Exit code and lines, without those of progress, of a daemon that does not come up."""
    run = subprocess.run((*SERVE, path), capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert run.stdout == ""
    return run.returncode, [line for line in run.stderr.splitlines() if not _PROGRESS.fullmatch(line)]


class Watcher:
    """Scrapes a daemon over and over on a thread of its own, from `__enter__` to `__exit__`.

    Attributes:
        scrapes: time.monotonic() after the scrape, and what it showed.
    """

    def __init__(self, daemon: DaemonProcess) -> None:
        self.scrapes: list[tuple[float, Scraped]] = []
        self._daemon = daemon
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(_SCRAPE_INTERVAL_S):
            scraped = self._daemon.scrape()
            self.scrapes.append((time.monotonic(), scraped))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
