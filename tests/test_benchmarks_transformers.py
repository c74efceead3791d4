"""What our benchmark takes from transformers' continuous batching, and how it tells what failed there."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import transformers_batching  # noqa: E402
from figures import read_lines, record  # noqa: E402
from traffic import wave  # noqa: E402
from transformers_side import TransformersError, in_one_line, serve_wave  # noqa: E402

COMMAND = [sys.executable, str(BENCHMARKS / "transformers_batching.py"), "--model", "tiny"]
SMALL = ["--requests", "2", "--prompt", "20", "--output", "4", "--attention", "in_place"]


@dataclass
class Output:
    request_id: str
    generated_tokens: list[int]
    timestamps: list[float] | None
    error: str | None = None


@dataclass
class Manager:
    """Answers all requests, the last one first, and then has ended.

    `num_tokens`, `num_times`: of an answer; None as asked for.
    """

    num_tokens: int | None = None
    num_times: int | None = None
    error: str | None = None
    num_answers: int | None = None
    _outputs: list[Output] = field(default_factory=list)

    def add_requests(
        self, inputs: list[list[int]], *, max_new_tokens: int, record_timestamps: bool
    ) -> list[str]:
        assert record_timestamps
        names = [f"r{number}" for number in range(len(inputs))]
        for name in names:
            tokens = [7] * (max_new_tokens if self.num_tokens is None else self.num_tokens)
            count = max_new_tokens if self.num_times is None else self.num_times
            times = [time.perf_counter() for _ in range(count)]
            self._outputs.append(Output(name, tokens, times, self.error))
        self._outputs = self._outputs[: self.num_answers]
        return names

    def get_result(self, *, timeout: float) -> Output | None:
        return self._outputs.pop() if self._outputs else None

    def is_running(self) -> bool:
        return bool(self._outputs)


def test_tokens_of_each_request_have_their_times_since_the_wave_was_sent() -> None:
    arrivals = wave(3, 5, 4, 100, seed=0)
    begun = time.perf_counter()
    served = serve_wave(Manager(), arrivals)
    passed = time.perf_counter() - begun
    assert [len(times) for times in served.tokens_at] == [4, 4, 4]
    times = [at for request in served.tokens_at for at in request]
    assert times == sorted(times), "answers came in another order"
    assert 0 <= times[0] <= times[-1] <= passed


@pytest.mark.parametrize(
    ("manager", "told"),
    [
        (Manager(error="CUDA out of memory.\nSee"), r"^request r1: CUDA out of memory\.$"),
        (Manager(error=" "), "^request r1: nothing is said of it$"),
        (Manager(num_tokens=3), "^request r0 has 3 tokens, 4 are due$"),
        (Manager(num_times=0), "^request r0 has 0 times of tokens, 4 are due$"),
        (Manager(num_answers=1), "^its thread ended with 1 of 2 requests answered$"),
    ],
    ids=["a request's fault", "a fault without words", "too few tokens", "no times", "a thread that is gone"],
)
def test_a_wave_that_is_not_answered_in_full_tells_why(manager: Manager, told: str) -> None:
    with pytest.raises(TransformersError, match=told):
        serve_wave(manager, wave(2, 5, 4, 100, seed=0))


def test_what_a_library_raises_is_one_line_with_its_place() -> None:
    place = rf"\({Path(__file__).name}:\d+\)"
    with pytest.raises(TransformersError, match=rf"^RuntimeError: no kernel image {place}$"), in_one_line():
        raise RuntimeError("no kernel image\nCompile with ...")


def _run(arguments: Sequence[str], paths: Sequence[Path] = ()) -> tuple[int, list[str], list[str]]:
    """Exit status, and lines of stdout and stderr. `paths` come before all others that are imported from."""
    found = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(found)}
    ended = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
    return ended.returncode, ended.stdout.splitlines(), ended.stderr.splitlines()


def test_our_side_runs_alone_and_on_the_cpu() -> None:
    status, printed, errors = _run(["--side", "mlxd", *SMALL])
    assert status == 0, errors
    lines = [json.loads(line) for line in printed]
    assert [line["kind"] for line in lines] == ["machine", "choices", "wave", "wave"]
    for line in lines[2:]:
        assert line["tokens_per_s"] > 0
        assert line["peak_memory_gb"] > 0


def test_a_torch_that_does_not_load_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise ImportError("libcudart.so is missing")\n')
    status, printed, errors = _run(["--side", "transformers", *SMALL], [tmp_path])
    assert (status, printed) == (1, [])
    assert errors == ["transformers: ImportError: libcudart.so is missing (torch.py:1)"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "num_blocks"], "argument --set: 'num_blocks' is not KEY=VALUE"),
        (["--output", "1"], "argument --output: '1' is not a number from 2 up, as 8"),
        (["--rounds", "none"], "argument --rounds: 'none' is not a number from 1 up, as 8"),
    ],
)
def test_an_option_that_cannot_be_is_told(arguments: list[str], told: str) -> None:
    status, _, errors = _run(arguments)
    assert (status, errors[-1]) == (2, f"transformers_batching.py: error: {told}")


def test_without_torch_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text('import sys\nsys.modules["torch"] = None\n')
    status, printed, errors = _run(SMALL, [tmp_path])
    assert (status, printed) == (1, [])
    assert errors == ["transformers_batching.py: needs torch, which is not installed"]


def _pretend(monkeypatch: pytest.MonkeyPatch, out: Path, statuses: dict[str, int]) -> None:
    """Sides have 300 and 100 tokens a second, and end with these statuses."""

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        side = command[command.index("--side") + 1]
        speed = {"mlxd": 300.0, "transformers": 100.0}[side]
        record({"side": side, "tokens_per_s": speed}, Path(command[-1]), quiet=True)
        return subprocess.CompletedProcess(command, statuses[side])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["transformers_batching.py", "--out", str(out)])


def test_sides_are_compared_by_their_tokens_a_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    _pretend(monkeypatch, out, {"mlxd": 0, "transformers": 0})
    transformers_batching.main()
    lines = read_lines([out])
    assert [line.get("side") for line in lines] == ["mlxd", "transformers", None]
    assert lines[-1] == {"kind": "ratio", "mlxd_over_transformers": 3.0}


def test_lines_of_a_side_that_fails_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    _pretend(monkeypatch, out, {"mlxd": 0, "transformers": 3})
    with pytest.raises(SystemExit, match=r"^the side of transformers ended with 3$"):
        transformers_batching.main()
    assert [line["side"] for line in read_lines([out])] == ["mlxd", "transformers"]
