"""What the verbs do that load a model or its files on this machine.

MLX is imported inside the functions: on Linux a fast BLAS takes effect only if it is loaded first.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxd.batching.blas import BlasInfo, ensure_blas
from mlxd.batching.errors import SettingError
from mlxd.batching.runner import Progress
from mlxd.caches.sizing import MemoryPlan
from mlxd.scheduler.config import Config
from mlxd.scheduler.disk import look_at_disk
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.fit import check_fit
from mlxd.scheduler.journal_file import check_place
from mlxd.scheduler.keys import server_keys
from mlxd.scheduler.logs import configure_logging
from mlxd.scheduler.plan_tables import plan_tables
from mlxd.scheduler.progress import ProgressBars
from mlxd.scheduler.tables import show

logger = logging.getLogger(__name__)


def serve(path: Path, log_level: str) -> int:
    """Run the daemon to its end. Returns its exit code: 0 drained, 1 the engine failed."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a reload asked before the daemon takes it must not end it
    configure_logging(log_level)
    config = Config.load(path)
    blas = ensure_blas()
    if blas.warning:
        logger.warning("slow BLAS name=%s: %s", blas.name, blas.warning)
    from mlxd.scheduler.server import Server

    with _located_in(path), ProgressBars() as bars:
        server = Server(config, path=path, on_progress=bars)
        exit_code = asyncio.run(server.serve())
    if server.left_engine_behind:
        os._exit(exit_code)  # what Python does at its end could abort in the thread that is left
    return exit_code


def check(path: Path) -> None:
    """Validate the configuration and print what it would hold; fetches the model if it is not there yet."""
    config = Config.load(path)
    blas = ensure_blas()
    with _located_in(path), ProgressBars() as bars:
        if config.server.curve is not None:
            server_keys(config.server.curve)
        if config.journal.durability == "accepted" and config.journal.path is not None:
            check_place(config.journal.path)
        plan = _memory_plan(config, bars)
        check_fit(config, plan)
        disk = look_at_disk(config)
    print(f"{path}: ok")
    show(plan_tables(config, config.model.path, _describe(blas), plan, disk))


def pull(model: str) -> None:
    """Fetch a model where it is not there yet, and print its folder. Raises ConfigError for a wrong name."""
    ensure_blas()
    from mlxd.batching.model import resolve

    try:
        with ProgressBars() as bars:
            folder = resolve(model, bars)
    except SettingError as error:
        raise ConfigError(f"MODEL {error.sentence}") from error
    print(folder)


@contextmanager
def _located_in(path: Path) -> Iterator[None]:
    """A setting that the model shows to be wrong is told with its line in the file. Raises ConfigError."""
    try:
        yield
    except SettingError as error:
        raise Config.locate(path, error.keys, error.sentence) from error


def _memory_plan(config: Config, progress: Progress) -> MemoryPlan:
    from mlxd.batching.preview import preview_plan

    return preview_plan(
        model_path=config.model.path,
        max_model_len=config.model.max_model_len,
        max_rows=config.scheduler.max_rows,
        prefill_chunk=config.scheduler.prefill_chunk,
        budget=config.cache.budget,
        page_size=config.cache.page_size,
        checkpoints=config.cache.checkpoint_share,
        quantization=config.cache.quantization,
        attention=config.decode.attention,
        progress=progress,
    )


def _describe(blas: BlasInfo) -> str:
    place = f" ({blas.path})" if blas.path else ""
    return f"{blas.name}{place}" + (f": {blas.warning}" if blas.warning else "")
