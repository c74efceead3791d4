"""[M] Turns a llama GGUF file into a folder that mlx-lm and `tokenizers` load."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlxd.batching.errors import ModelError
from mlxd.batching.runner import Progress

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3
_BLOCK = 32
_WORD_BITS = 32

_Metadata = dict[str, Any]


def convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write config, weights and tokenizer of `gguf` into the existing `folder`.

    Quantised tensors keep their bits: GGUF's scale and minimum are MLX's scale and bias.

    Raises:
        ModelError: the file cannot be read, or its architecture, tokenizer or tensors are not llama's.
    """
    tensors, metadata = _read(gguf)
    progress("convert", 0.2)
    try:
        weights = {_mlx_name(name): _compact(tensor) for name, tensor in tensors.items()}
        config = _config(metadata, weights)
        tokenizer = build_tokenizer(metadata)
        tokenizer_config = _tokenizer_config(metadata)
    except KeyError as error:
        raise ModelError(f"{gguf.name} has no entry {error}") from error
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(
        folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    )
    progress("convert", 0.4)
    try:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    except RuntimeError as error:
        raise ModelError(f"cannot write the weights of {gguf.name}: {error}") from error
    progress("convert", 1.0)


def _read(gguf: Path) -> tuple[dict[str, mx.array], _Metadata]:
    try:
        # The union of all file kinds is what mx.load declares; a GGUF file gives these two.
        return cast(tuple[dict[str, mx.array], _Metadata], mx.load(str(gguf), return_metadata=True))
    except RuntimeError as error:
        raise ModelError(f"{gguf.name} is not a readable GGUF file: {error}") from error


def build_tokenizer(metadata: _Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer in the metadata of a "smollm" GGUF file: every digit stands alone."""
    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"GGUF tokenizer {kind} is not supported; it must be ('gpt2', 'smollm')")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [
        (left, right)
        for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])
    ]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _mlx_name(name: str) -> str:
    """`blk.3.attn_q.scales` -> `model.layers.3.self_attn.q_proj.scales`."""
    stem, _, part = name.rpartition(".")
    if stem in _TENSORS:
        return f"{_TENSORS[stem]}.{part}"
    _, layer, tensor = stem.split(".") if stem.startswith("blk.") else ("", "", stem)
    if tensor not in _LAYER_TENSORS:
        raise ModelError(f"GGUF tensor {name!r} is none of a llama model's")
    return f"model.layers.{layer}.{_LAYER_TENSORS[tensor]}.{part}"


def _compact(tensor: mx.array) -> mx.array:
    """float32 norms as float16, the dtype of the scales: mixed, every norm would promote the activations."""
    return tensor.astype(mx.float16) if tensor.dtype == mx.float32 else tensor


def _config(metadata: _Metadata, weights: dict[str, mx.array]) -> dict[str, Any]:
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ModelError(f"GGUF architecture {architecture!r} is not supported; it must be 'llama'")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _number(metadata["llama.embedding_length"]),
        "intermediate_size": _number(metadata["llama.feed_forward_length"]),
        "num_hidden_layers": _number(metadata["llama.block_count"]),
        "num_attention_heads": _number(metadata["llama.attention.head_count"]),
        "num_key_value_heads": _number(metadata["llama.attention.head_count_kv"]),
        "head_dim": _number(metadata["llama.rope.dimension_count"]),
        "max_position_embeddings": _number(metadata["llama.context_length"]),
        "rms_norm_eps": _number(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _number(metadata["llama.rope.freq_base"]),
        # llama.cpp stores q and k with the two halves of each head interleaved.
        "rope_traditional": True,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "bos_token_id": _number(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": _number(metadata["tokenizer.ggml.eos_token_id"]),
        "torch_dtype": "float16",
    }
    if quantization := _quantization(weights):
        config["quantization"] = quantization
    return config


def _quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's entry: the packing of most modules, then that of the others by name; empty if none."""
    packings = {
        name.removesuffix(".scales"): _packing(weights[name.removesuffix("scales") + "weight"], scales)
        for name, scales in weights.items()
        if name.endswith(".scales")
    }
    if not packings:
        return {}
    group_size, bits = Counter(packings.values()).most_common(1)[0][0]
    others = {
        module: {"group_size": packing[0], "bits": packing[1]}
        for module, packing in packings.items()
        if packing != (group_size, bits)
    }
    return {"group_size": group_size, "bits": bits, **others}


def _packing(packed: mx.array, scales: mx.array) -> tuple[int, int]:
    """Group size and bits of a packed weight: both follow from the shapes, a group being GGUF's block."""
    return _BLOCK, packed.shape[1] * _WORD_BITS // (scales.shape[1] * _BLOCK)


def _tokenizer_config(metadata: _Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _number(metadata["llama.context_length"]),
        "add_bos_token": bool(metadata["tokenizer.ggml.add_bos_token"].item()),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **{key: tokens[_number(metadata[f"tokenizer.ggml.{role}_token_id"])] for key, role in roles.items()},
    }


def _number(scalar: mx.array) -> Any:
    """A Python number; floats lose the digits float32 never had (1e-05, not 9.999999747378752e-06)."""
    value = scalar.item()
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
