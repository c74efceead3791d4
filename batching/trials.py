"""Which attention variants are right: each is tried on the loaded model, and the kernel by itself, too."""

import logging
from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from mlxd.batching import chunk_check, kernel_check
from mlxd.batching.attention import Kernel
from mlxd.batching.attention_kernel import is_supported
from mlxd.batching.errors import ModelError
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.model import LoadedModel
from mlxd.batching.runner import Progress
from mlxd.batching.selftest import Work, fault_in, oracle_logprobs, prompts
from mlxd.batching.tuning import cannot_be_packed
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


def variants_to_try(
    attention: Attention, layers: Sequence[Layer], page_size: int, quantization: Quantization | None
) -> list[tuple[str, ...]]:
    """Attention variants, as the configuration wants them; those after the first tuple only where none before
    them is right.
    """
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


def right_variants(
    runner: MlxRunner,
    loaded: LoadedModel,
    memory: MemoryPlan,
    names: Sequence[tuple[str, ...]],
    quantization: Quantization | None,
    progress: Progress,
) -> list[str]:
    """Those of the first tuple of `names` that has any.

    Where no variant is right for rows together, the runner is narrowed to one row. Graphs are not compiled
    meanwhile, nor afterwards until somebody enables them.

    Raises:
        ModelError: no variant is right even for a row alone.
        SettingError: and keys and values are packed.
    """
    runner.step.enabled = False
    ragged = prompts(memory, loaded.vocab_size)
    alone = tuple(name for some in names for name in some if name not in _LAST_RESORT)
    work = Work(progress, ragged, num_runs=1 + len(alone))
    work(0)
    oracle = []
    for prompt in ragged:  # no comprehension: its frame would hold the model past a stop
        oracle.append(oracle_logprobs(loaded.model, prompt, quantization, memory.boundary, work))
    trials = _Trials(runner, memory, ragged, oracle, quantization, work)
    for some in names:
        if right := trials.right_of(some, len(ragged)):
            return right
    if len(ragged) > 1:
        runner.describe(max_batch=1, batching=f"one row at a time: {'; '.join(trials.faults)}")
        trials.faults.clear()
        if right := trials.right_of(alone, 1):
            return right
    failure = f"the self-test failed, even for one row alone: {'; '.join(trials.faults)}"
    if quantization is not None:
        raise cannot_be_packed(failure)
    raise ModelError(f"{loaded.path}: {failure}")


class _Trials:
    """Runs the same prompts by one variant after another.

    Attributes:
        faults: what was wrong with each variant that was not right.
    """

    def __init__(
        self,
        runner: MlxRunner,
        memory: MemoryPlan,
        ragged: Sequence[Sequence[int]],
        oracle: Sequence[Sequence[mx.array]],
        quantization: Quantization | None,
        work: Work,
    ) -> None:
        """`oracle`: as for `selftest.fault_in`, of the prompts `ragged`."""
        self.faults: list[str] = []
        self._runner = runner
        self._memory = memory
        self._ragged = ragged
        self._oracle = oracle
        self._quantization = quantization
        self._work = work

    def right_of(self, names: Sequence[str], num_rows: int) -> list[str]:
        """Those that compute the first `num_rows` prompts together as mlx-lm does each alone."""
        right = []
        for name in names:
            self._runner.set_attention(name)
            fault = self._fault(num_rows)
            if fault is None:
                right.append(name)
                continue
            if name == "kernel":
                self._runner.describe(kernel=f"not used: {fault}")
            self._runner.reset()
            self.faults.append(f"{name}: {fault}")
            logger.warning("self-test failed attention=%s rows=%d fault=%s", name, num_rows, fault)
        self._work.finish()
        return right

    def _fault(self, num_rows: int) -> str | None:
        """What is wrong with the runner's variant, in the whole model or, of the kernel, by itself."""
        chosen, quantization = self._runner.attention, self._quantization
        if isinstance(chosen, Kernel) and quantization and quantization.start:
            return "it cannot write rows of both sorts, which are packed on their way"
        oracle, ragged = self._oracle[:num_rows], self._ragged[:num_rows]
        fault = fault_in(self._runner, self._memory, oracle, ragged, self._work, quantization=quantization)
        if fault is None and isinstance(chosen, Kernel):
            self._work(0)
            return kernel_check.fault_in(chosen.cases) or chunk_check.fault_in(chosen.writer.cases)
        return fault
