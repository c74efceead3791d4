"""Drives rows through a runner without a scheduler: for the self-test, benchmarks and tests."""

from collections.abc import Sequence

from mlxd.batching.plan import DecodeEntry, PrefillChunk, RowResult, StepPlan
from mlxd.batching.row import Row
from mlxd.batching.runner import PendingStep, Runner
from mlxd.batching.sampling_params import GREEDY, SamplingParams
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import page_tables
from mlxd.caches.sizing import MemoryPlan


class Driver:
    """Rows that join, step and leave at the caller's word; a step is waited for before it returns.

    With `pipelined` a step is launched before the one before it is read, as the engine does.
    """

    def __init__(
        self, runner: Runner, memory: MemoryPlan, *, pipelined: bool = False, chunk: int | None = None
    ) -> None:
        """`chunk`: tokens of a prompt's chunks where they are shorter than the plan's; whole pages."""
        self._runner = runner
        self._memory = memory
        self._chunk = memory.chunk if chunk is None else chunk
        self.pools = [PagePool(group.num_pages) for group in memory.groups]
        self.rows: list[Row] = []
        self._pipelined = pipelined
        self._computed: dict[int, int] = {}
        self._drawn: dict[int, int] = {}
        self._pending: PendingStep | None = None
        self._steps = 0
        self._ids = 0

    def join(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY, seed: int = 0) -> Row:
        """Add a row; `prefill` computes its prompt, `decode` its tokens."""
        self._ids += 1
        tables = page_tables([group.spec for group in self._memory.groups], self.pools)
        row = Row(self._ids, sampling, seed, tuple(prompt), [], tables)
        self.rows.append(row)
        self._computed[row.row_id] = 0
        self._drawn[row.row_id] = 0
        return row

    def leave(self, row: Row) -> None:
        """Take the row out and its pages back, at any step."""
        self.rows.remove(row)
        for table in row.tables:
            table.clear()

    def clean(self) -> None:
        """Zero the pages of all rows that left: the runner is as it was before they came."""
        for pool in self.pools:
            pool.scrub_dirty()
        self._launch(StepPlan(self._next_step(), scrub=self._scrub())).wait()

    def prefill(self, rows: Sequence[Row] | None = None) -> None:
        """Compute all but the last prompt position of these rows (all by default), a chunk of each a step."""
        while self.prefill_step(rows):
            pass

    def prefill_step(self, rows: Sequence[Row] | None = None) -> int:
        """Compute the next chunk of each of these rows; how many positions that was, 0: none is left."""
        rows = self.rows if rows is None else rows
        chunks = tuple(chunk for row in rows if (chunk := self._next_chunk(row)) is not None)
        if chunks:
            self._finish(self._launch(StepPlan(self._next_step(), prefill=chunks, scrub=self._scrub())))
        return sum(chunk.num_tokens for chunk in chunks)

    def decode(self) -> tuple[RowResult, ...]:
        """One step over all rows that are prefilled; appends the tokens to their outputs.

        Returns:
            The results read: of this step, or of the one before it when pipelined (none at first).
        """
        entries = tuple(self._entry(row) for row in self.rows if not self._is_short(row))
        pending = self._launch(StepPlan(self._next_step(), decode=entries, scrub=self._scrub()))
        if not self._pipelined:
            return self._finish(pending)
        before, self._pending = self._pending, pending
        return self._finish(before) if before is not None else ()

    def flush(self) -> tuple[RowResult, ...]:
        """Read the step still in flight."""
        before, self._pending = self._pending, None
        return self._finish(before) if before is not None else ()

    def _is_short(self, row: Row) -> bool:
        return self._drawn[row.row_id] == 0 and self._computed[row.row_id] < len(row.prompt) - 1

    def _next_chunk(self, row: Row) -> PrefillChunk | None:
        start, last = self._computed[row.row_id], len(row.prompt) - 1
        if self._drawn[row.row_id] or start >= last:
            return None
        end = min(last, start + self._chunk)
        self._grow(row, start, end)
        self._computed[row.row_id] = end
        return PrefillChunk(row, start, end, tuple(row.prompt[start:end]))

    def _entry(self, row: Row) -> DecodeEntry:
        index = self._drawn[row.row_id]
        position = self._computed[row.row_id]
        self._grow(row, position, position + 1)
        self._computed[row.row_id] += 1
        self._drawn[row.row_id] += 1
        return DecodeEntry(row, position, index, row.prompt[-1] if index == 0 else None)

    def _grow(self, row: Row, start: int, end: int) -> None:
        for table in row.tables:
            table.release_before(start)
            table.grow(end)

    def _scrub(self) -> tuple[tuple[int, ...], ...]:
        return tuple(pool.take_scrub() for pool in self.pools)

    def _next_step(self) -> int:
        self._steps += 1
        return self._steps

    def _launch(self, plan: StepPlan) -> PendingStep:
        return self._runner.launch(plan)

    def _finish(self, pending: PendingStep) -> tuple[RowResult, ...]:
        results = pending.wait().rows
        for entry, result in zip(pending.plan.decode, results, strict=True):
            entry.row.output.append(result.token)
        return results
