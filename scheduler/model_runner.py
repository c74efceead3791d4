"""The configured model: its runner, on MLX, and its tokenizer."""

from mlxd.batching.errors import ModelError, OutOfMemoryError
from mlxd.batching.runner import Progress, Runner, ignore_progress
from mlxd.batching.text import Tokenizer
from mlxd.scheduler.config import Config


def load_model_runner(config: Config, progress: Progress) -> Runner:
    """The configured model on MLX. Imports MLX, so that clients and tests need not.

    Raises:
        ModelError: it cannot be served, or memory ran out as it was loaded.
    """
    from mlxd.batching.blas import ensure_blas

    ensure_blas()  # MLX takes the BLAS that is there when it is imported
    from mlxd.batching.allocation import allocating

    try:
        with allocating():
            return _load(config, progress)
    except OutOfMemoryError as error:
        name, budget = config.model.path, config.cache.budget
        raise ModelError(f"{name}: memory ran out as it was loaded, cache.budget {budget}: {error}") from None


def load_model_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of a model that was fetched: there is no progress to tell.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    from mlxd.batching.model import resolve

    return Tokenizer.load(resolve(config.model.path, ignore_progress))


def _load(config: Config, progress: Progress) -> Runner:
    from mlxd.batching.load import load_runner

    return load_runner(
        model_path=config.model.path,
        max_model_len=config.model.max_model_len,
        max_rows=config.scheduler.max_rows,
        prefill_ms=config.scheduler.prefill_ms,
        prefill_chunk=config.scheduler.prefill_chunk,
        budget=config.cache.budget,
        page_size=config.cache.page_size,
        checkpoints=config.cache.checkpoint_share,
        quantization=config.cache.quantization,
        compile=config.decode.compile,
        attention=config.decode.attention,
        warmup_s=config.decode.warmup_s,
        progress=progress,
    )
