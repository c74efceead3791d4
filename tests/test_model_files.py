"""A model folder is judged by its files before anything is loaded."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxd.batching.errors import ModelError
from mlxd.batching.model_files import declared_eos_token_ids, inspect

CONFIG = {"model_type": "llama", "vocab_size": 32, "max_position_embeddings": 128}


def write_safetensors(path: Path, num_floats: int = 4) -> None:
    header = {
        "w": {"dtype": "F32", "shape": [num_floats], "data_offsets": [0, 4 * num_floats]},
        "__metadata__": {},
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * num_floats))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors")
    return tmp_path


def set_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def cut(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def index(folder: Path, *files: str) -> None:
    content = {"weight_map": {f"w{i}": name for i, name in enumerate(files)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_whole_folder_passes(folder: Path) -> None:
    files = inspect(folder)
    assert (files.vocab_size, files.max_model_len) == (32, 128)
    assert files.weights == (folder / "model.safetensors",)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), r"config\.json is not JSON"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), r"config\.json is nested too deeply"),
        (lambda f: set_config(f, vocab_size=True), r"config\.json names no positive 'vocab_size'"),
        (lambda f: (f / "config.json").write_text("[]"), r"config\.json must hold a JSON object, not list"),
        (lambda f: set_config(f, model_type=None), r"config\.json names no 'model_type'"),
        (lambda f: set_config(f, vocab_size=0), r"config\.json names no positive 'vocab_size'"),
        (lambda f: (f / "model.safetensors").unlink(), r"holds no model\*\.safetensors"),
        (lambda f: cut(f, 0), r"model\.safetensors is not a safetensors file"),
        (
            lambda f: cut(f, 30),
            r"model\.safetensors is not a safetensors file, or cut off in its header \(30 bytes\)",
        ),
        (lambda f: cut(f, -1), r"model\.safetensors is damaged: it has \d+ bytes, its header says \d+"),
        (
            lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
            "is not a safetensors file",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"nope"),
            "its header cannot be read",
        ),
        (
            lambda f: index(f, "model.safetensors", "model-00002-of-00002.safetensors"),
            r"lacks weight files its index names: model-00002-of-00002\.safetensors",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"w": ["x"]}}'),
            r"lacks weight files its index names: \['x'\]",
        ),
        (
            lambda f: set_config(f, num_hidden_layers=2**31),
            r"config\.json names 2147483648 layers; its weight files have 1 tensors",
        ),
        (lambda f: (f / "tokenizer_config.json").write_text("?"), r"tokenizer_config\.json is not JSON"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, damage: Callable[[Path], object], named: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=named):
        inspect(folder)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        inspect(folder / "config.json")


def test_all_weight_files_are_checked(folder: Path) -> None:
    write_safetensors(folder / "model-00001-of-00002.safetensors")
    write_safetensors(folder / "model-00002-of-00002.safetensors")
    assert len(inspect(folder).weights) == 3
    with (folder / "model-00002-of-00002.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is damaged"):
        inspect(folder)


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "expected"),
    [
        ({"max_position_embeddings": 77}, {"model_max_length": 5}, 77),
        ({"n_positions": 77}, {}, 77),
        ({"text_config": {"max_position_embeddings": 77}}, {}, 77),
        ({}, {"model_max_length": 77}, 77),
        ({}, {"model_max_length": 10**30}, None),
        ({"max_position_embeddings": "long"}, {}, None),
        ({}, {}, None),
    ],
)
def test_context_length_is_found(
    folder: Path, config: dict[str, object], tokenizer_config: dict[str, object], expected: int | None
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "vocab_size": 1} | config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    assert inspect(folder).max_model_len == expected


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 3}, None, {3}),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {3, 4, 5}),
        ({"eos_token_id": None}, {"eos_token_id": [6]}, {6}),
        ({"eos_token_id": [True, 3]}, {"eos_token_id": False}, {3}),
        ({}, None, set()),
    ],
)
def test_end_of_text_ids_are_collected(
    tmp_path: Path, config: dict[str, object], generation: dict[str, object] | None, expected: set[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert declared_eos_token_ids(tmp_path) == expected
