"""[M] From a name in the configuration to a model in memory, ready for the device it will run on."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from mlx.nn.layers.base import Module

from mlxd.batching.builtin import BUILTIN, pull
from mlxd.batching.device import on_cpu
from mlxd.batching.errors import ModelError, SettingError
from mlxd.batching.model_files import inspect
from mlxd.batching.parameters import main_dtype, parameters_of
from mlxd.batching.runner import Progress
from mlxd.batching.text import Tokenizer
from mlxd.batching.waiting import wait_for
from mlxd.caches.mlx_lm_import import utils as mlx_lm
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.jinja", "*.txt", "model*.safetensors", "tokenizer.model", "*.tiktoken")
_PATH = ("model", "path")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An mlx-lm model, ready for the device.

    Attributes:
        config: config.json as mlx-lm completed it.
        eos_token_ids: all that config, generation config and tokenizer declare; may be empty.
        vocab_size: columns of the logits as the config declares them; the tokenizer may know fewer tokens.
        max_model_len: positions a row may use, at least 1.
        weights_bytes: of all parameters as they lie in memory.
        dtype: of most floating-point parameters, so of activations and KV.
    """

    model: Module
    config: dict[str, Any]
    path: Path
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    weights_bytes: int
    dtype: mx.Dtype


def resolve(name: str, progress: Progress) -> Path:
    """The folder of a model, downloaded where it has to be.

    Args:
        name: a built-in model, a folder, or a hub name ("owner/model"), tried in this order.
        progress: told of the stages "download" and "convert", if there are any.
    Raises:
        ModelError: there is no such model, or it could not be fetched.
    """
    if name in BUILTIN:
        return pull(name, progress)
    folder = Path(os.path.expanduser(name))  # that of pathlib raises for "~nobody"
    if folder.is_dir():
        return folder
    if not _HUB_NAME.fullmatch(name):
        known = ", ".join(BUILTIN)
        raise SettingError(_PATH, f"is {name!r}, which is no folder, hub name or built-in model ({known})")
    return _fetch_from_hub(name, progress)


@contextmanager
def blaming_path(name: str) -> Iterator[None]:
    """What turns out wrong with a model's files or layers inside is told as wrong with `model.path`."""
    try:
        yield
    except SettingError:
        raise
    except ModelError as error:
        raise SettingError(_PATH, f"is {name!r}: {error}") from error


def load_model(
    path: Path, progress: Progress, max_model_len: int | None = None, *, name: str | None = None
) -> LoadedModel:
    """Load a model folder through mlx-lm on the calling thread, which from then on owns it.

    Args:
        progress: told of the stage "load".
        max_model_len: a shorter context than the model's own, or the context of a model that names none.
        name: what the user calls the model; its folder by default.
    Raises:
        SettingError: `max_model_len` is missing or over the model's own context.
        ModelError: a file is missing or damaged, or mlx-lm does not know the model or cannot fit its weights.
    """
    progress("load", 0.0)
    loaded = open_model(path, max_model_len, name=name)
    _evaluate(loaded.model, progress)
    return loaded


def open_model(path: Path, max_model_len: int | None = None, *, name: str | None = None) -> LoadedModel:
    """As `load_model`, but the weights stay on disk until something evaluates them.

    On the CPU every weight is unpacked to float32; half-precision and packed products are slow there.
    """
    files = inspect(path)
    tokenizer = Tokenizer.load(path)
    context = _context(name or str(path), files.max_model_len, max_model_len)
    model, config = _build(path)
    if on_cpu():
        _make_float32(model)
    return LoadedModel(
        model=model,
        config=config,
        path=path,
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=files.vocab_size,
        max_model_len=context,
        weights_bytes=sum(array.nbytes for array in parameters_of(model)),
        dtype=main_dtype(model),
    )


def _fetch_from_hub(name: str, progress: Progress) -> Path:
    progress("download", 0.0)
    try:
        # The hub's client tells no progress of its own.
        folder = wait_for(
            lambda: huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)),
            while_waiting=lambda: progress("download", 0.0),
        )
    except RepositoryNotFoundError as error:
        raise SettingError(_PATH, f"is {name!r}, which the hub does not know or does not show you") from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ModelError(f"cannot fetch {name!r} from the hub: {summary_of(error)}") from error
    progress("download", 1.0)
    return Path(folder)


def _context(name: str, own: int | None, asked: int | None) -> int:
    if own is None and asked is None:
        raise SettingError(_PATH, f"is {name!r}, which names no context length; set model.max_model_len")
    if own is not None and asked is not None and asked > own:
        sentence = f"is {asked}; the context of {name} is {own}"
        raise SettingError(("model", "max_model_len"), sentence)
    return asked or own or 0


def _build(path: Path) -> tuple[Module, dict[str, Any]]:
    """The model with its weights still lazy."""
    try:
        return mlx_lm.load_model(path, lazy=True)
    except (*MODEL_FAULTS, OSError) as error:
        raise ModelError(f"{path}: mlx-lm cannot build the model: {summary_of(error)}") from error


def _make_float32(model: Module) -> None:
    """Unpack and cast all weights lazily. Scales are cast first, so that unpacking rounds nothing."""
    model.set_dtype(mx.float32)
    mlx_lm.dequantize_model(model)
    model.set_dtype(mx.float32)
    modules: list[tuple[str, Module]] = model.named_modules()
    for name, module in modules:
        if "scales" in module:
            raise ModelError(f"layer {name} ({type(module).__name__}) cannot be unpacked for the CPU")


def _evaluate(model: Module, progress: Progress) -> None:
    """Read the weights one by one: packed ones do not pile up beside unpacked ones, and progress is told."""
    parameters = parameters_of(model)
    total = sum(array.nbytes for array in parameters)
    done = 0
    for array in parameters:
        mx.eval(array)
        done += array.nbytes
        progress("load", done / total)
