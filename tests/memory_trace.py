"""What a process holds in memory while it works, and whether that grows."""

import statistics
import subprocess


class MemoryTrace:
    """Samples of one process: work done so far, resident bytes then."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.samples: list[tuple[float, int]] = []

    def sample(self, done: float) -> None:
        shown = subprocess.run(["ps", "-o", "rss=", "-p", str(self._pid)], capture_output=True, check=True)
        self.samples.append((done, 1024 * int(shown.stdout)))

    def slope(self) -> float:
        """Bytes a unit of work over the later half, when what is allocated once is there.

        The median of the slopes between any two samples, so that single peaks count for nothing (Theil-Sen).
        """
        last = self.samples[-1][0]
        later = [sample for sample in self.samples if sample[0] >= last / 2]
        slopes = [
            (held - held_before) / (done - done_before)
            for index, (done, held) in enumerate(later)
            for done_before, held_before in later[:index]
            if done > done_before
        ]
        return statistics.median(slopes)
