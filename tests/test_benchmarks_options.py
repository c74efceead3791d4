"""What benchmarks take, what they refuse before anything is measured, and how they end."""

import argparse
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import entry  # noqa: E402
import options  # noqa: E402
from figures import read_lines  # noqa: E402
from options import Parser  # noqa: E402

from mlxd.batching.errors import SettingError  # noqa: E402

SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text())
NO_LINES = {"lm_server.py"}
"""Scripts that record nothing."""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_reads_its_options_and_ends_as_all_do(path: Path) -> None:
    source = path.read_text()
    assert "entry.run(main)" in source
    assert "Parser(__doc__)" in source
    assert path.name in NO_LINES or f'(parser, "{path.stem}"' in source, "it has an --out of its own"


@pytest.mark.parametrize(
    ("take", "text", "expected"),
    [
        (options.number_from(0), "0", 0),
        (options.numbers, "1,8,32", [1, 8, 32]),
        (options.page_sizes, "16,256", [16, 256]),
        (options.amount, "0.5", 0.5),
        (options.amounts, "0.7,1.3", [0.7, 1.3]),
        (options.some_of("fair", "fcfs"), "fcfs", ["fcfs"]),
        (options.models, "tiny-4bit,smollm2", ["tiny-4bit", "smollm2"]),
        (options.served, "owner/model", "owner/model"),
        (options.model, "/", "/"),
    ],
)
def test_an_option_takes_what_its_example_shows(
    take: Callable[[str], object], text: str, expected: object
) -> None:
    assert take(text) == expected


@pytest.mark.parametrize(
    ("take", "text", "told"),
    [
        (options.number_from(2), "1", "'1' is not a number from 2 up, as 8"),
        (options.number_from(2), "-3", "'-3' is not a number from 2 up, as 8"),
        (options.numbers, "1;8", "'1;8' is not numbers from 1 up, as 1,8,32"),
        (options.numbers, "8,0", "'8,0' is not numbers from 1 up, as 1,8,32"),
        (options.page_sizes, "16,48", "'16,48' is not of 16, 32, 64, 128, 256, as 16,64"),
        (options.amount, "nan", "'nan' is not a number above 0, as 0.5"),
        (options.amounts, "1,0", "'1,0' is not numbers above 0, as 0.7,1.3"),
        (options.some_of("fair", "fcfs"), "fast", "'fast' is not of fair, fcfs, as fair,fcfs"),
        (
            options.served,
            "tiny",
            "'tiny' is no model folder, hub name or built-in model (smollm2-135m-instruct)",
        ),
        (options.input_file, "/none.csv", "'/none.csv': No such file or directory"),
        (options.tokenizer_folder, "/none", "'/none/tokenizer.json': No such file or directory"),
    ],
)
def test_an_option_that_cannot_be_is_told_with_an_example(
    take: Callable[[str], object], text: str, told: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        take(text)
    assert str(error.value) == told


def test_a_model_that_is_not_known_is_told_with_all_shapes() -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        options.models("tiny,9b")
    assert str(error.value) == (
        "'9b' is no model folder, hub name or built-in model (smollm2-135m-instruct), "
        "nor smollm2 or a random one (tiny, 1b, 8b, gemma3-tiny, gemma3-4b; with -4bit: packed)"
    )


def refusal(parser: Parser, arguments: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The line that it ends with."""
    monkeypatch.setattr(sys, "argv", ["some.py", *arguments.split()])
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    with pytest.raises(SystemExit) as ended:
        parser.options()
    assert ended.value.code == 2
    return told.getvalue()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--chunk 100", "--chunk is 100; it must be a multiple of --page-size, 64"),
        ("--page-size 48", "argument --page-size: invalid choice: 48 (choose from 16, 32, 64, 128, 256)"),
        ("--out {here}", "--out {here}: Is a directory"),
        ("--out {here}/none/x", "--out {here}/none/x: No such file or directory"),
        ("--plot {here}/none/x", "--plot {here}/none/x: {here}/none is no folder that can be written to"),
        ("--plot-from {lines}", "--plot-from draws lines: it needs --plot or --table"),
        ("--plot-from none", "argument --plot-from: 'none': No such file or directory"),
    ],
)
def test_what_cannot_be_is_told_in_a_line_before_anything_is_measured(
    arguments: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUT", raising=False)
    (lines := tmp_path / "lines.jsonl").touch()
    places = {"here": tmp_path, "lines": lines}
    parser = Parser("What it is.")
    options.add_prefill(parser, chunk=64, prefill_ms=100.0)
    parser.add_argument("--table", action="store_true")
    options.add_output(parser, "some", "table")
    found = refusal(parser, arguments.format(**places), monkeypatch)
    assert found.endswith(f"error: {told.format(**places)}\n")
    assert found.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    parser = Parser("What it is.")
    options.add_plot(parser)
    found = refusal(parser, f"--plot {tmp_path}/x", monkeypatch)
    assert found.endswith("error: needs matplotlib, which is not installed\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no line of kind 'steady': it is not of this benchmark"),
        ('{"kind": "load"}\n', "has no line of kind 'steady': it is not of this benchmark"),
        ('{"kind": "steady"}\nnope\n', ":2: no JSON object"),
        ("[1]\n", ":1: no JSON object"),
        ("\x00\xff", ":1: no JSON object"),
    ],
    ids=["empty", "of another benchmark", "not JSON", "no object", "no text"],
)
def test_a_file_that_is_not_of_the_benchmark_is_told(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(entry.BenchmarkError) as error:
        read_lines([path], "steady")
    assert str(error.value).removeprefix(str(path)).strip() == told


def _raise(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (entry.BenchmarkError("9b is too large"), "some.py: 9b is too large"),
        (SettingError(("decode", "attention"), "is 'kernel'"), "some.py: decode.attention is 'kernel'"),
        (FileNotFoundError(2, "No such file or directory", "x"), "some.py: x: No such file or directory"),
        (OSError(28, "No space left on device"), "some.py: input or output: No space left on device"),
        (BrokenPipeError(), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ends_a_benchmark_is_a_line_at_most(
    error: BaseException, code: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py"])
    with pytest.raises(SystemExit) as ended:
        entry.run(_raise(error))
    assert ended.value.code == code


def test_a_fault_of_our_own_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        entry.run(_raise(ZeroDivisionError()))


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["lm_server.py", "blas_threads.py"])
def test_help_starts_nothing(name: str) -> None:
    ended = _run(name, "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"usage: {name}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "decode.py --context 60 --lengths ragged --rows 2 --steps 10 --blocks 5",
            "error: --context is 60, with a row of 30 tokens half way through --blocks times --steps; "
            "it must be 32 at least",
        ),
        ("arrivals.py --output 0", "error: argument --output: '0' is not a number from 2 up, as 8"),
        (
            "attention.py --heads 9,2,64",
            "error: --heads takes query heads, a multiple of KV heads, those, and their width, as 9,3,64",
        ),
        ("serve.py --output 1", "error: argument --output: '1' is not a number from 2 up, as 8"),
    ],
    ids=lambda value: value.split()[0],
)
def test_a_command_that_would_measure_nothing_is_refused(arguments: str, told: str) -> None:
    name, *rest = arguments.split()
    ended = _run(name, *rest)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"{name}: {told}\n"
