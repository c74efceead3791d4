"""A runner without a model: deterministic tokens, and every rule of a plan checked."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlxd.batching.fake_memory import fake_memory
from mlxd.batching.fake_pages import FakePages
from mlxd.batching.plan import (
    DecodeEntry,
    PrefillChunk,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from mlxd.batching.plan_rules import PlanError, check_plan
from mlxd.batching.row import Row
from mlxd.batching.runner import RunnerInfo
from mlxd.caches.persistence import PageFormat, PlaneSpec
from mlxd.caches.sizing import MemoryPlan
from mlxd.metrics.stats import RunnerCounters

_MASK = 2**64 - 1
_START = 0x243F6A8885A308D3


def fake_completion(prompt: Sequence[int], seed: int, max_tokens: int, vocab_size: int) -> list[int]:
    """The tokens FakeRunner gives a request that nothing stops."""
    state = _START
    for token in prompt:
        state = _mix(state, token)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(_draw(state, seed, len(output), vocab_size))
        state = _mix(state, output[-1])
    return output


def _mix(state: int, value: int) -> int:
    state = ((state ^ value) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    return (state ^ (state >> 29)) or 1


def _draw(state: int, seed: int, index: int, vocab_size: int) -> int:
    return _mix(_mix(state, seed), index) % vocab_size


@dataclass(slots=True)
class _RowState:
    """`history[p]`: hash of tokens 0..p, which stands for the keys and values of position p; never 0."""

    history: list[int] = field(default_factory=list)
    drawn: int | None = None

    def append(self, token: int) -> None:
        self.history.append(_mix(self.history[-1] if self.history else _START, token))


class FakeRunner:
    """Gives each row tokens that depend on its own tokens and seed alone, so never on its siblings.

    Its pages hold hashes: a page that was mixed up, not scrubbed, given to another row too early, never
    written or written twice shows as a PlanError, not as a wrong token.

    Args:
        memory: pools and chunk size; None: `fake_memory()`.
        checks: look at the plan and the pages; off for measuring the scheduler.
        decode_s, prefill_s_per_token: what results report, and what `sleep` is called with.
        sleep: waits for a step's simulated time; None does not wait.
        decode_fault, prefill_fault: give an error code to end that row alone.
        fail_at_step: this launch raises RuntimeError.
        hang_at_step: waiting for this step sets `hangs` and blocks until `resume` is set.
    """

    def __init__(
        self,
        memory: MemoryPlan | None = None,
        *,
        vocab_size: int = 1000,
        max_batch: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        checks: bool = True,
        decode_s: float = 0.0,
        prefill_s_per_token: float = 0.0,
        sleep: Callable[[float], None] | None = None,
        decode_fault: Callable[[DecodeEntry], str | None] | None = None,
        prefill_fault: Callable[[PrefillChunk], str | None] | None = None,
        fail_at_step: int | None = None,
        hang_at_step: int | None = None,
    ) -> None:
        memory = memory or fake_memory()
        self.info = RunnerInfo(
            model="fake",
            vocab_size=vocab_size,
            memory=memory,
            max_batch=max_batch or memory.max_rows,
            eos_token_ids=eos_token_ids,
            device="none",
            compiled=False,
            notes={"runner": "fake"},
            fingerprint="fake",
        )
        self.resume = threading.Event()
        self.hangs = threading.Event()
        self.closed = False
        self._checks = checks
        self._decode_s = decode_s
        self._prefill_s_per_token = prefill_s_per_token
        self._sleep = sleep
        self._decode_fault = decode_fault
        self._prefill_fault = prefill_fault
        self._fail_at_step = fail_at_step
        self._hang_at_step = hang_at_step
        self._rows: dict[int, _RowState] = {}
        self._pages = FakePages(len(memory.groups), checks=checks)
        self._unwaited: list[int] = []
        self._num_steps = 0

    def reset(self) -> None:
        self._rows.clear()
        self._pages.clear()
        self._unwaited.clear()

    def launch(self, plan: StepPlan) -> "FakePendingStep":
        if self.closed:
            raise PlanError("launch after close")
        if len(self._unwaited) > 1:
            raise PlanError(f"step {plan.step_id} launched with steps {self._unwaited} not read")
        if plan.step_id == self._fail_at_step:
            raise RuntimeError(f"step {plan.step_id} fails as asked")
        if self._checks:
            check_plan(plan)
        self._pages.prepare(plan)
        for row_id in plan.left:
            if self._rows.pop(row_id, None) is None:
                raise PlanError(f"step {plan.step_id}: row {row_id} left and was in no step")
        rows = tuple(self._decode(entry) for entry in plan.decode)
        faults = {chunk.row.row_id: fault for chunk in plan.prefill if (fault := self._prefill(chunk))}
        self._unwaited.append(plan.step_id)
        self._num_steps += 1
        decode_s = self._decode_s if plan.decode else 0.0
        prefill_s = self._prefill_s_per_token * plan.num_prefill_tokens
        return FakePendingStep(plan, StepResult(rows, faults, decode_s, prefill_s), self._wait)

    def _wait(self, plan: StepPlan, result: StepResult) -> StepResult:
        if not self._unwaited or self._unwaited.pop(0) != plan.step_id:
            raise PlanError(f"step {plan.step_id} read out of order")
        if plan.step_id == self._hang_at_step:
            self.hangs.set()
            self.resume.wait()
        if self._sleep is not None:
            self._sleep(result.decode_s + result.prefill_s)
        return result

    def _decode(self, entry: DecodeEntry) -> RowResult:
        row = entry.row
        state = self._state(row)
        if (entry.token is None) != (state.drawn is not None):
            raise PlanError(f"row {row.row_id}: token {entry.token} given, {state.drawn} on the device")
        token = entry.token if entry.token is not None else state.drawn
        assert token is not None
        self._write(row, state, entry.position, (token,))
        state.drawn = _draw(state.history[-1], row.seed, entry.output_index, self.info.vocab_size)
        fault = self._decode_fault(entry) if self._decode_fault else None
        num_top = row.sampling.top_logprobs
        logprobs = None
        if num_top is not None:
            top = tuple(((state.drawn + i) % self.info.vocab_size, -1.0 - i) for i in range(num_top))
            logprobs = TokenLogprobs(-1.0, top)
        return RowResult(row.row_id, state.drawn, logprobs, fault)

    def _prefill(self, chunk: PrefillChunk) -> str | None:
        state = self._state(chunk.row)
        if state.drawn is not None:
            raise PlanError(f"row {chunk.row.row_id}: a chunk after a decode step")
        self._write(chunk.row, state, chunk.start, chunk.tokens)
        return self._prefill_fault(chunk) if self._prefill_fault else None

    def _state(self, row: Row) -> _RowState:
        """A row met for the first time is as if it had computed the positions that it reuses."""
        state = self._rows.get(row.row_id)
        if state is None:
            state = self._rows[row.row_id] = _RowState()
            for token in [*row.prompt, *row.output][: row.num_reused]:
                state.append(token)
        return state

    def _write(self, row: Row, state: _RowState, start: int, tokens: Sequence[int]) -> None:
        """Append positions to the row's history and pages; check what its attention would read."""
        if start != len(state.history):
            raise PlanError(f"row {row.row_id}: position {start} after {len(state.history)}")
        for token in tokens:
            state.append(token)
        self._pages.write(row, state.history, start)

    def maintain(self) -> bool:
        return False

    @property
    def page_formats(self) -> tuple[PageFormat, ...]:
        memory = self.info.memory
        return tuple(
            PageFormat("fake", "fake", memory.page_size, spec.since, (PlaneSpec(spec.name, "U64", shape),))
            for spec in (group.spec for group in memory.groups)
            for shape in [(1,) if spec.state_bytes else (spec.page_size,)]
        )

    def export_pages(self, pages: Sequence[tuple[int, int]]) -> list[bytes]:
        """Hashes of the pages' positions, or of a state's last."""
        return self._pages.export(pages)

    def counters(self) -> RunnerCounters:
        return RunnerCounters(eager_steps=self._num_steps)

    def close(self) -> None:
        self.closed = True


class FakePendingStep:
    def __init__(
        self, plan: StepPlan, result: StepResult, wait: Callable[[StepPlan, StepResult], StepResult]
    ) -> None:
        self.plan = plan
        self._result = result
        self._wait = wait

    def wait(self) -> StepResult:
        return self._wait(self.plan, self._result)
