"""A tiny model under one way of storing keys and values, and what must hold of it however it is run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from scheduling import World, make_config, submission
from tiny_zoo import VOCAB

from mlxd.batching.driver import Driver
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.plan import RowResult
from mlxd.batching.runner import RunnerInfo
from mlxd.batching.sampling_params import SamplingParams
from mlxd.batching.selftest import oracle_logprobs
from mlxd.caches.kinds import Layer, group_specs, packed_layers
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import MemoryPlan, plan_memory
from mlxd.scheduler.events import Finished, Tokens

TOLERANCE = 1e-4
PAGE = 8
CHUNK = 2 * PAGE

_OF_ROUNDING = 0.2
"""Largest difference from mlx-lm packed alike, as a part of what packing costs mlx-lm: a last bit may move a
number by a whole code, yet rows that are not packed at all must stand out.
"""
_STEPS = 3
_MAX_ROWS = 4
_WATCHED = SamplingParams(temperature=0.0, top_logprobs=20)
PROMPTS = [
    [(11 * (i + 1) * (j + 3)) % VOCAB for j in range(n)] for i, n in enumerate((38, CHUNK - 1, 1, CHUNK + 2))
]
"""Several pages, windows and chunks, and an answer that fills a page; one that reaches a chunk's end, where
rows may be packed, while it decodes; a single token, which needs no prefill; one whose
last chunk is a single token.
"""
_NEXT_TURN = [5, 3, 2, 1, 4]

Results = list[RowResult]


@dataclass(frozen=True, slots=True)
class Reuse:
    """What came of prompts whose beginning was served before.

    Attributes:
        why_not: of the scheduler, where it reuses nothing; else empty.
        found: positions that were not computed and positions of the prompt, for each prompt.
        is_same: tokens and log-probabilities are those of a cold run.
    """

    why_not: str
    found: tuple[tuple[int, int], ...]
    is_same: bool


class Bench:
    """A tiny model with a runner for three rows.

    Attributes:
        oracle: log-probabilities [VOCAB] of mlx-lm, whose caches round alike, by prompt and step.
        limits: how far from them each row may be.

    Raises:
        UnsupportedCacheError: its keys and values cannot be packed.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], quantization: Quantization | None = None
    ) -> None:
        self.model = model
        if quantization is not None:
            layers = packed_layers(layers, quantization)
        self.memory: MemoryPlan = plan_memory(
            group_specs(layers, PAGE, CHUNK),
            budget_bytes=2**22,
            weights_bytes=0,
            max_rows=_MAX_ROWS,
            max_model_len=128,
            chunk=CHUNK,
        )
        info = RunnerInfo("tiny", VOCAB, self.memory, _MAX_ROWS, frozenset(), "cpu", True)
        self.runner = MlxRunner(model, layers, self.memory, info)
        self.runner.step.enabled = False
        self.oracle = [oracle_logprobs(model, p, quantization, self.memory.boundary) for p in PROMPTS]
        self.limits = [TOLERANCE] * len(PROMPTS)
        if quantization is not None:
            dense = [oracle_logprobs(model, prompt) for prompt in PROMPTS]
            errors = [_rounding_error(*pair) for pair in zip(self.oracle, dense, strict=True)]
            self.limits = [max(TOLERANCE, _OF_ROUNDING * error) for error in errors]

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Results]:
        """Results of each row."""
        self.runner.reset()
        driver = Driver(self.runner, self.memory)
        for prompt in prompts:
            driver.join(prompt, _WATCHED)
        driver.prefill()
        steps = [driver.decode() for _ in range(_STEPS)]
        return [list(results) for results in zip(*steps, strict=True)]

    def fault(self, rows: Sequence[int]) -> str | None:
        """What is wrong when these prompts run together, compared with mlx-lm's own caches; or None."""
        try:
            found = self.generate([PROMPTS[row] for row in rows])
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        pairs = zip(rows, found, strict=True)
        worst = max(_difference(results, self.oracle[row]) - self.limits[row] for row, results in pairs)
        return None if worst <= 0 else "log-probabilities differ"

    def resumed(self, prompts: Sequence[Sequence[int]]) -> list[Results]:
        """As `generate`, but the first row leaves after one step and comes back after the next."""
        self.runner.reset()
        driver = Driver(self.runner, self.memory)
        rows = [driver.join(prompt, _WATCHED) for prompt in prompts]
        driver.prefill()
        found = [[result] for result in driver.decode()]
        driver.leave(rows[0])
        siblings = driver.decode() if driver.rows else ()
        driver.join([*prompts[0], *rows[0].output], _WATCHED)
        driver.prefill()
        *others, back = driver.decode()
        found[0].append(back)
        for results, first, second in zip(found[1:], siblings, others, strict=True):
            results += [first, second]
        return found

    def compiled(self, prompts: Sequence[Sequence[int]]) -> list[Results] | None:
        """As `generate`, by compiled steps; None where the model cannot be traced."""
        self.runner.step.enabled = True
        try:
            found = self.generate(prompts)
        finally:
            self.runner.step.enabled = False
        return None if self.runner.counters().graph_failures else found

    def reuse(self) -> Reuse:
        """Serve the first of PROMPTS; then the same again, and as a chat that goes on from the answer."""
        self.runner.reset()
        warm, prompt = World(make_config(), self.runner), PROMPTS[0]
        answer = [result.token for result in _serve(warm, "first", prompt)]
        prompts = [list(prompt), [*prompt, *answer, *_NEXT_TURN]]
        found = [_serve(warm, str(turn), prompt) for turn, prompt in enumerate(prompts)]
        cached = [event.usage.cached_tokens for event in warm.events if isinstance(event, Finished)][1:]
        why_not = warm.scheduler.space.prefix_note.removeprefix("off: ")
        expected = list(self._cold(prompts))
        hits = tuple(zip(cached, map(len, prompts), strict=True))
        return Reuse(
            "" if why_not == "on" else why_not, hits, are_same(found, expected, [self.limits[0]] * len(found))
        )

    def _cold(self, prompts: Sequence[Sequence[int]]) -> Iterator[Results]:
        for prompt in prompts:
            self.runner.reset()
            yield _serve(World(make_config(), self.runner), "cold", prompt)


