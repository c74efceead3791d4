"""Models for benchmarks: real ones, and known shapes with random weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from entry import BenchmarkError
from floor import on_cpu
from mlx_lm.models import gemma3_text, llama
from shapes import PACKED, SHAPES

from mlxd.batching import tuning
from mlxd.batching.compile_choice import choose_compiled
from mlxd.batching.device import device_memory_bytes, keep_compiled
from mlxd.batching.joined import join_projections
from mlxd.batching.memory import check_attention, layers_of
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.model import open_model, resolve
from mlxd.batching.parameters import main_dtype, parameters_of
from mlxd.batching.products import rewrite_products
from mlxd.batching.runner import RunnerInfo, ignore_progress
from mlxd.batching.timing import TimeBox
from mlxd.caches.kinds import Layer, group_specs
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import MemoryPlan, plan_memory

_TUNING_S = 60.0
_VARIANTS = ("kernel", "in_place", "gathered") if mx.cuda.is_available() else ("in_place", "gathered")

SMOLLM2 = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class BenchModel:
    name: str
    model: nn.Module
    vocab_size: int

    def twin(self) -> nn.Module:
        """The same arrays in modules of their own, which may be rewritten."""
        twin, _ = _open(self.name)
        twin.update(self.model.parameters())
        return twin


def load(name: str) -> BenchModel:
    """A shape of SHAPES with random weights, "smollm2", or whatever `mlxd serve` takes as a model.

    Weights are float32 on the CPU; random ones are bfloat16 on a GPU, and packed to 4 bits in groups of 64
    where the shape's name ends in "-4bit".

    Raises:
        BenchmarkError: there is no room for the weights.
    """
    keep_compiled()
    model, vocab_size = _open(name)
    check_room(name, model)
    mx.eval(model.parameters())
    return BenchModel(name, model, vocab_size)


def check_room(name: str, model: nn.Module, copies: int = 1) -> None:
    """Evaluates nothing.

    Args:
        copies: of the weights, that will be in memory together.
    Raises:
        BenchmarkError: they have no room.
    """
    needed = copies * sum(array.nbytes for array in parameters_of(model))
    if needed > (most := device_memory_bytes()):
        raise BenchmarkError(
            f"{name} needs {needed / 1e9:.3g} GB for its weights; {most / 1e9:.3g} GB are free"
        )


def _open(name: str) -> tuple[nn.Module, int]:
    """A model that is not evaluated, and its vocabulary's size."""
    shape = SHAPES.get(name.removesuffix(PACKED))
    if shape is None:
        opened = open_model(resolve(SMOLLM2 if name == "smollm2" else name, ignore_progress))
        return opened.model, opened.vocab_size
    model = random_model(shape)
    if name.endswith(PACKED):
        nn.quantize(model, group_size=64, bits=4)
    return model, shape["vocab_size"]


def random_model(config: dict[str, Any]) -> nn.Module:
    """Weights of an mlx-lm model, not evaluated: the same ones each time."""
    mx.random.seed(0)
    module = {"llama": llama, "gemma3_text": gemma3_text}[config["model_type"]]
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    if module is gemma3_text:
        model.sanitize({})  # as for a checkpoint without a head: its embedding is the head
    model.set_dtype(mx.float32 if on_cpu() else mx.bfloat16)
    return model


def make_runner(
    bench: BenchModel,
    *,
    max_rows: int,
    max_model_len: int,
    page_size: int,
    chunk: int = 512,
    attention: str = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    quantization: Quantization | None = None,
    join: bool = True,
    multiply: bool = True,
) -> MlxRunner:
    """A runner with room for `max_rows` rows of `max_model_len`, made and tuned as the daemon does at start.

    `join`: whether projections of one input become one product, `multiply`: whether those of few rows are our
    own, where there is a kernel for it; the model of `bench` stays as it is.

    Raises:
        SettingError: this machine has not what `attention` needs.
    """
    check_attention(attention)
    layers = layers_of(bench.model, quantization)
    weights_bytes = sum(array.nbytes for array in parameters_of(bench.model))
    memory = _plan(layers, page_size, max_rows, max_model_len, chunk, weights_bytes)
    info = RunnerInfo(
        model=bench.name,
        vocab_size=bench.vocab_size,
        memory=memory,
        max_batch=max_rows,
        eos_token_ids=frozenset(),
        device=str(mx.default_device()),
        compiled=compile != "off",
    )
    model = bench.twin()
    dtype = main_dtype(model)
    joined = join_projections(model, dtype) if join else "nothing"
    products = rewrite_products(model, dtype) if multiply else "by MLX"
    runner = MlxRunner(model, layers, memory, info)
    if attention == "auto":
        times = tuning.choose_attention(runner, memory, _VARIANTS, TimeBox(_TUNING_S))
        attention = ", ".join(f"{min(ms, key=ms.__getitem__)} at {rows}" for rows, ms in times.items())
    else:
        runner.set_attention(attention)
    if compile == "auto":
        choose_compiled(runner, memory, TimeBox(_TUNING_S))
    else:
        runner.step.enabled = compile == "on"
    compiled = "on" if runner.step.compiles_at(max_rows) else "off"
    runner.describe(attention=attention, compile=compiled, joined=joined, products=products)
    return runner


def warm_up(runner: MlxRunner) -> None:
    """Plan and trace what service may need, as the daemon does at start where it has the time."""
    memory = runner.info.memory
    tuning.plan_prompts(runner, memory, TimeBox(_TUNING_S))
    if runner.step.enabled:
        tuning.trace_buckets(runner, memory, TimeBox(_TUNING_S), ignore_progress)


def _plan(
    layers: Sequence[Layer], page_size: int, max_rows: int, max_model_len: int, chunk: int, weights_bytes: int
) -> MemoryPlan:
    specs = group_specs(layers, page_size)
    row_bytes = sum(spec.pages_for(max_model_len, chunk) * spec.page_bytes for spec in specs)
    return plan_memory(
        specs,
        budget_bytes=max_rows * row_bytes,
        weights_bytes=weights_bytes,
        max_rows=max_rows,
        max_model_len=max_model_len,
        chunk=chunk,
    )
