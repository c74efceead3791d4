"""The configured disk tier, made for a loaded model."""

import logging
from collections.abc import Callable
from pathlib import Path

from mlxd.batching.runner import Runner
from mlxd.caches.budget import parse_size
from mlxd.caches.disk_store import DiskStore
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.persistence import PageCodec
from mlxd.scheduler.config import Config

logger = logging.getLogger(__name__)


def open_disk(config: Config, runner: Runner, clock: Callable[[], float]) -> tuple[DiskTier | None, bytes]:
    """The tier, and the secret that makes a tenant find its own prefixes again.

    None, and a warning, where the folder cannot be used; None where none is configured. Then the secret is
    empty.
    """
    disk = config.cache.disk
    if disk is None:
        return None, b""
    try:
        store = DiskStore(Path(disk.path).expanduser(), parse_size(disk.max_bytes))
    except OSError as error:
        logger.warning("the disk tier is off: %s", error)
        return None, b""
    codec = PageCodec(runner.page_formats, store.secret)
    step_s = config.scheduler.prefill_ms / 1000
    return DiskTier(store, codec, clock=clock, step_s=step_s), store.secret
