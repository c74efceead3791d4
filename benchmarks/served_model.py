"""A model folder that two servers can load, and prompts of known length for it."""

import json
import random
import shutil
from pathlib import Path
from typing import cast

import mlx.core as mx
from entry import BenchmarkError
from mlx.utils import tree_flatten
from models import SMOLLM2, check_room, load, random_model
from shapes import SHAPES
from tokenizers import Tokenizer

from mlxd.batching.model import resolve
from mlxd.batching.runner import ignore_progress

_NEVER_DRAWN = "<repo_name>"
"""Ends the text for both servers, so that all answers have the length that was asked for."""

_SERVERS = 2
"""That hold the weights together."""


def make_folder(name: str, tokenizer: Path | None, folder: Path) -> None:
    """Write a model with unpacked weights, which both servers compute alike.

    Args:
        name: "smollm2", or a Llama shape of SHAPES, which gets random weights and the tokenizer's vocabulary.
        tokenizer: folder of the tokenizer; None takes the built-in model's.
    Raises:
        BenchmarkError: there is no room for the weights of two servers, or the tokenizer is of another kind.
    """
    source = tokenizer or resolve(SMOLLM2, ignore_progress)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)
    vocabulary = Tokenizer.from_file(str(source / "tokenizer.json"))
    eos = vocabulary.token_to_id(_NEVER_DRAWN)
    if eos is None:
        raise BenchmarkError(f"{source}: the tokenizer has no {_NEVER_DRAWN}, which is to end the text")
    if name in SHAPES:
        config = SHAPES[name] | {"vocab_size": vocabulary.get_vocab_size()}
        model = random_model(config)
        check_room(name, model, copies=_SERVERS)
    else:
        config = json.loads((source / "config.json").read_text())
        del config["quantization"]
        model = load(name).model
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": _NEVER_DRAWN}))
    weights = dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    del model, weights  # the servers need the memory
    mx.clear_cache()


class Words:
    """Texts of so many tokens: words that are a token each, whatever stands beside them."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        spelled = (token.removeprefix("Ġ") for token in tokenizer.get_vocab() if token.startswith("Ġ"))
        self._words = sorted(word for word in spelled if word.isascii() and word.isalpha() and len(word) > 2)

    def text(self, seed: int, num_tokens: int) -> str:
        return "".join(f" {word}" for word in random.Random(seed).choices(self._words, k=num_tokens))
