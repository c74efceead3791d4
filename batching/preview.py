"""[M] What the daemon would hold, told from a model's files alone: no weight is read."""

from typing import Literal

from mlxd.batching.device import device_memory_bytes
from mlxd.batching.memory import AUTO_PAGE_SIZE, check_attention, layers_of, plan_for
from mlxd.batching.model import blaming_path, open_model, resolve
from mlxd.batching.runner import Progress
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import MemoryPlan

ASSUMED_CHUNK = 256
"""Tokens a prefill chunk is taken to have where the daemon would measure it at start."""


def preview_plan(
    *,
    model_path: str,
    max_model_len: int | None,
    max_rows: int,
    prefill_chunk: int | Literal["auto"],
    budget: str | int | float,
    page_size: int | Literal["auto"],
    checkpoints: float,
    quantization: Quantization | None,
    attention: str,
    progress: Progress,
) -> MemoryPlan:
    """The memory plan of these settings, as in the configuration.

    Args:
        progress: told of "download" and "convert" where the model has to be fetched.
    Raises:
        SettingError: the model cannot be opened or batched, or a setting does not fit it or this machine.
        ModelError: it cannot be fetched.
    """
    check_attention(attention)
    folder = resolve(model_path, progress)
    with blaming_path(model_path):
        loaded = open_model(folder, max_model_len, name=model_path)
        layers = layers_of(loaded.model, quantization)
    chunk = ASSUMED_CHUNK if prefill_chunk == "auto" else prefill_chunk
    return plan_for(
        layers,
        weights_bytes=loaded.weights_bytes,
        free_bytes=device_memory_bytes() - loaded.weights_bytes,
        budget=budget,
        page_size=AUTO_PAGE_SIZE if page_size == "auto" else page_size,
        max_rows=max_rows,
        max_model_len=loaded.max_model_len,
        chunk=chunk,
        checkpoints=checkpoints,
    )
