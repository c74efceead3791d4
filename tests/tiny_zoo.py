"""Tiny random float32 models of every text model file of mlx-lm."""

import importlib
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

VOCAB = 64
WINDOW = 8
_LAYERS = 4
_SLIDING = ["sliding_attention", "full_attention"] * (_LAYERS // 2)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 0.5,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 0.5,
    "use_qk_norm": True,
    "use_bias": False,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
    "dim_model_base": 128,
    # GPT-2's names
    "n_ctx": 512,
    "n_positions": 512,
    "n_embd": 128,
    "n_head": 4,
    "n_layer": _LAYERS,
    "n_inner": 48,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "share_expert_dim": 16,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    # latent attention
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 8,
    # recurrent layers
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "conv_kernel": 4,
    "state_size": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "use_conv_bias": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "time_step_limit": (0.0, float("inf")),
}
"""Sizes by the names that models give them. Heads are wide enough to be quantised."""

_MLA = {"num_key_value_heads": 4}
_TEXT = "text_config"
_MOE_MLA = {**_MLA, "head_dim": 8}
_LLAMA4 = {
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 1, 1, 0],
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
    "rope_scaling": None,
}
_QWEN3_VL = {"rope_scaling": {"mrope_section": [1, 1, 2], "type": "default"}}
_QWEN3_5 = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "num_layers": 2,
    "num_hidden_layers": 2,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
_LONG_ROPE = {
    "type": "longrope",
    "long_factor": [1.0] * 16,
    "short_factor": [1.0] * 16,
    "long_mscale": 1.0,
    "short_mscale": 1.0,
    "original_max_position_embeddings": 512,
}
_GEMMA4 = {
    "global_head_dim": 64,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "sliding_window_pattern": 2,
    "layer_types": _SLIDING,
}
_DEFAULT_ROPE = {"rope_theta": 1e4, "rope_type": "default"}

