"""Gives MLX's Linux CPU build a fast BLAS; it is linked to the reference one, some fifty times slower.

The dynamic linker takes the first global definition of a symbol, so one loaded before `import mlx` wins.
Loaded is a shim of our own with the three functions MLX calls, bound to whichever OpenBLAS is there.

`MLXD_BLAS=off` leaves MLX as it is, `MLXD_BLAS=/path/to/lib.so` names the library to use, and
`OPENBLAS_NUM_THREADS` how many threads it may have (all cores but one, unless set).
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxd.batching.errors import MlxdError
from mlxd.batching.user_cache import publish, user_cache_folder
from mlxd.caches.files import open_file

_FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "cblas_sgemv")
_PREFIXES = ("", "scipy_")
_SHIM_SOURCE = Path(__file__).with_name("blas_shim.c")
_COMPILERS = ("cc", "gcc", "clang", "c++")
_COMPILE_TIMEOUT_S = 60
_DIGEST_BYTES = 32
_FIX = "pip install scipy-openblas32 (needs a C compiler), or apt-get install libopenblas0"


class BlasError(MlxdError):
    """`MLXD_BLAS` names something that cannot be used."""

    code = "config"


@dataclass(frozen=True, slots=True)
class BlasInfo:
    """Which library multiplies matrices.

    Attributes:
        name: "accelerate", "cuda", "reference", or what the library calls itself ("OpenBLAS 0.3.30").
        path: of the library that was loaded, None where none was.
        fast: False where MLX's reference BLAS stays in place.
        warning: what is slow and how to mend it; None where all is well or the user chose so.
    """

    name: str
    path: str | None
    fast: bool
    warning: str | None = None


class _UnusableError(Exception):
    """Why one library cannot be used; the next may be."""


@functools.cache
def ensure_blas() -> BlasInfo:
    """Load a fast BLAS where MLX needs one; to be called before `import mlx`. Later calls repeat the answer.

    Raises:
        BlasError: MLXD_BLAS is neither "off" nor a library with the CBLAS functions.
    """
    if sys.platform != "linux":
        return BlasInfo("accelerate", None, fast=True)
    if _has_cuda_build():
        return BlasInfo("cuda", None, fast=True)
    # Its threads spin for each other: one that lost its core to other work stalls a product for up to
    # a hundred times its length (benchmarks/blas_threads.py), so one core is left to them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
    setting = os.environ.get("MLXD_BLAS", "")
    if setting == "off":
        return BlasInfo("reference", None, fast=False)
    if "mlx.core" in sys.modules:
        return _slow("mlx was imported before a BLAS could be loaded; call ensure_blas() first")
    if setting:
        try:
            return _load(setting)
        except _UnusableError as error:
            raise BlasError(
                f"MLXD_BLAS is {setting!r}: {error}; it must be 'off' or a CBLAS library"
            ) from error
    return _load_installed()


def _load_installed() -> BlasInfo:
    reasons = []
    for library in _installed():
        try:
            return _load(library)
        except _UnusableError as error:
            reasons.append(f"{library}: {error}")
    return _slow("; ".join(reasons))


def _slow(reason: str) -> BlasInfo:
    return BlasInfo("reference", None, fast=False, warning=f"no fast BLAS ({reason}); fix: {_FIX}")


def _has_cuda_build() -> bool:
    names = (distribution.metadata["Name"] for distribution in importlib.metadata.distributions())
    return any(name is not None and name.lower().startswith("mlx-cuda") for name in names)


def _installed() -> Iterator[str]:
    """Candidates, best first: the wheel's build is recent and known, the system's needs no compiler."""
    # Not imported: that would load it in a way of its own.
    wheel = importlib.util.find_spec("scipy_openblas32")
    for folder in (wheel and wheel.submodule_search_locations) or ():
        yield from (str(path) for path in Path(folder, "lib").glob("libscipy_openblas*.so"))
    yield "libopenblas.so.0"


def _load(library: str) -> BlasInfo:
    """Put `library` in front of MLX's BLAS: through the shim, or as it is where no shim can be compiled."""
    try:
        if "/" in library:
            open_file(library, sys.maxsize).close()  # the loader would wait for a pipe
        handle = ctypes.CDLL(library)
    except OSError as error:
        raise _UnusableError(f"cannot be loaded ({error})") from error
    prefix = next((prefix for prefix in _PREFIXES if _find(handle, prefix + _FUNCTIONS[0])), "")
    functions = [_find(handle, prefix + name) for name in _FUNCTIONS]
    if None in functions:
        raise _UnusableError(f"lacks the functions {', '.join(_FUNCTIONS)}")
    try:
        shim = ctypes.CDLL(str(_shim()), mode=ctypes.RTLD_GLOBAL)
        shim.mlxd_bind(*functions, _num_threads(handle, f"{prefix}openblas_get_num_threads"))
    except (_UnusableError, OSError) as error:
        if prefix:
            raise _UnusableError(str(error)) from error
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    return BlasInfo(_name(handle, f"{prefix}openblas_get_config", library), library, fast=True)


def _find(library: ctypes.CDLL, name: str) -> ctypes.c_void_p | None:
    try:
        return ctypes.cast(library[name], ctypes.c_void_p)
    except AttributeError:
        return None


def _num_threads(library: ctypes.CDLL, count: str) -> int:
    """1 where the library does not say."""
    return 1 if _find(library, count) is None else int(library[count]())


def _name(library: ctypes.CDLL, describe: str, path: str) -> str:
    """ "OpenBLAS 0.3.30", the first two words of OpenBLAS's description; other libraries go by their file."""
    if _find(library, describe) is None:
        return Path(path).name
    function = library[describe]
    function.restype = ctypes.c_char_p
    return " ".join(function().decode().split()[:2])


def _shim() -> Path:
    """The compiled shim in the user's cache, compiled now where it is missing or damaged."""
    source = _SHIM_SOURCE.read_bytes()
    key = hashlib.sha256(source + platform.machine().encode()).hexdigest()[:16]
    shim = user_cache_folder() / "blas" / f"shim-{key}.so"
    try:
        if not _is_whole(shim):
            shim.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=shim.parent) as folder:
                compiled = Path(folder, shim.name)
                _compile(compiled)
                _seal(compiled)
                publish(compiled, shim)
    except OSError as error:
        raise _UnusableError(f"cannot write {shim}: {error}") from error
    return shim


def _seal(library: Path) -> None:
    """Append the digest of what it holds, which the linker does not mind; half a library may crash us."""
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())


def _is_whole(library: Path) -> bool:
    if not library.is_file():
        return False
    sealed = library.read_bytes()
    return hashlib.sha256(sealed[:-_DIGEST_BYTES]).digest() == sealed[-_DIGEST_BYTES:]


def _compile(target: Path) -> None:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise _UnusableError("a C compiler is needed once to use it (apt-get install gcc)")
    command = [compiler, "-x", "c", "-O2", "-shared", "-fPIC", "-o", str(target), str(_SHIM_SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise _UnusableError(f"{compiler} did not end in {_COMPILE_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise _UnusableError(f"{compiler} failed: {done.stderr.strip()[:200]}")
