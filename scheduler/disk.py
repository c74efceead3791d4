"""The configured disk tier: looked at, or made for a loaded model."""

import logging
from collections.abc import Callable

from mlxd.batching.errors import SettingError
from mlxd.batching.runner import Runner
from mlxd.caches.disk_store import DiskStore, stored_in
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.persistence import PageCodec
from mlxd.scheduler.config import Config
from mlxd.scheduler.status import DiskStatus

logger = logging.getLogger(__name__)


def look_at_disk(config: Config) -> DiskStatus | None:
    """What is in the configured folder now; None where none is configured. Makes and changes nothing.

    Raises:
        SettingError: the folder cannot be read.
    """
    disk = config.cache.disk
    if disk is None:
        return None
    try:
        pages, used_bytes = stored_in(disk.folder)
    except OSError as error:
        raise SettingError(("cache", "disk", "path"), f"is {disk.path!r}: {error.strerror}") from error
    folder = str(disk.folder)
    return DiskStatus(folder=folder, pages=pages, used_bytes=used_bytes, max_bytes=disk.capacity_bytes)


def open_disk(config: Config, runner: Runner, clock: Callable[[], float]) -> tuple[DiskTier | None, bytes]:
    """The tier, and the secret that makes a tenant find its own prefixes again.

    None, and a warning, where the folder cannot be used; None where none is configured. Then the secret is
    empty.
    """
    disk = config.cache.disk
    if disk is None:
        return None, b""
    try:
        store = DiskStore(disk.folder, disk.capacity_bytes)
    except OSError as error:
        logger.warning("the disk tier is off: %s", error)
        return None, b""
    logger.info(
        "disk tier folder=%s pages=%d used_bytes=%d max_bytes=%d",
        disk.folder,
        len(store),
        store.used_bytes,
        store.max_bytes,
    )
    codec = PageCodec(runner.page_formats, store.secret)
    step_s = config.scheduler.prefill_ms / 1000
    return DiskTier(store, codec, clock=clock, step_s=step_s), store.secret