def _serve(world: World, request_id: str, prompt: Sequence[int]) -> Results:
    """Run it alone to its end, by a scheduler."""
    world.submit(submission(request_id, prompt, max_tokens=_STEPS, temperature=0.0, top_logprobs=20))
    world.run()
    events = [e for e in world.events if isinstance(e, Tokens) and e.key.request_id == request_id]
    return [RowResult(0, *event.token_ids, *event.logprobs) for event in events]


def _rounding_error(rounded: Sequence[mx.array], dense: Sequence[mx.array]) -> float:
    """What packing costs mlx-lm itself in a log-probability."""
    worst = 0.0
    for packed, exact in zip(rounded, dense, strict=True):
        worst = max(worst, float(mx.abs(packed - exact).max()))
        if int(mx.argmax(packed)) != int(mx.argmax(exact)):
            break  # from here on they read different tokens
    return worst


def _difference(results: Results, expected: Sequence[mx.array]) -> float:
    """Largest difference of a log-probability; infinite where a row failed or drew another token."""
    worst = 0.0
    for result, logprobs in zip(results, expected, strict=True):
        if result.logprobs is None or result.token != int(mx.argmax(logprobs)):
            return float("inf")
        worst = max(worst, *(abs(float(logprobs[token]) - value) for token, value in result.logprobs.top))
    return worst


def are_same(found: Sequence[Results], expected: Sequence[Results], limits: Sequence[float]) -> bool:
    """Whether tokens are equal and each row's log-probabilities within its limit, as far as both go."""
    rows = zip(found, expected, limits, strict=True)
    return all(
        _is_same(*pair, limit) for ours, theirs, limit in rows for pair in zip(ours, theirs, strict=False)
    )


def _is_same(result: RowResult, other: RowResult, limit: float) -> bool:
    if result.logprobs is None or other.logprobs is None or result.token != other.token:
        return False
    values = dict(other.logprobs.top)
    return all(abs(values.get(token, value) - value) <= limit for token, value in result.logprobs.top)
