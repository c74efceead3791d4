"""The package that is built holds what the folders hold."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_installed_version_is_that_of_the_project() -> None:
    assert version("mlxd") == PROJECT["project"]["version"]


def test_every_package_is_declared_and_has_a_folder_and_a_typing_link() -> None:
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(FOLDERS)
    for package, folder in FOLDERS.items():
        assert package == f"mlxd.{folder}"
        assert (ROOT / folder / "__init__.py").is_file()
        assert (ROOT / folder / "py.typed").is_file()
        assert (ROOT / ".typing/mlxd" / folder).resolve() == ROOT / folder


@pytest.mark.parametrize("folder", FOLDERS.values())
def test_package_folders_are_flat(folder: str) -> None:
    nested = [path for path in (ROOT / folder).iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert not nested, "a subfolder is silently absent from the wheel"


def test_extras_of_the_makefile_exist() -> None:
    used = set(re.findall(r"echo (\w+)", MAKEFILE)) | {"dev"}
    assert used & {"cpu", "cuda"} == {"cpu", "cuda"}
    assert {"cpu", "cuda", "dev"} <= set(PROJECT["project"]["optional-dependencies"])


@pytest.mark.slow
def test_wheel_holds_every_source_file_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=200)
    (wheel,) = tmp_path.glob("mlxd-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    suffixes = {".py", ".c", ".cu", ".yaml", ".typed"}
    sources = {
        f"mlxd/{folder}/{path.name}"
        for folder in FOLDERS.values()
        for path in (ROOT / folder).iterdir()
        if path.suffix in suffixes
    }
    assert names == sources
