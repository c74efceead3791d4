"""Packed planes: what they cost, who may have them, and attention over them by itself."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from tiny_models import PAGE, VOCAB, make_rig, prompt_of, tiny_model

from mlxd.batching.attention import Gathered
from mlxd.batching.attention_quantized import attend_packed_pages
from mlxd.batching.errors import SettingError
from mlxd.batching.memory import layers_of
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.sampling_params import SamplingParams
from mlxd.batching.selftest import fault_in, oracle_logprobs, prompts
from mlxd.batching.tuning import packed_chunk_s
from mlxd.caches.kinds import UnsupportedCacheError, group_specs, inspect_layers, packed_layers
from mlxd.caches.packed import attend, pack
from mlxd.caches.paged_view import PagedView
from mlxd.caches.quantization import Quantization
from mlxd.caches.quantized import QuantizedRows, QuantizedStandIn
from mlxd.caches.sizing import GroupSpec, plan_memory

FOUR_BITS = Quantization(bits=4, group_size=32)
EIGHT_BITS = Quantization(bits=8, group_size=64)
FORMATS = [FOUR_BITS, EIGHT_BITS]
PACKABLE = [f"{name}/64" for name in ("llama", "qwen3", "mistral", "gemma3_text", "gpt_oss")]


@pytest.mark.parametrize(("quantization", "share"), [(EIGHT_BITS, 9 / 32), (FOUR_BITS, 6 / 32)], ids=str)
def test_planned_bytes_are_those_of_the_pools(quantization: Quantization, share: float) -> None:
    """Of float32 numbers: bits / 32, and a scale and a bias a group."""
    dense, packed = make_rig("mistral/64"), make_rig("mistral/64", quantization=quantization)
    for before, after in zip(dense.memory.groups, packed.memory.groups, strict=True):
        assert after.spec.bytes_per_token == share * before.spec.bytes_per_token
    for layer in packed.runner._caches:
        held = sum(plane.nbytes for plane in layer.state())
        [group] = [g for g in packed.memory.groups if g.spec.window == layer.group.spec.window]
        assert layer.bytes_per_token() == group.spec.bytes_per_token
        assert held == group.capacity_bytes + group.spec.page_bytes, "scratch page on top"


def test_a_half_precision_model_fits_half_and_a_quarter() -> None:
    def bytes_per_token(quantization: Quantization | None) -> int:
        model = llama.Model(llama.ModelArgs.from_dict(LLAMA | {"head_dim": 64}))
        model.set_dtype(mx.bfloat16)
        return group_specs(layers_of(model, quantization), 16)[0].bytes_per_token

    dense = bytes_per_token(None)
    assert bytes_per_token(EIGHT_BITS) / dense == pytest.approx(0.5, rel=0.07)
    assert bytes_per_token(Quantization(bits=4, group_size=64)) / dense == pytest.approx(0.25, rel=0.13)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}


@pytest.mark.parametrize(("head_dim", "group_size"), [(8, 32), (32, 64), (96, 64)])
def test_heads_that_do_not_hold_whole_groups_are_refused(head_dim: int, group_size: int) -> None:
    model = llama.Model(llama.ModelArgs.from_dict(LLAMA | {"head_dim": head_dim}))
    with pytest.raises(
        SettingError,
        match=rf"cache.quantization does not go .*: layer 0 has heads {head_dim} wide, .*, {group_size}",
    ):
        layers_of(model, Quantization(bits=8, group_size=group_size))  # type: ignore[arg-type]


class OwnAttention(nn.Module):
    """A model whose attention calls MLX directly, so that nobody can hand it packed numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed = nn.Embedding(VOCAB, 64)
        self.layers = [nn.Linear(64, 64)]

    def __call__(self, tokens: mx.array, cache: list[object]) -> mx.array:
        x = self.embed(tokens)[:, None]
        mask = create_attention_mask(x[:, 0], cache[0], return_array=True)
        keys, values = cache[0].update_and_fetch(x, x)  # type: ignore[attr-defined]
        out = mx.fast.scaled_dot_product_attention(self.layers[0](x), keys, values, scale=0.125, mask=mask)
        return self.embed.as_linear(out[:, 0])


def test_the_self_test_finds_a_model_that_packed_numbers_do_not_reach() -> None:
    model = OwnAttention()
    rig = make_rig("llama/64")
    for quantization in (None, EIGHT_BITS):
        layers = inspect_layers(model)
        if quantization is not None:
            layers = packed_layers(layers, quantization)
        memory = plan_memory(
            group_specs(layers, PAGE),
            budget_bytes=2**20,
            weights_bytes=0,
            max_rows=4,
            max_model_len=64,
            chunk=16,
        )
        runner = MlxRunner(model, layers, memory, rig.runner.info)
        runner.step.enabled = False
        ragged = prompts(memory, VOCAB)
        expected = [oracle_logprobs(model, prompt, quantization) for prompt in ragged]
        fault = fault_in(runner, memory, expected, ragged, quantization=quantization)
        assert (fault is None) == (quantization is None), fault


@pytest.mark.parametrize("family", ["mistral/64", "gpt_oss/64"])
def test_a_chunk_is_timed_on_packed_layers(family: str) -> None:
    model = tiny_model(family)
    layers = packed_layers(inspect_layers(model), EIGHT_BITS)
    assert packed_chunk_s(model, layers, PAGE, 64) > 0


