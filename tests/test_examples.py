"""The examples run as they are."""

import os
import subprocess
import sys
from pathlib import Path

from daemon_process import process_config, write_config
from wire_daemon import daemon, token

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def lines_of(example: str, *arguments: str, **environment: str) -> list[str]:
    """What it prints. Raises CalledProcessError where it fails."""
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_the_in_process_example_runs_with_a_configuration(tmp_path: Path, model: Path) -> None:
    path = write_config(tmp_path, process_config(tmp_path, model))
    begun = [line.split("'")[0] for line in lines_of("in_process.py", str(path))]
    assert begun == ["The capital of France is", "The opposite of hot is"]


def test_the_asyncio_example_runs_against_a_daemon(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        access = {"MLXD_ENDPOINT": running.config.server.submit, "MLXD_TOKEN": token("acme")}
        lines = lines_of("async_stream.py", **access)
    assert sorted(line.split()[0] for line in lines) == ["The", "The", "Water"]
