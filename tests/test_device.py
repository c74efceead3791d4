"""How much memory a device may use, by what MLX says of it; where it keeps what it compiles."""

import os
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd.batching import device
from mlxd.batching.errors import ModelError
from mlxd.batching.user_cache import user_cache_folder


@pytest.mark.parametrize(
    ("is_cuda", "info", "size"),
    [
        (True, {"free_memory": 5_000, "total_memory": 90_000}, 7_500),
        (False, {"memory_size": 64_000}, 64_000),
    ],
)
def test_a_gpu_may_use_what_is_free_on_cuda_and_all_on_metal(
    is_cuda: bool, info: dict[str, int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "device_name", lambda: "gpu")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: is_cuda)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2_000)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 500)
    assert device.device_memory_bytes() == size


def test_the_cpu_may_use_what_the_system_has_left() -> None:
    assert device.device_name() == "cpu"
    assert device.device_memory_bytes() > mx.get_active_memory()


PLANS, KERNELS = "MLX_CUDA_SDPA_CACHE_SIZE", "MLX_PTX_CACHE_DIR"


@pytest.mark.parametrize(
    ("is_cuda", "said", "is_blocked", "expected"),
    [
        pytest.param(True, {}, False, ("4096", f"ptx/{version('mlx')}"), id="kept for later starts"),
        pytest.param(True, {PLANS: "7", KERNELS: "mine"}, False, ("7", "mine"), id="as the user says"),
        pytest.param(True, {}, True, ("4096", None), id="no folder: MLX's own place"),
        pytest.param(False, {}, False, (None, None), id="no CUDA"),
    ],
)
def test_what_cuda_compiles_is_kept(
    is_cuda: bool,
    said: dict[str, str],
    is_blocked: bool,
    expected: tuple[str | None, str | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: is_cuda)
    monkeypatch.setenv("MLXD_CACHE", str(tmp_path))
    for name in (PLANS, KERNELS):
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    if is_blocked:
        (tmp_path / "ptx").touch()
    device.keep_compiled()
    plans, kernels = os.environ.get(PLANS), os.environ.get(KERNELS)
    assert (plans, kernels and kernels.removeprefix(f"{tmp_path}/")) == expected


def test_a_user_without_a_home_has_kernels_kept_in_mlxs_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Path, "home", no_home)
    for name in ("MLXD_CACHE", "XDG_CACHE_HOME", PLANS, KERNELS):
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    device.keep_compiled()
    assert os.environ[PLANS] == "4096"
    assert KERNELS not in os.environ
    with pytest.raises(ModelError, match="this user has no home folder; set HOME or MLXD_CACHE"):
        user_cache_folder()


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")
