"""The daemon's log: one line an event on stderr, key=value."""

import logging
import sys
from typing import TextIO

from mlxd.scheduler.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str) -> None:
    """Send mlxd's records of `level` and above to stderr. Raises ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"--log-level is {level!r}; it must be {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    handler = _StderrHandler()
    handler.setFormatter(
        logging.Formatter(
            "ts=%(asctime)s level=%(levelname)s module=%(module)s %(message)s", "%Y-%m-%dT%H:%M:%S%z"
        )
    )
    logger = logging.getLogger("mlxd")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is at the time, since progress bars put themselves in its place."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Only the base class's constructor sets it."""
