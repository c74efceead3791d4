"""What a model folder's files alone tell, so that a bad one is named before any array exists."""

import json
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from mlxd.batching.errors import ModelError
from mlxd.caches.files import open_file, read_file

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)
_LAYER_KEYS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_LONGEST_REAL_CONTEXT = 10**9  # tokenizers without a limit declare 10**30
_HEADER_LENGTH_BYTES = 8
MAX_TEXT_BYTES = 256 * 2**20
"""Of a JSON file, a header or a chat template; the largest tokenizers have some tens of MiB."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A folder whose files are whole and agree with each other.

    Attributes:
        max_model_len: positions the model was made for; None where no file says.
        eos_token_ids: those that config.json and generation_config.json declare.
    """

    folder: Path
    config: dict[str, object]
    weights: tuple[Path, ...]
    vocab_size: int
    max_model_len: int | None
    eos_token_ids: frozenset[int]


def inspect(folder: Path) -> ModelFiles:
    """Check the files that mlx-lm will read.

    Raises:
        ModelError: a file is missing, cut off or not what it should be; the message names it.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    config = read_json_object(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} names no 'model_type'")
    vocab_size = _positive(config, ("vocab_size",))
    if vocab_size is None:
        raise ModelError(f"{folder / 'config.json'} names no positive 'vocab_size'")
    weights = _weight_files(folder)
    num_tensors = sum(map(_check_safetensors, weights))
    num_layers = _positive(config, _LAYER_KEYS)
    if num_layers is not None and num_layers > num_tensors:  # they would be built before they are compared
        text = f"names {num_layers} layers; its weight files have {num_tensors} tensors, at least one a layer"
        raise ModelError(f"{folder / 'config.json'} {text}")
    return ModelFiles(
        folder=folder,
        config=config,
        weights=weights,
        vocab_size=vocab_size,
        max_model_len=_context_length(folder, config),
        eos_token_ids=declared_eos_token_ids(folder),
    )


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises ModelError, naming the file."""
    try:
        content = json.loads(read_file(path, MAX_TEXT_BYTES))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of the JSON or of its encoding
        raise ModelError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path} is nested too deeply") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_optional_json_object(path: Path) -> dict[str, object]:
    """As `read_json_object`, but empty where there is no such file."""
    return read_json_object(path) if path.exists() else {}


def declared_eos_token_ids(folder: Path) -> frozenset[int]:
    """Every end-of-text id the two config files name; the tokenizer may know more."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        for section in _sections(read_optional_json_object(folder / name)):
            declared = section.get("eos_token_id")
            ids = declared if isinstance(declared, list) else [declared]
            found.update(token for token in ids if type(token) is int)
    return frozenset(found)


def _sections(config: dict[str, object]) -> list[dict[str, object]]:
    """The config, and its text part where it describes more than text."""
    nested = config.get("text_config")
    return [config, nested] if isinstance(nested, dict) else [config]


def _positive(config: dict[str, object], keys: tuple[str, ...]) -> int | None:
    for section in _sections(config):
        for key in keys:
            value = section.get(key)
            if type(value) is int and value > 0:
                return value
    return None


def _context_length(folder: Path, config: dict[str, object]) -> int | None:
    tokenizer_config = read_optional_json_object(folder / "tokenizer_config.json")
    length = _positive(config, _CONTEXT_KEYS) or _positive(tokenizer_config, ("model_max_length",))
    return length if length is not None and length < _LONGEST_REAL_CONTEXT else None


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The files mlx-lm loads, and all that an index asks for."""
    index = read_optional_json_object(folder / "model.safetensors.index.json").get("weight_map")
    files = sorted(folder.glob("model*.safetensors"))
    wanted = set(map(str, index.values())) if isinstance(index, dict) else set()
    if missing := sorted(wanted - {file.name for file in files}):
        raise ModelError(f"{folder} lacks weight files its index names: {', '.join(missing)}")
    if not files:
        raise ModelError(f"{folder} holds no model*.safetensors")
    return tuple(files)


def _check_safetensors(path: Path) -> int:
    """8 bytes of header length, a JSON header with each tensor's place, the tensors; how many these are."""
    try:
        with open_file(path, sys.maxsize) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_HEADER_LENGTH_BYTES)
            header_length = struct.unpack("<Q", start)[0] if len(start) == _HEADER_LENGTH_BYTES else size
            if _HEADER_LENGTH_BYTES + header_length > size:
                raise ModelError(f"{path} is not a safetensors file, or cut off in its header ({size} bytes)")
            if header_length > MAX_TEXT_BYTES:
                raise ModelError(
                    f"{path} has a header of {header_length} bytes; the limit is {MAX_TEXT_BYTES}"
                )
            header = file.read(header_length)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    try:
        tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
        end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        needed = int(end) + _HEADER_LENGTH_BYTES + header_length
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: its header cannot be read") from error
    if size != needed:
        raise ModelError(f"{path} is damaged: it has {size} bytes, its header says {needed}")
    return len(tensors)
