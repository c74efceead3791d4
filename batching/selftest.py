"""Three ragged rows against one, on the loaded model: what may share a batch is tried, not assumed."""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxd.batching.driver import Driver
from mlxd.batching.memory import TRIAL_STEPS, trial_chunk, trial_lengths
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.plan import RowResult
from mlxd.batching.runner import Progress
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.kinds import native_caches, round_caches, rounded_caches
from mlxd.caches.model_faults import MODEL_FAULTS, summary_of
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import MemoryPlan

_PIECE = 512
"""Positions that the oracle computes at once, so that a long prompt shows as progress."""
_ALMOST = 0.99
"""Only `Work.finish` says that it is done."""
_WATCH = SamplingParams(temperature=0.0, top_logprobs=20, max_tokens=TRIAL_STEPS)
_EXACT = 2e-3
_TF32 = 0.05
_HALF = 0.35
"""Largest log-probability differences taken for rounding, by precision; wrong rows differ by units."""
_CODES = {8: 0.35, 4: 2.5}
"""The same where keys and values are packed, by bits. A last bit that differs may move a number by a whole
code, and later layers by more: two ways of mlx-lm to the same 4 bits were seen to differ by 1.3.
"""


def tolerance(dtype: mx.Dtype, device: mx.DeviceType, quantization: Quantization | None = None) -> float:
    """Largest log-probability difference between two right ways to compute. GPUs multiply float32 in TF32."""
    if quantization is not None:
        return _CODES[quantization.bits]
    if dtype != mx.float32:
        return _HALF
    return _EXACT if device == mx.cpu else _TF32


def _tell_nobody(num_positions: int) -> None:
    pass


class Work:
    """Tells a Progress how far the self-test is: called with the positions computed since the last call."""

    def __init__(self, progress: Progress, ragged: Sequence[Sequence[int]], num_runs: int) -> None:
        """`num_runs`: times that all of these prompts will be computed, the oracle's included."""
        self._progress = progress
        self._total = num_runs * sum(len(prompt) - 1 + TRIAL_STEPS for prompt in ragged)
        self._done = 0

    def __call__(self, num_positions: int) -> None:
        self._done += num_positions
        self._progress("self-test", min(_ALMOST, self._done / self._total))

    def finish(self) -> None:
        """All is done, or as much as had to be."""
        self._progress("self-test", 1.0)


def prompts(memory: MemoryPlan, vocab_size: int) -> list[list[int]]:
    """Prompts of the lengths that `trial_lengths` gives."""
    return [
        [(7919 * (i + 1) * (j + 3)) % vocab_size for j in range(n)]
        for i, n in enumerate(trial_lengths(memory))
    ]


def fault_in(
    runner: MlxRunner,
    memory: MemoryPlan,
    oracle: Sequence[Sequence[mx.array]],
    ragged: Sequence[Sequence[int]],
    tell: Callable[[int], None] = _tell_nobody,
    *,
    quantization: Quantization | None = None,
) -> str | None:
    """What is wrong when these prompts run together, or None.

    Args:
        oracle: per prompt and step, log-probabilities [V] float32 of mlx-lm's own single-row run.
        tell: called between steps with the positions computed since.
        quantization: how the runner packs keys and values, if it does.
    """
    limit = tolerance(runner.dtype, mx.default_device().type, quantization)
    driver = Driver(runner, memory, chunk=trial_chunk(memory))
    rows = [driver.join(prompt, _WATCH) for prompt in ragged]
    try:
        while computed := driver.prefill_step():
            tell(computed)
        steps = []
        for _ in range(TRIAL_STEPS):
            steps.append(driver.decode())
            tell(len(rows))
    except MODEL_FAULTS as error:
        return summary_of(error)
    finally:
        for row in list(driver.rows):
            driver.leave(row)
    driver.clean()
    for index in range(len(rows)):
        for step, results in enumerate(steps):
            worst = _difference(results[index], oracle[index][step])
            if not worst <= limit:
                return f"row {index} of {len(rows)} differs by {worst:.2g} at step {step}"
            if results[index].token != int(mx.argmax(oracle[index][step])):
                break  # a near tie: from here on the rows read different tokens
    return None


def _difference(result: RowResult, expected: mx.array) -> float:
    """Largest difference over the reported tokens; NaN where the row failed."""
    if result.fault is not None or result.logprobs is None:
        return math.nan
    ids = mx.array([token for token, _ in result.logprobs.top])
    seen = mx.array([value for _, value in result.logprobs.top])
    return float(mx.max(mx.abs(expected[ids] - seen)))


def oracle_logprobs(
    model: nn.Module,
    prompt: Sequence[int],
    quantization: Quantization | None = None,
    boundary: int = 0,
    tell: Callable[[int], None] = _tell_nobody,
) -> list[mx.array]:
    """Log-probabilities of the next tokens by mlx-lm's own caches, one row, greedy; [V] float32 a step.

    Args:
        quantization: the precision to which the caches round what they are given.
        boundary: positions they have when they begin to, and round those too.
        tell: called with the positions computed since.
    """
    at_once = quantization is not None and not boundary
    caches = rounded_caches(model, quantization) if quantization and at_once else native_caches(model)
    known, found, position = list(prompt[:-1]), [], 0
    pieces = [
        part[start : start + _PIECE]
        for part in (known[:boundary], known[boundary:])
        for start in range(0, len(part), _PIECE)
    ]
    token = prompt[-1]
    for piece in (*pieces, *([None] * TRIAL_STEPS)):
        tokens = [token] if piece is None else piece
        logits = model(mx.array([tokens]), cache=caches)[0, -1].astype(mx.float32)
        mx.eval([cache.state for cache in caches])
        position += len(tokens)
        tell(len(tokens))
        if quantization is not None and position == boundary:
            round_caches(caches, quantization)
        if piece is None:
            found.append(logits - mx.logsumexp(logits))
            token = int(mx.argmax(logits))
    return found
