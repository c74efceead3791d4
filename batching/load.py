"""From a model's name and the settings to a runner that has proved itself."""

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import mlx.core as mx
from msgspec.structs import replace

from mlxd.batching import kernel_check, tuning
from mlxd.batching.attention import Kernel
from mlxd.batching.attention_kernel import is_supported
from mlxd.batching.blas import ensure_blas
from mlxd.batching.errors import ModelError
from mlxd.batching.fingerprint import fingerprint
from mlxd.batching.joined import join_projections
from mlxd.batching.memory import (
    PAGE_SIZES,
    check_attention,
    device_memory_bytes,
    device_name,
    layers_of,
    plan_for,
)
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.model import LoadedModel, blaming_path, load_model, resolve
from mlxd.batching.runner import Progress, RunnerInfo
from mlxd.batching.selftest import Work, fault_in, oracle_logprobs, prompts
from mlxd.batching.tuning import TimeBox
from mlxd.caches.capacity import capacities, cost_of_packing
from mlxd.caches.kinds import Layer
from mlxd.caches.paged import LayerShape
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import MemoryPlan

logger = logging.getLogger(__name__)

Attention = Literal["auto", "in_place", "gathered", "kernel"]

_BUILT_IN = ("in_place", "gathered")
_PACKED_BUILT_IN = ("in_place",)
_LAST_RESORT = ("grouped",)
"""Right for few models, so tried only where none of the others is."""


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
    blas = ensure_blas()
    if blas.warning:
        logger.warning("%s", blas.warning)
    check_attention(attention)
    folder = resolve(model_path, progress)
    with blaming_path(model_path):
        loaded = load_model(folder, progress, max_model_len, name=model_path)
        layers = layers_of(loaded.model, quantization)
    joined = join_projections(loaded.model, loaded.dtype)
    size = PAGE_SIZES[device_name()] if page_size == "auto" else page_size
    progress("tune", 0.0)
    box = TimeBox(warmup_s)
    chunk = prefill_chunk
    if chunk == "auto":
        chunk_s = partial(tuning.native_chunk_s, loaded.model)
        if quantization is not None:
            packed = layers_of(loaded.model, replace(quantization, start=0))
            chunk_s = partial(tuning.packed_chunk_s, loaded.model, packed, size)
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
    info = RunnerInfo(
        model=model_path,
        vocab_size=loaded.vocab_size,
        memory=memory,
        max_batch=max_rows,
        eos_token_ids=loaded.eos_token_ids,
        device=device_name(),
        compiled=compile != "off",
        notes={
            "device": device_name(),
            "blas": blas.name,
            "dtype": str(loaded.dtype).removeprefix("mlx.core."),
            "joined": joined,
        },
        fingerprint=fingerprint(loaded.path),
    )
    runner = MlxRunner(loaded.model, layers, memory, info, trace_bound_s=prefill_ms / 1000)
    runner.describe(signature=runner.signature, page_size=str(size), prefill_chunk=str(memory.chunk))
    trials = _trials(attention, layers, size, quantization)
    right = _self_test(runner, loaded, memory, trials, quantization, progress)
    _tune(runner, memory, right, compile, TimeBox(left_s), progress)
    runner.step.compiled_steps = runner.step.eager_steps = 0  # these count service
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    _tell_capacity(memory, checkpoints)
    return runner


def _trials(
    attention: Attention, layers: Sequence[Layer], page_size: int, quantization: Quantization | None
) -> list[tuple[str, ...]]:
    """Attention variants to try; those after the first only where none before them is right."""
    built_in = _BUILT_IN if quantization is None else _PACKED_BUILT_IN
    last_resort = [_LAST_RESORT] if "gathered" in built_in else []
    if attention == "kernel":
        return [("kernel",), built_in, *last_resort]
    if attention != "auto":
        return [(attention,), *(last_resort if attention == "gathered" else [])]
    shapes = [layer.shape for layer in layers if isinstance(layer.shape, LayerShape)]
    has_kernel = mx.cuda.is_available() and any(
        is_supported(shape.key_dim, shape.value_dim, shape.dtype, page_size, quantization) for shape in shapes
    )
    if has_kernel and not (quantization and quantization.start):
        return [("kernel", *built_in), *last_resort]
    return [built_in, *last_resort]


