"""What the daemon finds out at start about models that are not plain: served how, or refused why."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from loading import load
from mlx.utils import tree_flatten
from text_tokenizers import byte_level
from tiny_models import WIDE, make_rig
from tiny_zoo import zoo_config, zoo_model

from mlxd.batching.errors import ModelError, SettingError
from mlxd.batching.memory import plan_for
from mlxd.caches.kinds import inspect_layers


def write_model(folder: Path, name: str, bits: int | None = None) -> Path:
    """`bits`: of its weights, where they are quantised."""
    config = {"eos_token_id": 1, **zoo_config(name)}
    model = zoo_model(name)
    if bits is not None:
        config["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(model, group_size=32, bits=bits, class_predicate=lambda _, m: _can_be_quantised(m))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    byte_level().save(str(folder / "tokenizer.json"))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _can_be_quantised(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


@pytest.mark.parametrize(
    ("name", "signature", "attention"),
    [
        ("gemma2", "kv:paged:16*4", "grouped"),
        ("deepseek_v3", "kv:paged:16*4", "gathered"),
        ("deepseek_v32", "kv:paged:16+kv:paged:16*4", "gathered"),
        ("qwen3_next", "ssm,kv:paged:16,ssm,kv:paged:16", None),
        ("gemma3n", "kv:paged-rotating:8:16,kv:paged:16", None),
        ("mamba2", "ssm*4", None),
    ],
)
def test_models_of_every_way_to_keep_state_are_batched(
    tmp_path: Path, name: str, signature: str, attention: str | None
) -> None:
    info = load(write_model(tmp_path, name)).info
    assert info.max_batch == 4
    assert info.notes["signature"] == signature
    assert attention is None or info.notes["attention"] == attention


@pytest.mark.parametrize(("max_rows", "budget"), [(1, 2**22), (4, 6 * 2**20)])
def test_a_budget_without_room_for_the_self_test_is_refused(max_rows: int, budget: int) -> None:
    """Pages of 1 MiB: rows of 4, 1 and 1 of them, or the first alone."""
    rows = "195, 36, 4" if max_rows > 1 else "195"
    layers = inspect_layers(make_rig(WIDE).model)
    sizes = {"max_rows": max_rows, "max_model_len": 256, "chunk": 64, "checkpoints": 0.0}
    room = {"weights_bytes": 0, "free_bytes": 2**30, "page_size": 64}
    plan_for(layers, budget=budget, **sizes, **room)
    with pytest.raises(SettingError, match=f"no room for the self-test, whose rows have {rows} positions"):
        plan_for(layers, budget=budget - 2**20, **sizes, **room)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_are_served_batched(tmp_path: Path, bits: int) -> None:
    with_bits = load(write_model(tmp_path, "llama", bits))
    assert with_bits.info.max_batch == 4
    assert "batching" not in with_bits.info.notes


@pytest.mark.parametrize(("max_model_len", "level"), [(128, "INFO"), (2**16, "WARNING")])
def test_a_budget_in_which_no_row_has_its_full_length_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_model_len: int, level: str
) -> None:
    folder = write_model(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**16}))
    with caplog.at_level(logging.INFO, logger="mlxd"):
        load(folder, budget="1MiB", max_model_len=max_model_len)
    (told,) = (record for record in caplog.records if record.message.startswith("rows at once: "))
    assert told.levelname == level
    assert told.message.startswith("rows at once: 0 of ") is (level == "WARNING")


def test_a_model_that_is_right_only_alone_is_served_one_row_at_a_time_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        info = load(write_model(tmp_path, "gpt_bigcode")).info
    assert info.max_batch == 1
    assert info.notes["batching"].startswith("one row at a time: in_place: ValueError: ")
    assert "Only length-1 arrays can be converted to Python scalars" in info.notes["batching"]


def test_nothing_is_said_of_batching_where_only_one_row_is_wanted(tmp_path: Path) -> None:
    info = load(write_model(tmp_path, "llama"), max_rows=1).info
    assert info.max_batch == 1
    assert "batching" not in info.notes


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama4", "layer 0 needs ChunkedKVCache"),
        ("phi3small", "phi3small is not served: its sparse attention counts columns"),
        ("afm7", "the self-test failed, even for one row alone: in_place: .*; gathered: row 0 of 1 differs"),
    ],
)
def test_a_model_that_is_wrong_alone_is_refused_with_its_reason(
    tmp_path: Path, name: str, reason: str
) -> None:
    with ThreadPoolExecutor(1) as engine, pytest.raises(ModelError, match=reason):
        engine.submit(lambda: load(write_model(tmp_path, name))).result()  # it clears its thread's streams
