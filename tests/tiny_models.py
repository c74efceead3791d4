"""Tiny random float32 models of each family, runners for them, and mlx-lm's own answers to compare with."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from mlxd.batching.driver import Driver
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.plan import RowResult
from mlxd.batching.row import Row
from mlxd.batching.runner import RunnerInfo
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.kinds import group_specs, inspect_layers, native_caches, packed_layers
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import MemoryPlan, plan_memory

VOCAB = 64
PAGE = 4
CHUNK = 16
WATCHED = SamplingParams(temperature=0.0, top_logprobs=20)
"""Greedy, with log-probabilities to compare."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A module of mlx-lm and what is special in its tiny model. `window`: of its sliding layers, if any."""

    module: str
    window: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", config={"rope_theta": 1e4, "tie_word_embeddings": False}),
    "phi3": Family("phi3"),
    "mistral": Family("llama", 7, {"layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3_text": Family(
        "gemma3_text",
        8,
        {"num_hidden_layers": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    ),
    "gpt_oss": Family("gpt_oss", 6, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}

WIDE = "wide"
"""A llama whose keys and values outweigh everything else, 16 KiB a token; for tests of memory."""
_MODELS = {
    **FAMILIES,
    **{
        f"{name}/64": replace(family, config={**family.config, "head_dim": 64})
        for name, family in FAMILIES.items()
        if name not in ("qwen2", "phi3")  # their heads are as wide as the model over their number
    },
    WIDE: Family("llama", config={"num_hidden_layers": 8, "head_dim": 128}),
}
"""By name; "llama/64" is llama with heads 64 wide, which can be packed."""
UNPACKED_TOLERANCE = 1e-4
ONE_CODE = 0.1
"""What one code that came out differently, for a difference in the last bit, may do to a log-probability."""
PACKABLE = [f"{name}/64" for name in ("llama", "qwen3", "mistral", "gemma3_text", "gpt_oss")]


def edge_lengths(family: str) -> list[int]:
    """Prompt lengths at the edges of pages and of the family's window (two pages, where it has none)."""
    window = FAMILIES[family].window or 2 * PAGE
    return sorted({1, PAGE - 1, PAGE, PAGE + 1, window - 1, window, window + 1, 3 * window})


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A random prompt, the same one for the same arguments."""
    return tuple(np.random.default_rng((seed, length)).integers(0, VOCAB, length).tolist())


@cache
def tiny_model(family: str) -> nn.Module:
    """The family's model with random weights, biases, norms and sinks, wide enough to have no near ties."""
    entry = _MODELS[family]
    module = importlib.import_module(f"mlx_lm.models.{entry.module}")
    config = {**_COMMON, "model_type": entry.module, "sliding_window": entry.window, **entry.config}
    mx.random.seed(0)  # biases begin random, and what is added here keeps that
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng(1)
    model.update(tree_unflatten([(name, _random(name, value, rng)) for name, value in parameters_of(model)]))
    mx.eval(model.parameters())
    return model


def parameters_of(model: nn.Module) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))


def _random(name: str, value: mx.array, rng: np.random.Generator) -> mx.array:
    noise = rng.standard_normal(value.shape)
    if value.ndim == 1:
        return mx.array(np.array(value) + 0.3 * noise, mx.float32)
    gain = 1.0 if "embed" in name else 2.0
    return mx.array(gain * noise / np.sqrt(value.shape[-1]), mx.float32)


@dataclass(slots=True)
class Rig:
    """A runner over a family's tiny model and the memory plan of its pools."""

    family: str
    model: nn.Module
    memory: MemoryPlan
    runner: MlxRunner

    def driver(self, *, pipelined: bool = False) -> Driver:
        return Driver(self.runner, self.memory, pipelined=pipelined)

    def generate(self, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = WATCHED) -> Row:
        """One row alone, run to its end."""
        driver = self.driver()
        row = driver.join(prompt, sampling)
        driver.prefill()
        for _ in range(num_tokens):
            driver.decode()
        driver.leave(row)
        return row


def make_rig(
    family: str,
    attention: str = "gathered",
    *,
    compiled: bool = False,
    max_rows: int = 8,
    max_model_len: int = 128,
    budget_bytes: int = 2**22,
    page_size: int = PAGE,
    quantization: Quantization | None = None,
    model: nn.Module | None = None,
) -> Rig:
    """A runner with fresh pools; it compiles only where asked to, since each graph may call a compiler.

    Args:
        model: in place of the family's, with as large a vocabulary.
    """
    model = tiny_model(family) if model is None else model
    layers = inspect_layers(model)
    if quantization is not None:
        layers = packed_layers(layers, quantization)
    memory = plan_memory(
        group_specs(layers, page_size, max(CHUNK, page_size)),
        budget_bytes=budget_bytes,
        weights_bytes=sum(value.nbytes for _, value in parameters_of(model)),
        max_rows=max_rows,
        max_model_len=max_model_len,
        chunk=max(CHUNK, page_size),
    )
    info = RunnerInfo(family, VOCAB, memory, max_rows, frozenset(), "test", compiled)
    runner = MlxRunner(model, layers, memory, info)
    runner.set_attention(attention)
    runner.step.enabled = compiled
    return Rig(family, model, memory, runner)


@dataclass(frozen=True, slots=True)
class Oracle:
    """Greedy tokens of one row alone on mlx-lm's own caches, and the log-probabilities [VOCAB] of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[npt.NDArray[np.float32], ...]


@cache
def oracle(family: str, prompt: tuple[int, ...], num_tokens: int) -> Oracle:
    model = tiny_model(family)
    caches = native_caches(model)
    logits = model(mx.array([prompt]), cache=caches)[0, -1]
    tokens, logprobs = [], []
    for _ in range(num_tokens):
        logprobs.append(np.array(logits - mx.logsumexp(logits)))
        tokens.append(int(np.argmax(logprobs[-1])))
        logits = model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
    return Oracle(tuple(tokens), tuple(logprobs))


def run_together(rig: Rig, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[RowResult]]:
    """All prompts in one batch; the results of each row."""
    driver = rig.driver()
    rows = [driver.join(prompt, WATCHED) for prompt in prompts]
    driver.prefill()
    steps = [driver.decode() for _ in range(num_tokens)]
    for row in rows:
        driver.leave(row)
    assert pools_are_whole(driver)
    return [list(results) for results in zip(*steps, strict=True)]


def seen(results: Sequence[RowResult]) -> list[object]:
    """Tokens and log-probabilities, bit for bit, without the row's id."""
    return [(result.token, result.logprobs, result.fault) for result in results]


def stored_bytes(rig: Rig, row: Row, num_positions: int) -> bytes:
    """Keys and values that a row holds of its first `num_positions`, all layers, oldest first."""
    parts = []
    for layer, group in zip(rig.runner._caches, rig.runner._layer_groups, strict=True):
        table = row.tables[group]
        for pool in (layer.keys, layer.values):
            pages = np.array(pool[mx.array(table.pages)])
            columns = pages.transpose(1, 0, 2, 3).reshape(pages.shape[1], -1, pages.shape[3])
            parts.append(columns[:, : num_positions - table.start].tobytes())
    return b"".join(parts)


def pools_are_whole(driver: Driver) -> bool:
    """Whether nothing is held and every page is accounted for."""
    for pool in driver.pools:
        pool.check_integrity()
    return all(pool.num_held == 0 for pool in driver.pools)
