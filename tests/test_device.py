"""How much memory a device may use, by what MLX says of it."""

import mlx.core as mx
import pytest

from mlxd.batching import device


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
