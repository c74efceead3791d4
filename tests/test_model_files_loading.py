"""Loading tiny models through mlx-lm, and what is said of those that cannot be."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from text_tokenizers import SPECIAL, byte_level

from mlxd.batching.errors import ModelError
from mlxd.batching.model import load_model, resolve

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 400,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 5,
}
GPT2_OF_ODD_HEADS = {
    "model_type": "gpt2",
    "n_ctx": 128,
    "n_embd": 64,
    "n_head": 5,
    "n_layer": 1,
    "n_positions": 128,
    "layer_norm_epsilon": 1e-5,
}
"""Its code asserts that heads divide the width."""
on_cpu = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="other devices keep the weights as stored"
)


def silent(stage: str, share: float) -> None:
    assert 0 <= share <= 1


def write_model(
    folder: Path, quantization: dict[str, object] | None = None, dtype: mx.Dtype = mx.float32
) -> nn.Module:
    """A random llama with a tokenizer; returns the model as written."""
    mx.random.seed(7)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.set_dtype(dtype)
    if quantization is not None:
        nn.quantize(model, **quantization)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = CONFIG if quantization is None else CONFIG | {"quantization": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    byte_level().save(str(folder / "tokenizer.json"))
    return model


def test_loaded_model_knows_its_sizes_and_ends(tmp_path: Path) -> None:
    written = write_model(tmp_path)
    loaded = load_model(tmp_path, silent)
    assert (loaded.vocab_size, loaded.max_model_len, loaded.dtype) == (400, 128, mx.float32)
    assert loaded.eos_token_ids == {5, SPECIAL.index("<eos>")}
    assert loaded.weights_bytes == sum(array.nbytes for _, array in tree_flatten(written.parameters()))


@on_cpu
@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (None, mx.bfloat16),
        ({"group_size": 32, "bits": 4, "mode": "affine"}, mx.float16),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, mx.bfloat16),
    ],
)
def test_on_the_cpu_weights_are_unpacked_to_float32(
    tmp_path: Path, quantization: dict[str, object] | None, dtype: mx.Dtype
) -> None:
    written = write_model(tmp_path, quantization, dtype)
    loaded = load_model(tmp_path, silent)
    parameters = [array for _, array in tree_flatten(loaded.model.parameters())]
    assert {array.dtype for array in parameters} == {mx.float32}
    assert loaded.weights_bytes == sum(array.nbytes for array in parameters)
    tokens = mx.array([[1, 2, 3]])
    written.set_dtype(mx.float32)
    assert mx.allclose(loaded.model(tokens), written(tokens), atol=2e-2 if quantization else 1e-5)


def test_progress_of_loading_reaches_the_end(tmp_path: Path) -> None:
    write_model(tmp_path)
    shares: list[float] = []
    load_model(tmp_path, lambda stage, share: shares.append(share))
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...})
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "no_such_model"}, "Model type no_such_model not supported"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": 128}, "shape"),
        ({"num_hidden_layers": 1}, "not in model"),
        ({"num_hidden_layers": 3}, "Missing"),
        ({"num_attention_heads": 0}, "by zero"),
        ({"model_file": "evil.py"}, "evil.py"),
        (GPT2_OF_ODD_HEADS, "divisible by n_head"),
    ],
)
def test_configuration_that_does_not_fit_is_one_clear_line(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    write_model(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=named) as caught:
        load_model(tmp_path, silent)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_missing_tokenizer_is_told(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="holds no usable tokenizer"):
        load_model(tmp_path, silent)


def test_context_may_be_shortened_and_never_stretched(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert load_model(tmp_path, silent, max_model_len=100).max_model_len == 100
    with pytest.raises(ModelError, match=r"model\.max_model_len is 129; the context of .* is 128"):
        load_model(tmp_path, silent, max_model_len=129)


def test_model_without_a_context_length_needs_one_from_the_user(tmp_path: Path) -> None:
    write_model(tmp_path)
    change_config(tmp_path, max_position_embeddings=...)
    assert load_model(tmp_path, silent, max_model_len=50).max_model_len == 50
    with pytest.raises(ModelError, match=r"set model\.max_model_len"):
        load_model(tmp_path, silent)


def test_a_folder_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path), silent) == tmp_path


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "a/b/c", "../x", "a b/c"])
def test_what_is_no_model_is_told_with_what_there_is(name: str) -> None:
    with pytest.raises(ModelError, match="smollm2-135m-instruct"):
        resolve(name, silent)


def test_hub_that_cannot_be_reached_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="cannot fetch 'owner/model' from the hub"):
        resolve("owner/model", silent)
