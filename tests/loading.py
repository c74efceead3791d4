"""Loading a model folder as the daemon does, with little to wait for."""

from pathlib import Path
from typing import Any

from mlxd.batching.load import load_runner
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.runner import ignore_progress


def load(folder: Path, **changes: Any) -> MlxRunner:
    """`changes`: of what `load_runner` takes."""
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_rows": 4,
        "prefill_ms": 50.0,
        "prefill_chunk": 32,
        "budget": "16MiB",
        "page_size": 16,
        "checkpoints": 0.1,
        "quantization": None,
        "compile": "off",
        "attention": "auto",
        "warmup_s": 0.0,
        "progress": ignore_progress,
    }
    return load_runner(model_path=str(folder), **settings | changes)
