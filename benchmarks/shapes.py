"""Known shapes of models, as their `config.json` gives them; nothing here needs MLX."""

from typing import Any

PACKED = "-4bit"
"""After a shape's name: its weights are packed."""
_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_GEMMA3 = {"model_type": "gemma3_text", "max_position_embeddings": 131072, "sliding_window_pattern": 6}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _LLAMA
    | {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    },
    "1b": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8b": _LLAMA
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "gemma3-tiny": _GEMMA3
    | {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "sliding_window": 64,
    },
    "gemma3-4b": _GEMMA3
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
"""Llama 3.2 1B and 3.1 8B, Gemma 3 4B (five of six layers slide), and small ones for trying things out."""

LLAMAS = tuple(name for name, shape in SHAPES.items() if shape["model_type"] == "llama")
