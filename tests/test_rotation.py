"""What a decode step rotates: by the same angles as mlx-lm, once a step, and known to the attention."""

from copy import deepcopy

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxd.batching import rotation
from mlxd.batching.rotation import NotedRope, Rotary, note_rotations
from mlxd.caches.mlx_lm_import import rope_utils

LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64}
EMBEDDINGS = {
    "plain": nn.RoPE(32),
    "neighbours": nn.RoPE(32, traditional=True, base=500.0),
    "linear": nn.RoPE(32, scale=0.25),
    "part": nn.RoPE(16, traditional=True),
    "part, halves": nn.RoPE(16),
    "llama3": rope_utils.Llama3RoPE(32, scaling_config=LLAMA3),
    "yarn": rope_utils.YarnRoPE(32, scaling_factor=4.0, original_max_position_embeddings=64),
    "longrope": rope_utils.SuScaledRoPE(32, max_position_embeddings=512, original_max_position_embeddings=64),
    "proportional": rope_utils.ProportionalRoPE(32, 16),
}
POSITIONS = mx.array([0, 7, 300], mx.int32)


class Model(nn.Module):
    """Two layers whose embeddings are alike, and one that has another."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.other = rope, deepcopy(rope), nn.RoPE(32, base=77.0)


def noted(name: str) -> Model:
    model = Model(deepcopy(EMBEDDINGS[name]))
    note_rotations(model)
    return model


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_heads_are_rotated_as_the_model_does_it(
    name: str, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "on_cpu", lambda: on_cpu)
    model = noted(name)
    assert isinstance(model.first, NotedRope)
    mx.random.seed(0)
    heads = mx.random.normal((3, 5, 1, 32))
    with note_rotations(model).during(POSITIONS):
        found = model.first(heads, offset=POSITIONS)
    assert mx.allclose(found, EMBEDDINGS[name](heads, offset=POSITIONS), rtol=1e-6, atol=1e-6)


def test_angles_are_computed_once_for_all_that_rotate_alike() -> None:
    model = noted("plain")
    rotations = note_rotations(model)
    with rotations.during(POSITIONS):
        turns = [rotations.turns(rope, POSITIONS) for rope in (model.first, model.second, model.other)]
    assert turns[0] is not None
    assert turns[0] is turns[1]
    assert turns[2] is not None
    assert not mx.allclose(turns[0].table, turns[2].table)


def test_the_origin_of_what_was_rotated_is_known_until_the_step_is_built() -> None:
    model = noted("plain")
    rotations = note_rotations(model)
    heads = mx.ones((3, 2, 1, 32))
    with rotations.during(POSITIONS):
        rotated = model.first(heads, POSITIONS)
        found = rotations.origin(rotated)
        assert found is not None
        origin, turns = found
        assert origin is heads
        assert turns.rotary == Rotary(32, neighbours=False)
        assert rotations.origin(rotated * 1.0) is None
    assert rotations.origin(rotated) is None


@pytest.mark.parametrize(
    ("shape", "offset"),
    [
        ((3, 2, 1, 32), mx.array([0, 7, 300], mx.int32)),
        ((3, 2, 1, 32), 5),
        ((3, 2, 4, 32), POSITIONS),
        ((3, 1, 32), POSITIONS),
    ],
    ids=["other positions", "one offset", "several tokens", "no heads"],
)
def test_other_rotations_are_the_models_own(shape: tuple[int, ...], offset: mx.array | int) -> None:
    model = noted("plain")
    rotations = note_rotations(model)
    x = mx.random.normal(shape)
    with rotations.during(POSITIONS):
        rotated = model.first(x, offset=offset)
        assert rotations.origin(rotated) is None
    assert mx.array_equal(rotated, EMBEDDINGS["plain"](x, offset=offset))


def test_embeddings_that_do_something_else_are_left_alone() -> None:
    class Odd(nn.RoPE):
        pass

    dynamic = rope_utils.DynamicNTKScalingRoPE(32, 64, False, 1e4, 2.0)
    for rope in (Odd(32), dynamic):
        model = Model(rope)
        note_rotations(model)
        assert model.first is rope
        assert isinstance(model.other, NotedRope)


def test_an_embedding_is_asked_once_however_many_ask() -> None:
    model = noted("plain")
    first, rotations = model.first, note_rotations(model)
    assert note_rotations(model) is rotations
    assert model.first is first
    assert first.dims == 32
    with pytest.raises(AttributeError):
        _ = first.nothing
