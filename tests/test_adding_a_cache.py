"""docs/adding-a-cache.md is followed to the letter in a copy of the package; what it adds passes there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(
    r"^```(python|diff)\n# (\S+)\n(.*?)^```$",
    (ROOT / "docs" / "adding-a-cache.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
PACKAGES = ("metrics", "caches", "batching", "scheduler")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, to be changed; its test folder has the tests of layers alone."""
    package = tmp_path / "mlxd"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "tests").mkdir()
    for name in ("test_layering.py", "running_mean_model.py"):
        shutil.copy(ROOT / "tests" / name, package / "tests")
    return package


def follow(package: Path, *, with_entry: bool = True) -> None:
    """Write the page's files; those in no folder are the model's, beside the package."""
    for language, name, code in BLOCKS:
        path = (package if "/" in name else package.parent) / name
        if language == "python":
            with path.open("a") as file:
                file.write(code)
        elif with_entry:
            path.write_text(patched(path.read_text(), code))


def patched(text: str, diff: str) -> str:
    """Put in the lines that begin with +, before or after the line beside them."""
    for hunk in diff.split("...\n"):
        old = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line.startswith(" "))
        new = "".join(line[1:] for line in hunk.splitlines(keepends=True))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def run_tests(package: Path, *names: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (package.parent, ROOT / "tests")))
    options = ("-c", str(ROOT / "pyproject.toml"))
    tests = [str(package / "tests" / name) for name in names]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests],
        env=os.environ | {"PYTHONPATH": path},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_page_adds_a_kind_that_conforms_serves_its_model_and_keeps_the_layers(package: Path) -> None:
    follow(package)
    run = run_tests(package, "test_mean.py", "running_mean_model.py", "test_layering.py")
    assert run.returncode == 0, run.stdout + run.stderr


def test_without_the_entry_the_model_is_refused_by_name(package: Path) -> None:
    follow(package, with_entry=False)
    run = run_tests(package, "running_mean_model.py")
    assert run.returncode == 1
    assert "UnsupportedCacheError: layer 0 needs RunningMean" in run.stdout


def test_the_page_has_a_file_a_test_and_an_entry() -> None:
    names = [name for _, name, _ in BLOCKS]
    assert set(names) == {"running_mean.py", "caches/mean.py", "caches/kinds.py", "tests/test_mean.py"}
