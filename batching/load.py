"""From a model's name and the settings to a runner that has proved itself."""

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import mlx.core as mx
from msgspec.structs import replace

from mlxd.batching import tuning
from mlxd.batching.blas import ensure_blas
from mlxd.batching.compile_choice import choose_compiled
from mlxd.batching.device import device_memory_bytes, device_name, keep_compiled
from mlxd.batching.fingerprint import fingerprint
from mlxd.batching.joined import join_projections
from mlxd.batching.memory import AUTO_PAGE_SIZE, check_attention, layers_of, plan_for
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.model import LoadedModel, blaming_path, load_model, resolve
from mlxd.batching.product_choice import choose_products
from mlxd.batching.products import rewrite_products
from mlxd.batching.runner import Progress, RunnerInfo
from mlxd.batching.timing import TimeBox
from mlxd.batching.trials import Attention, right_variants, variants_to_try
from mlxd.caches.capacity import capacities, cost_of_packing
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import MemoryPlan

logger = logging.getLogger(__name__)


@contextmanager
def _nothing_left_on_error() -> Iterator[None]:
    """Where the block raises, free what its frames hold, then this thread's streams.

    A thread that ends with streams of its own may abort the process at exit.
    """
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        gc.collect()
        mx.clear_cache()
        mx.clear_streams()
        raise


@_nothing_left_on_error()
def load_runner(
    *,
    model_path: str,
    max_model_len: int | None,
    max_rows: int,
    prefill_ms: float,
    prefill_chunk: int | Literal["auto"],
    budget: str | int | float,
    page_size: int | Literal["auto"],
    checkpoints: float,
    quantization: Quantization | None,
    compile: Literal["auto", "on", "off"],
    attention: Attention,
    warmup_s: float,
    progress: Progress,
) -> MlxRunner:
    """Load, test, time and warm up; the calling thread owns the runner from then on.

    Args:
        max_model_len: None takes the model's own context.
        budget, page_size, checkpoints, quantization, compile, attention, warmup_s: as in the configuration.
        progress: told of "download", "convert", "load", "self-test", "tune", "trace"; may end the load by an
            error of its own.

    Raises:
        SettingError: the model cannot be loaded or has a cache kind that is not supported, or a setting does
            not fit it or this machine.
        ModelError: it cannot be fetched, or is wrong even one row at a time.
    """
    keep_compiled()
    blas = ensure_blas()
    if blas.warning:
        logger.warning("%s", blas.warning)
    check_attention(attention)
    folder = resolve(model_path, progress)
    with blaming_path(model_path):
        loaded = load_model(folder, progress, max_model_len, name=model_path)
        layers = layers_of(loaded.model, quantization)
    joined = join_projections(loaded.model, loaded.dtype)
    products = rewrite_products(loaded.model, loaded.dtype)
    size = AUTO_PAGE_SIZE if page_size == "auto" else page_size
    progress("tune", 0.0)
    box = TimeBox(warmup_s)
    chunk = prefill_chunk
    if chunk == "auto":
        chunk_s = _chunk_timer(loaded, quantization, size)
        chunk = tuning.choose_chunk(chunk_s, prefill_ms, size, loaded.max_model_len, box, progress)
    left_s = box.left_s
    memory = plan_for(
        layers,
        weights_bytes=loaded.weights_bytes,
        free_bytes=device_memory_bytes() - mx.get_active_memory(),
        budget=budget,
        page_size=size,
        max_rows=max_rows,
        max_model_len=loaded.max_model_len,
        chunk=chunk,
        checkpoints=checkpoints,
    )
    info = _info(model_path, loaded, memory, blas=blas.name, joined=joined, products=products)
    runner = MlxRunner(loaded.model, layers, memory, info, trace_bound_s=prefill_ms / 1000)
    runner.describe(signature=runner.signature, page_size=str(size), prefill_chunk=str(memory.chunk))
    names = variants_to_try(attention, layers, size, quantization)
    right = right_variants(runner, loaded, memory, names, quantization, progress)
    _tune(runner, memory, right, compile, TimeBox(left_s), progress)
    _begin_to_count(runner)
    _tell_capacity(memory, checkpoints)
    return runner


def _chunk_timer(
    loaded: LoadedModel, quantization: Quantization | None, page_size: int
) -> Callable[[int], float]:
    """Seconds of a prompt's first chunk of so many tokens, on caches as rows will have them in the end."""
    if quantization is None:
        return partial(tuning.native_chunk_s, loaded.model)
    packed = layers_of(loaded.model, replace(quantization, start=0))
    return partial(tuning.packed_chunk_s, loaded.model, packed, page_size)


def _info(name: str, loaded: LoadedModel, memory: MemoryPlan, **notes: str) -> RunnerInfo:
    return RunnerInfo(
        model=name,
        vocab_size=loaded.vocab_size,
        memory=memory,
        max_batch=memory.max_rows,
        eos_token_ids=loaded.eos_token_ids,
        device=device_name(),
        compiled=False,
        notes={
            "device": device_name(),
            "dtype": str(loaded.dtype).removeprefix("mlx.core."),
            **notes,
        },
        fingerprint=fingerprint(loaded.path),
    )


def _begin_to_count(runner: MlxRunner) -> None:
    """Steps and peak memory are those of service from here on."""
    runner.step.compiled_steps = runner.step.eager_steps = 0
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()


def _tell_capacity(memory: MemoryPlan, checkpoints: float) -> None:
    found = capacities(memory, checkpoints)
    level = logging.INFO if any(capacity.rows for capacity in found) else logging.WARNING
    logger.log(level, "rows at once: %s", ", ".join(map(str, found)))
    if warning := cost_of_packing(found):
        logger.warning("%s", warning)


def _tune(
    runner: MlxRunner,
    memory: MemoryPlan,
    right: list[str],
    compile: Literal["auto", "on", "off"],
    box: TimeBox,
    progress: Progress,
) -> None:
    """Choose attention and compilation by time, and trace what can be traced in the time that is left."""
    if len(right) == 1 or box.is_over:
        runner.set_attention(right[0])
        runner.describe(attention=right[0] + ("; there was no time to try" if len(right) > 1 else ""))
    else:
        by_rows = tuning.choose_attention(runner, memory, right, box.part(1 / 3), progress)
        runner.describe(attention=_table(by_rows))
    progress("tune", 0.5)
    runner.step.enabled = compile == "on"
    runner.describe(compile=f"{compile}, as configured")
    if compile == "auto":
        times = choose_compiled(runner, memory, box.part(1 / 2), progress)
        chosen = "compiled" if runner.step.enabled else "eager"
        verdict = f"{_table(times)}; eager with three rows to four places" if times else ""
        runner.describe(compile=verdict or f"{chosen}; there was no time to try")
    if by_rows := choose_products(runner, memory, box.part(1 / 3), progress):
        runner.describe(products=f"{runner.info.notes['products']}; {_table(by_rows)}")
    progress("tune", 1.0)
    runner.describe(compiled=runner.step.enabled)
    tuning.plan_prompts(runner, memory, box.part(1 / 3))
    if runner.step.enabled:
        done, total = tuning.trace_buckets(runner, memory, box, progress)
        runner.describe(traced=f"{done} of {total} buckets")


def _table(times: dict[int, dict[str, float]]) -> str:
    """ "1 row: in_place (in_place 4.1 ms, gathered 5.0 ms); ..."""
    parts = []
    for rows, by_name in times.items():
        best = min(by_name, key=lambda name: by_name[name])
        figures = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in by_name.items())
        parts.append(f"{rows} row{'s' if rows > 1 else ''}: {best} ({figures})")
    return "; ".join(parts)
