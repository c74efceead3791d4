"""A decode step's parts on the device, each built alone at the step's shapes."""

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from attention import Heads, paged_step

from mlxd.batching.memory import layers_of
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.plan import DecodeEntry
from mlxd.batching.row import Row
from mlxd.batching.sampler import sample
from mlxd.batching.sampler_state import SamplingBatch
from mlxd.batching.sampling_params import GREEDY, SamplingParams
from mlxd.caches.paged import LayerShape

Build = Callable[[], Sequence[mx.array]]
_DRAWN = SamplingParams(temperature=1.0)


def parts_of(runner: MlxRunner, lengths: Sequence[int], attention: str) -> dict[str, Build]:
    """Graphs by part. `lengths`: of the rows, the new position included; `attention`: the variant's name."""
    rows, vocab_size = len(lengths), runner.info.vocab_size
    return {
        "attention": _attention(runner, lengths, attention),
        "products": _products(runner.model, rows, runner.dtype),
        "sampling, greedy": _sampling(rows, vocab_size, runner.dtype, GREEDY),
        "sampling, drawn": _sampling(rows, vocab_size, runner.dtype, _DRAWN),
    }


def _attention(runner: MlxRunner, lengths: Sequence[int], name: str) -> Build:
    """Writes and attention of all layers, each with pages of its own."""
    memory, model = runner.info.memory, runner.model
    windows = {index: group.spec.window for group in memory.groups for index in group.spec.layers}
    steps = []
    for layer in layers_of(model):
        shape = layer.shape
        assert isinstance(shape, LayerShape), "only keys and values are read by attention"
        heads = Heads(model.args.num_attention_heads, shape.n_kv_heads, shape.key_dim)
        live = [min(length, windows[shape.index] or length) for length in lengths]
        steps.append(paged_step(name, memory.page_size, live, heads, shape.dtype))
    return lambda: [array for step in steps for array in step()]


def _products(model: nn.Module, rows: int, dtype: mx.Dtype) -> Build:
    """All that multiplies with weights, the head included."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear | nn.QuantizedLinear)]
    calls: list[Callable[[mx.array], mx.array]] = [*linear]
    widths = [_input_width(module) for module in linear]
    if "lm_head" not in model:
        embedding = cast(nn.Embedding, model.model.embed_tokens)
        calls.append(embedding.as_linear)
        widths.append(_input_width(embedding))
    inputs = {width: mx.random.normal((rows, 1, width)).astype(dtype) for width in set(widths)}
    mx.eval(list(inputs.values()))
    return lambda: [call(inputs[width]) for call, width in zip(calls, widths, strict=True)]


def _input_width(module: nn.Module) -> int:
    stored = int(module.weight.shape[-1])
    is_packed = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    return stored * 32 // module.bits if is_packed else stored


def _sampling(rows: int, vocab_size: int, dtype: mx.Dtype, params: SamplingParams) -> Build:
    logits = 3 * mx.random.normal((rows, vocab_size)).astype(dtype)
    tokens = mx.zeros((rows,), mx.int32)
    entries = [DecodeEntry(Row(i, params, i, (1, 2), [], ()), 0, 0, 1) for i in range(rows)]
    batch = SamplingBatch(entries, rows, vocab_size)
    inputs = batch.inputs(entries)
    mx.eval(logits, tokens, inputs)
    return lambda: sample(batch.shape, logits, tokens, inputs)
