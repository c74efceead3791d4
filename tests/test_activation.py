"""SwiGLU by our own exp on the CPU: the same numbers, and only in our own forwards."""

from types import ModuleType

import mlx.core as mx
import pytest

from mlxd.batching import activation
from mlxd.batching.activation import install_activations
from mlxd.batching.own_forward import own_forward
from mlxd.caches.mlx_lm_import import activations

GATES = [-1e9, -200.0, -88.0, -87.0, -9.5, -1.0, -1e-30, 0.0, 1e-30, 0.7, 8.0, 87.0, 88.0, 200.0, 1e9]


@pytest.fixture
def model_file(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A Python file that took mlx-lm's function, as the files of models do."""
    module = ModuleType("model_file")
    module.swiglu = activations.swiglu  # type: ignore[attr-defined]
    monkeypatch.setattr(activation, "on_cpu", lambda: True)
    install_activations([module])
    return module


def test_numbers_are_those_of_mlx_lm(model_file: ModuleType) -> None:
    mx.random.seed(0)
    gate = mx.concatenate([mx.array(GATES), 4 * mx.random.normal((500,))])
    x = mx.random.normal(gate.shape)
    expected = activations.swiglu(gate, x)
    with own_forward():
        found = model_file.swiglu(gate, x)
    assert mx.allclose(found, expected, rtol=3e-6, atol=1e-20)
    assert not mx.array_equal(found, expected)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_what_is_not_finite_does_not_become_a_number(model_file: ModuleType, number: str) -> None:
    with own_forward():
        assert not mx.isfinite(model_file.swiglu(mx.array([float(number)]), mx.array([1.0]))).item()


def test_a_row_is_computed_alike_whoever_is_beside_it(model_file: ModuleType) -> None:
    mx.random.seed(1)
    joined = mx.random.normal((5, 2 * 37))
    with own_forward():
        together = model_file.swiglu(*mx.split(joined, 2, axis=-1))
        for row in range(5):
            alone = model_file.swiglu(joined[row, :37], joined[row, 37:])
            assert mx.array_equal(together[row], alone)


def test_other_forwards_are_left_to_mlx_lm(model_file: ModuleType) -> None:
    gate, x = mx.random.normal((2, 64))
    assert mx.array_equal(model_file.swiglu(gate, x), activations.swiglu(gate, x))
    with own_forward():
        half = gate.astype(mx.float16), x.astype(mx.float16)
        assert mx.array_equal(model_file.swiglu(*half), activations.swiglu(*half))
        one = mx.array([2.0])
        assert mx.array_equal(model_file.swiglu(one, x), activations.swiglu(one, x))


def test_it_is_installed_once_and_where_mlx_lms_own_is_alone(model_file: ModuleType) -> None:
    installed = model_file.swiglu
    install_activations([model_file])
    assert model_file.swiglu is installed
    other = ModuleType("other")
    other.swiglu = max  # type: ignore[attr-defined]
    install_activations([other, ModuleType("none")])
    assert other.swiglu is max


def test_a_gpu_keeps_what_mlx_lm_has(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("model_file")
    module.swiglu = activations.swiglu  # type: ignore[attr-defined]
    monkeypatch.setattr(activation, "on_cpu", lambda: False)
    install_activations([module])
    assert module.swiglu is activations.swiglu