class Peeking(OwnAttention):
    """It looks into its cache."""

    def __call__(self, tokens: mx.array, cache: list[object]) -> mx.array:
        out = super().__call__(tokens, cache)
        return out + cache[0].keys.sum()  # type: ignore[attr-defined]


def test_a_model_that_cannot_run_on_packed_layers_is_told_of_the_setting() -> None:
    model = Peeking()
    layers = packed_layers(inspect_layers(model), EIGHT_BITS)
    with pytest.raises(SettingError, match=r"^cache.quantization does not go .* has no attribute 'keys'"):
        packed_chunk_s(model, layers, PAGE, 64)


@pytest.mark.parametrize("family", PACKABLE)
def test_the_self_test_passes_where_attention_goes_through_the_seam(family: str) -> None:
    rig = make_rig(family, quantization=FOUR_BITS)
    ragged = prompts(rig.memory, VOCAB)
    expected = [oracle_logprobs(rig.model, prompt, FOUR_BITS) for prompt in ragged]
    assert fault_in(rig.runner, rig.memory, expected, ragged, quantization=FOUR_BITS) is None


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_a_donor_attends_without_its_layer(quantization: Quantization) -> None:
    rig = make_rig("mistral/64", quantization=quantization)
    driver = rig.driver()
    for length in (13, 5):
        driver.join(prompt_of(length), SamplingParams(temperature=0.0))
    driver.prefill()
    driver.decode()
    queries = mx.random.normal((2, 4, 1, 64), key=mx.random.key(0))
    for layer in rig.runner._caches:
        assert isinstance(layer, QuantizedRows)
        rows, donor = layer.capture_donor_rows(), layer.capture_donor_attention()
        assert donor.offsets == rows.offsets == (13, 5)
        mx.eval(rows.keys, rows.values)
        layer.scrub(mx.arange(layer.keys.shape[0]))
        layer.dispose()
        found = donor.attend(queries, 0.125)
        for row, (start, end) in enumerate(zip(rows.starts, rows.ends, strict=True)):
            one = slice(row, row + 1)
            expected = mx.fast.scaled_dot_product_attention(
                queries[one], rows.keys[one, :, start:end], rows.values[one, :, start:end], scale=0.125
            )
            np.testing.assert_allclose(np.array(found[one]), np.array(expected), atol=1e-5)


def test_models_see_shape_and_dtype_but_no_number() -> None:
    """Some cast what attention gave to the dtype of the values, or look at the keys' length."""
    numbers = mx.random.normal((2, 3, 5, 64)).astype(mx.bfloat16)
    seen = pack(numbers, FOUR_BITS).unreadable()
    assert (seen.shape, seen.dtype) == (numbers.shape, numbers.dtype)
    assert mx.isnan(seen).all()


@pytest.mark.parametrize("shape", [(1, 6), (3, 6), (1, 1, 1, 6), (2, 1, 3, 6), (2, 4, 3, 6)], ids=str)
@pytest.mark.parametrize("additive", [False, True])
def test_masks_of_every_shape_bar_the_same_columns(shape: tuple[int, ...], additive: bool) -> None:
    keys, values, queries = (
        mx.random.normal((2, heads, length, 64), key=mx.random.key(heads + length))
        for heads, length in ((2, 6), (2, 6), (4, 3))
    )
    columns = np.random.default_rng(0).random(shape) < 0.7
    columns[..., 0] = True
    mask = mx.array(np.where(columns, 0.0, -1e9).astype(np.float32)) if additive else mx.array(columns)
    packed = pack(keys, EIGHT_BITS), pack(values, EIGHT_BITS)
    expected = mx.fast.scaled_dot_product_attention(
        queries, packed[0].dense(), packed[1].dense(), scale=0.125, mask=mask
    )
    found = attend(queries, *packed, 0.125, mask)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)


def test_no_step_makes_a_dense_copy_of_the_context() -> None:
    """A dense copy of what 4 rows of 32 pages hold would be 32 MiB; scores and sums are a fraction of it."""
    heads, size, width, rows = 8, 64, 32, 4
    dense_bytes = 2 * rows * width * size * heads * 64 * 4
    numbers = mx.random.normal((rows * width + 1, heads, size, 64))
    planes = [*pack(numbers, FOUR_BITS).planes, *pack(numbers, FOUR_BITS).planes]
    view = PagedView(
        GroupSpec("full", (0,), None, size, 0),
        mx.arange(1, rows * width + 1, dtype=mx.int32).reshape(rows, width),
        mx.zeros((rows,), mx.int32),
        mx.full((rows,), width * size - 1, mx.int32),
        Gathered(),
    )
    queries = mx.random.normal((rows, heads, 1, 64))
    del numbers
    mx.eval(planes, queries)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(attend_packed_pages(QuantizedStandIn(planes, view, FOUR_BITS), queries, 0.125, None))
    assert mx.get_peak_memory() - before < dense_bytes / 8


def test_a_model_without_keys_and_values_has_nothing_to_pack() -> None:
    with pytest.raises(UnsupportedCacheError, match="keeps no keys and values"):
        packed_layers([], EIGHT_BITS)