_OWN: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afm7": {"hidden_dim": 128, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": {"layer_types": _SLIDING},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "bailing_hybrid": {"num_key_value_heads": 4},
    "bailing_moe": {"norm_topk_prob": True},
    "bailing_moe_linear": {"num_key_value_heads": 4},
    "bailing_moe_v3": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 128,
        "n_layers": 4,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek": {},
    "deepseek_v2": {**_MLA, "topk_method": "greedy", "rope_scaling": _YARN},
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "deepseek_v41": {},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone": {},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"layer_types": _SLIDING, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_chunk_size": 16,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    },
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"]},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8.0},
    "gemma3": {_TEXT: {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8}},
    "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "gemma3n": {
        _TEXT: {
            "model_type": "gemma3n_text",
            "intermediate_size": [48] * 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "layer_types": _SLIDING,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "final_logit_softcapping": 30.0,
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "laurel_rank": 8,
            "rope_local_base_freq": 1e4,
            "rope_scaling": None,
        }
    },
    "gemma4": {_TEXT: {"model_type": "gemma4_text", **_GEMMA4}},
    "gemma4_text": _GEMMA4,
    "glm": {},
    "glm4": {},
    "glm4_moe": {"rope_scaling": None},
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": {**_MLA, "rope_parameters": _DEFAULT_ROPE},
    "gpt2": {"num_key_value_heads": None},
    "gpt_bigcode": {"num_key_value_heads": None},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": None},
    "gpt_oss": {},
    "gptj": {"rotary_dim": 4},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "helium": {},
    "hunyuan": {
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_dt_rank": 4,
    },
    "kimi_k25": {_TEXT: {**_MLA, "model_type": "deepseek_v3"}},
    "kimi_k3": {
        _TEXT: {
            "num_key_value_heads": 4,
            "attn_res_block_size": 2,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
                "num_heads": 4,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
        }
    },
    "kimi_linear": {
        "num_key_value_heads": 4,
        "model_max_length": 512,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
    },
    "kimi_vl": {_TEXT: _MLA},
    "laguna": {"layer_types": _SLIDING},
    "lfm2-vl": {
        _TEXT: {
            "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * 2,
            "block_dim": 128,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 48,
        }
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_dim": 128,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 48,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "use_expert_bias": True},
    "lille-130m": {"block_size": 512, "n_kv_heads": 2},
    "llama": {},
    "llama4": {_TEXT: _LLAMA4},
    "llama4_text": _LLAMA4,
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {
        **_LONGCAT,
        "ngram_vocab_size_ratio": 4,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mamba": {"time_step_rank": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "time_step_rank": "auto", "expand": 2},
    "mellum": {
        "layer_types": _SLIDING,
        "rope_parameters": {"sliding_attention": _DEFAULT_ROPE, "full_attention": _DEFAULT_ROPE},
    },
    "mimo": {},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "swa_rope_theta": 1e4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
    },
    "minicpm": {},
    "minicpm3": {**_MLA, "rope_scaling": _LONG_ROPE},
    "minimax": {"rotary_dim": 4},
    "minimax_m3_vl": {
        _TEXT: {
            "rotary_dim": 4,
            "dense_intermediate_size": 48,
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_freq": [0, 1, 1, 1],
            "index_block_size": 4,
            "index_topk_blocks": 3,
        }
    },
    "ministral3": {
        "rope_parameters": {
            **_DEFAULT_ROPE,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mistral3": {_TEXT: {"model_type": "llama"}},
    "mistral4": {
        **_MLA,
        "rope_parameters": {
            **_DEFAULT_ROPE,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mixtral": {},
    "muse_glimmer": {"layer_types": _SLIDING},
    "muse_spark": {
        _TEXT: {
            "post_norm_eps": 1e-8,
            "rope_parameters": _DEFAULT_ROPE,
            "layer_rope_theta": [1e4] * 4,
            "layer_types": _SLIDING,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.2,
            "moe_hidden_size": 128,
            "num_shared_experts": 0,
        }
    },
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2},
                "ffn": {"ffn_mult": 1.0},
            },
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        ]
        * 2
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {"hybrid_override_pattern": "M*M-"},
    "olmo2": {},
    "olmo3": {"layer_types": _SLIDING},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_allow_neg_eigval": True,
        "linear_num_key_heads": 4,
    },
    "olmoe": {},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 128,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2, 2, 4, 4],
        "ffn_multipliers": [1.0, 1.0, 2.0, 2.0],
    },
    "phi": {},
    "phi3": {},
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 48,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 2,
    },
    "phimoe": {"rope_scaling": _LONG_ROPE},
    "phixtral": {"num_vocab": VOCAB, "model_dim": 128, "num_heads": 4, "num_layers": 4, "rotary_dim": 4},
    "pixtral": {_TEXT: {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 32},
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "qwen": {"kv_channels": 32},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen2_vl": {_TEXT: {"model_type": "qwen2"}},
    "qwen3": {},
    "qwen3_5": {_TEXT: {**_QWEN3_5, "num_experts": 0}},
    "qwen3_5_moe": {_TEXT: _QWEN3_5},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen3_vl": {_TEXT: _QWEN3_VL},
    "qwen3_vl_moe": {_TEXT: _QWEN3_VL},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "num_key_value_heads": 1,
        "block_types": ["recurrent", "attention"] * 2,
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {},
    "spark2_5": {
        "layer_types": _SLIDING,
        "rope_parameters": {"sliding_attention": _DEFAULT_ROPE, "full_attention": _DEFAULT_ROPE},
    },
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {},
    "step3p5": {"num_attention_groups": 2, "layer_types": _SLIDING, "moe_layers_enum": "1,2,3"},
    "talkie": {},
    "telechat3": {},
    "youtu_llm": _MLA,
}
"""What is special in each model's tiny configuration, by module name."""

MODELS = tuple(_OWN)


def zoo_model(name: str) -> nn.Module:
    """The model with random parameters: a zero would hide errors in what it multiplies."""
    mx.random.seed(0)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(zoo_config(name)))
    rng = np.random.default_rng(1)
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    model.update(tree_unflatten([(name, _shaken(value, rng)) for name, value in parameters]))
    model.eval()
    mx.eval(model.parameters())
    return model


def zoo_config(name: str) -> dict[str, Any]:
    """The model's configuration, as in its `config.json`."""
    own = dict(_OWN[name])
    if _TEXT in own:
        own[_TEXT] = {**_SIZES, "model_type": name, **own[_TEXT]}
    return {**_SIZES, "model_type": name, **own}


def _shaken(value: mx.array, rng: np.random.Generator) -> mx.array:
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    return value + mx.array(0.1 * rng.standard_normal(value.shape), value.dtype)
