"""Which BLAS is put in front of MLX's own, and that its products are right.

A library once loaded stays loaded, so whatever loads one runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxd.batching import blas
from mlxd.batching.blas import BlasError, ensure_blas

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or blas._has_cuda_build(), reason="MLX brings its own BLAS here"
)

REPORT = "info = ensure_blas(); print(info.name, info.fast, info.warning, sep='|')"
PRODUCTS = """
import itertools
import mlx.core as mx, numpy as np
rng = np.random.default_rng(0)
small = itertools.product((1, 2, 3, 4, 7, 8, 9), (1, 5, 48, 64), (1, 6, 65, 112))
for m, k, n in (*small, (65, 48, 10), (130, 1344, 201), (3, 2000, 12)):
    for a_turned, b_turned in itertools.product((False, True), repeat=2):
        a = rng.standard_normal((2, k, m) if a_turned else (2, m, k), dtype=np.float32)
        b = rng.standard_normal((2, n, k) if b_turned else (2, k, n), dtype=np.float32)
        c = rng.standard_normal((m, n), dtype=np.float32)
        left, right = a.swapaxes(1, 2) if a_turned else a, b.swapaxes(1, 2) if b_turned else b
        ours_left = mx.array(a).swapaxes(1, 2) if a_turned else mx.array(a)
        ours_right = mx.array(b).swapaxes(1, 2) if b_turned else mx.array(b)
        assert np.allclose(ours_left @ ours_right, left @ right, atol=1e-4), (m, k, n, a_turned, b_turned)
        sum_ = mx.addmm(mx.array(c), ours_left[0], ours_right[0], alpha=0.5, beta=2.0)
        assert np.allclose(sum_, 2 * c + 0.5 * left[0] @ right[0], atol=1e-4), (m, k, n, a_turned, b_turned)
z = (rng.standard_normal((3, 4)) + 1j * rng.standard_normal((3, 4))).astype(np.complex64)
assert np.allclose(mx.array(z) @ mx.array(z.T), z @ z.T, atol=1e-4)
d = rng.standard_normal((3, 4))
with mx.stream(mx.cpu):
    assert np.allclose(mx.array(d, mx.float64) @ mx.array(d.T, mx.float64), d @ d.T)
assert mx.array_equal(mx.zeros((3, 0)) @ mx.zeros((5, 0)).T, mx.zeros((3, 5)))
wide = mx.array(rng.standard_normal((4, 32), dtype=np.float32))
part = wide[:2, 8:24]
assert np.allclose(part @ part.T, np.array(part) @ np.array(part).T, atol=1e-4)
"""
SPEED = """
import time
import mlx.core as mx
a = mx.random.normal((640, 640))
mx.eval(a)
def seconds():
    started = time.process_time()
    mx.eval(a @ a)
    return time.process_time() - started
print(min(seconds() for _ in range(4)))
"""
WHEEL = [library for library in blas._installed() if "scipy" in library]


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    program = f"from mlxd.batching.blas import ensure_blas\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, **environment: str) -> str:
    process = start(code, **environment)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.strip()


def decide() -> blas.BlasInfo:
    """What ensure_blas answers when nothing was asked before."""
    return ensure_blas.__wrapped__()


@pytest.fixture(autouse=True)
def before_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had imported mlx or chosen a BLAS."""
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv("MLXD_BLAS", raising=False)


def test_products_are_right_for_every_shape_and_order() -> None:
    assert "True" in run(REPORT + PRODUCTS)


ORDER = """
import mlx.core as mx
plain, transposed, deep = (mx.random.normal(shape) for shape in ((80, 96), (83, 96), (50, 1936)))
for right, num_rows in ((plain, 7), (transposed.T, 70), (deep.T, 70)):
    left = mx.random.normal((num_rows, right.shape[0]))
    together = left @ right
    assert all(mx.array_equal(left[i : i + 1] @ right, together[i : i + 1]) for i in range(num_rows))
"""


def test_a_row_is_summed_in_one_order_whether_it_is_alone_or_not() -> None:
    run("ensure_blas()" + ORDER)


def test_products_are_several_times_faster_than_without() -> None:
    slow, fast = (_seconds(setting) for setting in ("off", ""))
    assert fast < slow / 4


def test_shim_is_compiled_once_by_whoever_comes_first(tmp_path: Path) -> None:
    together = [start(REPORT, MLXD_CACHE=str(tmp_path)) for _ in range(2)]
    for process in together:
        output, errors = process.communicate(timeout=60)
        assert "|True|None" in output, errors
    assert "|True|None" in run(REPORT, MLXD_CACHE=str(tmp_path), PATH="")
    assert len(list((tmp_path / "blas").iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"\x7fELF nonsense", None], ids=["empty", "nonsense", "cut"])
def test_damaged_shim_is_compiled_anew(tmp_path: Path, content: bytes | None) -> None:
    assert "|True|None" in run(REPORT, MLXD_CACHE=str(tmp_path))
    (shim,) = (tmp_path / "blas").iterdir()
    whole = shim.read_bytes()
    shim.write_bytes(whole[:1000] if content is None else content)
    assert "|True|None" in run(REPORT, MLXD_CACHE=str(tmp_path))
    assert len(shim.read_bytes()) == len(whole)


def test_off_leaves_mlx_as_it_is_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXD_BLAS", "off")
    assert decide() == blas.BlasInfo("reference", None, fast=False, warning=None)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("/no/such/lib.so", "cannot be loaded"),
        ("/dev/zero", "cannot be loaded .*it is a pipe or a device, not a file"),
        (__file__, "cannot be loaded"),
        ("libm.so.6", "lacks the functions cblas_sgemm"),
    ],
)
def test_unusable_library_in_the_environment_is_an_error(
    monkeypatch: pytest.MonkeyPatch, setting: str, named: str
) -> None:
    monkeypatch.setenv("MLXD_BLAS", setting)
    with pytest.raises(BlasError, match=named) as caught:
        decide()
    assert setting in str(caught.value)


def test_too_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", blas)
    info = decide()
    assert not info.fast
    assert "imported before" in (info.warning or "")


def test_without_any_library_the_fix_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_installed", lambda: iter(["libnone.so.0"]))
    info = decide()
    assert not info.fast
    assert "libnone.so.0" in (info.warning or "")
    assert "pip install scipy-openblas32" in (info.warning or "")


def test_without_a_compiler_the_wheel_is_unusable_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(blas, "_installed", lambda: iter(WHEEL))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("MLXD_CACHE", str(tmp_path))
    info = decide()
    assert not info.fast
    assert "a C compiler is needed" in (info.warning or "")


def test_failing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(blas, "_installed", lambda: iter(WHEEL))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("MLXD_CACHE", str(tmp_path))
    assert "cc failed: no space left" in (decide().warning or "")


@pytest.mark.parametrize(
    ("platform", "cuda", "name"), [("darwin", False, "accelerate"), ("linux", True, "cuda")]
)
def test_builds_with_a_fast_blas_of_their_own_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, platform: str, cuda: bool, name: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(blas, "_has_cuda_build", lambda: cuda)
    assert decide() == blas.BlasInfo(name, None, fast=True, warning=None)


def test_answer_is_given_once() -> None:
    assert run("print(ensure_blas() is ensure_blas())") == "True"


def _seconds(setting: str) -> float:
    """Processor seconds of a product, on one thread so that waiting threads do not count."""
    return float(run("ensure_blas()" + SPEED, MLXD_BLAS=setting, OPENBLAS_NUM_THREADS="1"))
