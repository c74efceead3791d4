"""What holds for every plan, whatever came before it."""

from mlxd.batching.plan import StepPlan
from mlxd.batching.row import Row
from mlxd.caches.page_pool import SCRATCH_PAGE


class PlanError(AssertionError):
    """A plan broke a rule of the seam between scheduler and runner."""


def _spans(plan: StepPlan) -> list[tuple[Row, int, int]]:
    """Rows of a step and the positions [start, end) it writes of each."""
    decoded = [(entry.row, entry.position, entry.position + 1) for entry in plan.decode]
    return decoded + [(chunk.row, chunk.start, chunk.end) for chunk in plan.prefill]


def _pages_of(row: Row, group: int, start: int, end: int) -> list[int]:
    """Pages of the row's table that hold positions [start, end)."""
    table = row.tables[group]
    if table.spec.state_bytes:
        return []  # a state belongs to one row, and is written at every position
    size, first = table.spec.page_size, table.first_page
    return table.pages[max(0, start // size - first) : max(0, -(-end // size) - first)]


def check_plan(plan: StepPlan) -> None:
    """Rules that need no history: each row once, chunks that hold their tokens, no shared page written."""
    rows = [entry.row for entry in plan.decode] + [chunk.row for chunk in plan.prefill]
    ids = [row.row_id for row in rows]
    if len(set(ids)) != len(ids):
        raise PlanError(f"step {plan.step_id}: a row is in it twice: {sorted(ids)}")
    if set(ids) & set(plan.left):
        raise PlanError(f"step {plan.step_id}: rows {set(ids) & set(plan.left)} left and are in it")
    for chunk in plan.prefill:
        if not 0 <= chunk.start < chunk.end or len(chunk.tokens) != chunk.num_tokens:
            raise PlanError(
                f"row {chunk.row.row_id}: chunk {chunk.start}..{chunk.end}, {len(chunk.tokens)} tokens"
            )
    for group in range(len(plan.scrub)):
        written = [page for row, start, end in _spans(plan) for page in _pages_of(row, group, start, end)]
        reused = {page for row in rows for page in _pages_of(row, group, 0, row.num_reused)}
        if len(set(written)) != len(written) or SCRATCH_PAGE in written or reused & set(written):
            raise PlanError(
                f"step {plan.step_id}: a page of group {group} that two rows hold, or scratch, is written"
            )
