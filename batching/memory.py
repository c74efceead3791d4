"""From a model and the settings to the plan of what the daemon will hold."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.device import device_name
from mlxd.batching.errors import ModelError, SettingError
from mlxd.caches.budget import parse_budget
from mlxd.caches.delayed_step import DelayedShape
from mlxd.caches.kinds import Layer, UnsupportedCacheError, group_specs, inspect_layers, packed_layers
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import GroupSpec, MemoryPlan, plan_memory

AUTO_PAGE_SIZE = 64
"""Chosen by benchmarks/attention.py; docs/performance.md has the figures."""

TRIAL_STEPS = 3
"""Tokens that each row of the self-test draws."""
_STATE_ONLY = 16
"""Stands for a page where a model keeps none."""


def check_attention(attention: str) -> None:
    """Raises SettingError where this machine has not what the configured variant needs."""
    if attention == "kernel" and not mx.cuda.is_available():
        sentence = f"is 'kernel', which needs MLX's CUDA device; this machine has its {device_name()} device"
        raise SettingError(("decode", "attention"), sentence)


def layers_of(model: nn.Module, quantization: Quantization | None = None) -> tuple[Layer, ...]:
    """The model's layers, their keys and values packed where `quantization` says how.

    Raises:
        ModelError: names the cache kind which is not supported, and its layer.
        SettingError: the layers cannot be packed so.
    """
    try:
        layers = inspect_layers(model)
    except UnsupportedCacheError as error:
        raise ModelError(str(error)) from error
    try:
        return layers if quantization is None else packed_layers(layers, quantization)
    except UnsupportedCacheError as error:
        raise SettingError(("cache", "quantization"), f"does not go with this model: {error}") from error


def plan_for(
    layers: tuple[Layer, ...],
    *,
    weights_bytes: int,
    free_bytes: int,
    budget: str | int | float,
    page_size: int,
    max_rows: int,
    max_model_len: int,
    chunk: int,
    checkpoints: float,
) -> MemoryPlan:
    """The memory plan; evaluates nothing.

    Args:
        free_bytes: device memory left after the weights.
        chunk: prefill chunk in tokens, whole pages.
        checkpoints: share of the budget for boundaries of rows.
    Raises:
        SettingError: the budget is out of range, or has no room for the self-test's rows; or the chunk is not
            whole pages; or no row is ever packed that should be.
    """
    if chunk % page_size:
        sentence = f"is {chunk}; it must be a multiple of cache.page_size, {page_size} here"
        raise SettingError(("scheduler", "prefill_chunk"), sentence)
    try:
        budget_bytes = parse_budget(budget, free_bytes)
    except ValueError as error:
        raise SettingError(("cache", "budget"), str(error)) from error
    specs = group_specs(layers, page_size, chunk)
    _check_boundary(specs, layers, chunk, page_size, max_model_len)
    try:
        memory = plan_memory(
            specs,
            budget_bytes=budget_bytes,
            weights_bytes=weights_bytes,
            max_rows=max_rows,
            max_model_len=max_model_len,
            chunk=chunk,
            checkpoints=checkpoints,
        )
    except ValueError as error:
        raise SettingError(("cache", "budget"), f"is {budget!r}: {error}") from error
    _check_room_for_trials(memory, budget)
    return memory


def _check_boundary(
    specs: Sequence[GroupSpec], layers: Sequence[Layer], chunk: int, page_size: int, max_model_len: int
) -> None:
    """Raises SettingError where rows are to be packed on their way, and none ever gets a packed page."""
    boundary = max(spec.since for spec in specs)
    if boundary and boundary + page_size > max_model_len:
        start = max(s.quantization.start for layer in layers if isinstance(s := layer.shape, DelayedShape))
        sentence = (
            f"is {start} ({boundary} in whole chunks of {chunk}); "
            f"rows have at most {max_model_len} positions, so none would be packed"
        )
        raise SettingError(("cache", "quantization", "start"), sentence)


def _check_room_for_trials(memory: MemoryPlan, budget: str | int | float) -> None:
    """Raises SettingError where the pages do not hold the rows of the self-test."""
    lengths = [length + TRIAL_STEPS for length in trial_lengths(memory)]
    for group in memory.groups:
        if group.num_promised < sum(group.spec.pages_for(length, memory.chunk) for length in lengths):
            rows = ", ".join(map(str, lengths))
            sentence = f"is {budget!r}: it has no room for the self-test, whose rows have {rows} positions"
            raise SettingError(("cache", "budget"), sentence)


def trial_lengths(memory: MemoryPlan) -> tuple[int, ...]:
    """Prompt lengths of the self-test: three unequal ones, or as many as there may be rows.

    One crosses pages, a window where there is a short one, and the boundary where rows are packed on their
    way; one has half a page; one a single token, which needs no prefill.
    """
    size = _trial_page(memory)
    windows = [g.spec.window for g in memory.groups if g.spec.window is not None]
    longest = min(memory.max_model_len - TRIAL_STEPS - 1, 3 * size, *(w + size // 2 for w in windows))
    if memory.boundary:
        longest = memory.boundary + size // 2
    return (max(2, longest), max(1, size // 2 + 1), 1)[: memory.max_rows]


def trial_chunk(memory: MemoryPlan) -> int:
    """Tokens of the self-test's chunks: of its prompts, two share a forward, and one goes on behind pages.

    A page, but for rows that are packed on their way, whose prompts are longer than a chunk anyway.
    """
    return memory.chunk if memory.boundary else min(memory.chunk, _trial_page(memory))


def _trial_page(memory: MemoryPlan) -> int:
    return next((g.spec.page_size for g in memory.groups if not g.spec.state_bytes), _STATE_ONLY)