def _tell_capacity(memory: MemoryPlan, checkpoints: float) -> None:
    found = capacities(memory, checkpoints)
    logger.info("rows at once: %s", ", ".join(map(str, found)))
    if warning := cost_of_packing(found):
        logger.warning("%s", warning)


def _self_test(
    runner: MlxRunner,
    loaded: LoadedModel,
    memory: MemoryPlan,
    trials: list[tuple[str, ...]],
    quantization: Quantization | None,
    progress: Progress,
) -> list[str]:
    """The variants that are right; narrows the runner to one row where none is right for three.

    Raises:
        ModelError: no variant is right even for a row alone.
        SettingError: and keys and values are packed.
    """
    runner.step.enabled = False
    ragged = prompts(memory, loaded.vocab_size)
    alone = tuple(name for names in trials for name in names if name not in _LAST_RESORT)
    work = Work(progress, ragged, num_runs=1 + len(alone))
    work(0)
    oracle = []
    for prompt in ragged:  # no comprehension: its frame would hold the model past a stop
        oracle.append(oracle_logprobs(loaded.model, prompt, quantization, memory.boundary, work))
    faults: list[str] = []
    rounds = [(names, len(ragged)) for names in trials]
    if len(ragged) > 1:
        rounds.append((alone, 1))
    for names, num_rows in rounds:
        if num_rows < len(ragged):
            runner.describe(max_batch=1, batching=f"one row at a time: {'; '.join(faults)}")
            faults.clear()
        right = []
        for name in names:
            runner.set_attention(name)
            fault = _fault_in(runner, memory, oracle[:num_rows], ragged[:num_rows], work, quantization)
            if fault is None:
                right.append(name)
            else:
                if name == "kernel":
                    runner.describe(kernel=f"not used: {fault}")
                runner.reset()
                faults.append(f"{name}: {fault}")
                logger.warning("self-test failed attention=%s rows=%d fault=%s", name, num_rows, fault)
        progress("self-test", 1.0)
        if right:
            return right
    failure = f"the self-test failed, even for one row alone: {'; '.join(faults)}"
    if quantization is not None:
        raise tuning.cannot_be_packed(failure)
    raise ModelError(f"{loaded.path}: {failure}")


def _fault_in(
    runner: MlxRunner,
    memory: MemoryPlan,
    oracle: Sequence[Sequence[mx.array]],
    ragged: Sequence[Sequence[int]],
    tell: Callable[[int], None],
    quantization: Quantization | None,
) -> str | None:
    """What is wrong with the runner's attention variant, in the whole model or, of the kernel, by itself."""
    fault = fault_in(runner, memory, oracle, ragged, tell, quantization=quantization)
    if fault is None and isinstance(runner.attention, Kernel):
        tell(0)
        return kernel_check.fault_in(runner.attention.cases)
    return fault


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
    if compile == "auto":
        times = tuning.choose_compiled(runner, memory, box.part(1 / 2), progress)
        runner.describe(compile=_verdict(runner.step.enabled, times))
    progress("tune", 1.0)
    runner.describe(compiled=runner.step.enabled)
    if runner.step.enabled:
        done, total = tuning.trace_buckets(runner, memory, box, progress)
        runner.describe(traced=f"{done} of {total} buckets")


def _verdict(is_compiled: bool, times: tuple[float, float] | None) -> str:
    chosen = "compiled" if is_compiled else "eager"
    if times is None:
        return f"{chosen}; there was no time to try"
    fast, slow = times
    return f"{chosen} is faster: {fast * 1e3:.1f} ms compiled, {slow * 1e3:.1f} ms eager"


def _table(times: dict[int, dict[str, float]]) -> str:
    """ "1 row: in_place (in_place 4.1 ms, gathered 5.0 ms); ..."""
    parts = []
    for rows, by_name in times.items():
        best = min(by_name, key=lambda name: by_name[name])
        figures = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in by_name.items())
        parts.append(f"{rows} row{'s' if rows > 1 else ''}: {best} ({figures})")
    return "; ".join(parts)
