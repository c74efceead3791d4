"""Frames that are almost messages, at both sockets of a daemon process, while a client is served.

    python tests/fuzz.py --frames 1000000

The daemon must neither die nor log a traceback, its memory must not grow, and each answer of the client must
equal the undisturbed one. Prints a line of JSON; the exit code is 1 where any of that is not so.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import fuzz_frames
from daemon_process import DaemonProcess, daemon_process, process_config, write_tiny_model
from memory_trace import MemoryTrace
from scraping import is_at_rest, unbalanced
from wire_daemon import wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.client import Client

QUESTIONS = {
    "Hello there. " * length: SamplingParams(max_tokens=20, seed=seed, temperature=seed % 2, ignore_eos=True)
    for seed, length in enumerate((1, 7, 30))
}
MAX_GROWTH_BYTES = 16 * 2**20
"""Over the later half of the frames. Of half a million, that is 33 bytes a frame: nothing is kept of one."""
REST_WITHIN_S = 15.0


@dataclass(frozen=True)
class Report:
    """`refused`: frames by error code. `growth_bytes`: over the later half. `faults`: what must not be."""

    frames: int
    seconds: float
    answers: int
    refused: dict[str, int]
    resident_mib: tuple[int, int]
    growth_bytes: int
    faults: tuple[str, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self) | {"frames_per_s": round(self.frames / self.seconds)})


def fuzz(folder: Path, num_frames: int, seed: int) -> Report:
    """Start a daemon of a tiny model and send it so many frames."""
    write_tiny_model(folder)
    limits = {"max_message_bytes": fuzz_frames.MAX_MESSAGE_BYTES}
    config = process_config(folder, folder, server=limits)
    with daemon_process(folder, config) as daemon, daemon.client("acme", timeout_s=60.0) as client:
        return _attack(daemon, client, num_frames, seed)


def _attack(daemon: DaemonProcess, client: Client, num_frames: int, seed: int) -> Report:
    undisturbed = _ask(client)
    memory = MemoryTrace(daemon.process.pid)
    answers: list[tuple[int, ...]] = []
    with _sender(daemon, num_frames, seed) as progress:
        begun = time.monotonic()
        for num_sent in progress:
            answers += _ask(client)
            memory.sample(num_sent)
        seconds = time.monotonic() - begun
    growth = round(memory.slope() * num_frames / 2)
    faults = list(_faults(daemon, client))
    wrong = sum(answer != undisturbed[index % len(undisturbed)] for index, answer in enumerate(answers))
    if wrong:
        faults.append(f"{wrong} of {len(answers)} answers differ from the undisturbed ones")
    if growth > MAX_GROWTH_BYTES:
        faults.append(f"memory grew by {growth} bytes; the limit is {MAX_GROWTH_BYTES}")
    return Report(
        frames=num_frames,
        seconds=round(seconds, 1),
        answers=len(answers),
        refused=dict(daemon.scrape().by("reason", "mlxd_zmq_bad_messages_total")),
        resident_mib=(memory.samples[0][1] // 2**20, memory.samples[-1][1] // 2**20),
        growth_bytes=growth,
        faults=tuple(faults),
    )


def _ask(client: Client) -> list[tuple[int, ...]]:
    return [client.generate(question, sampling).token_ids for question, sampling in QUESTIONS.items()]


@contextmanager
def _sender(daemon: DaemonProcess, num_frames: int, seed: int) -> Iterator[Iterator[int]]:
    """Yields how many frames are handled, each time that is asked, and last all of them."""
    at = daemon.config.server
    what = (at.submit, at.control, "beta", str(num_frames), str(seed))
    command = (sys.executable, fuzz_frames.__file__, *what)
    log = daemon.log_path.with_name("sender.log")
    with log.open("wb") as out, subprocess.Popen(command, stdout=out) as process:
        try:
            yield _progress(process, log, num_frames)
        finally:
            process.kill()


def _progress(process: "subprocess.Popen[bytes]", log: Path, num_frames: int) -> Iterator[int]:
    while process.poll() is None:
        lines = log.read_bytes().split(b"\n")
        yield int(lines[-2]) if len(lines) > 1 else 0
    assert process.returncode == 0, "the sender failed"
    yield num_frames


def _faults(daemon: DaemonProcess, client: Client) -> Iterator[str]:
    """What is wrong with the daemon now that nobody attacks it."""
    if daemon.process.poll() is not None:
        yield f"the daemon ended with code {daemon.process.returncode}"
    if "Traceback" in daemon.log:
        yield f"the log has a traceback: {daemon.log}"
    client.close()
    try:
        wait_until(lambda: is_at_rest(daemon.scrape()), REST_WITHIN_S)
    except AssertionError:
        yield f"rows, requests, clients or pages are left after {REST_WITHIN_S:.0f} s"
    if different := unbalanced(daemon.scrape()):
        yield f"accepted and accounted for differ: {different}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxd-fuzz-") as folder:
        report = fuzz(Path(folder), options.frames, options.seed)
    print(report.as_json())
    return bool(report.faults)


if __name__ == "__main__":
    sys.exit(main())
