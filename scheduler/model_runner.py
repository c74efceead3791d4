"""The configured model, on MLX."""

from mlxd.batching.runner import Progress, Runner
from mlxd.scheduler.config import Config


def load_model_runner(config: Config, progress: Progress) -> Runner:
    """The configured model on MLX. Imports MLX, so that clients and tests need not."""
    from mlxd.batching.blas import ensure_blas

    ensure_blas()  # MLX takes the BLAS that is there when it is imported
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
