"""What peers sent that they should not have: counted for the metrics, told in the log now and then."""

import asyncio
import logging
from collections import Counter

from mlxd.metrics.recorder import Recorder

LOG_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


class BadFrames:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._untold: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        self._recorder.bad_message(reason)
        self._untold[reason] += 1

    async def log_forever(self) -> None:
        """However many there are, one line an interval."""
        while True:
            await asyncio.sleep(LOG_INTERVAL_S)
            if self._untold:
                counts = " ".join(f"{reason}={count}" for reason, count in sorted(self._untold.items()))
                logger.warning("bad frames within %.0f s: %s", LOG_INTERVAL_S, counts)
                self._untold.clear()
