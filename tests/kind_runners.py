"""A runner for each way of keeping state, made once."""

from functools import cache
from typing import Any

from tiny_models import CHUNK, PAGE, VOCAB, make_rig
from tiny_zoo import zoo_model

from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import RunnerInfo
from mlxd.caches.kinds import group_specs, inspect_layers
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import plan_memory

LATE = Quantization(bits=4, group_size=32, start=2 * CHUNK)
RIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"attention": "in_place"},
    "gpt_oss": {"attention": "gathered"},
    "gemma3_text/64": {"attention": "in_place", "quantization": LATE},
    "llama/64": {"attention": "in_place", "quantization": LATE},
}
ZOO = ("qwen3_next", "mamba2", "jamba", "gemma3n")
KINDS = (*RIGS, *ZOO)


@cache
def runner_of(kind: str, budget_bytes: int = 2**22) -> MlxRunner:
    if kind in RIGS:
        return make_rig(kind, budget_bytes=budget_bytes, **RIGS[kind]).runner
    model = zoo_model(kind)
    layers = inspect_layers(model)
    memory = plan_memory(
        group_specs(layers, PAGE, CHUNK),
        budget_bytes=budget_bytes,
        weights_bytes=0,
        max_rows=8,
        max_model_len=128,
        chunk=CHUNK,
        checkpoints=0.2,
    )
    runner = MlxRunner(model, layers, memory, RunnerInfo(kind, VOCAB, memory, 8, frozenset(), "test", False))
    runner.set_attention("in_place")
    runner.step.enabled = False
    return runner


def stride(kind: str) -> int:
    return runner_of(kind).info.memory.page_size
