"""How many rows run at once, and how many would if none were packed on its way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxd.caches.sizing import MemoryPlan, plan_memory


@dataclass(frozen=True, slots=True)
class Capacity:
    """`rows` of `num_tokens` positions run at once; `dense`: if rows stayed dense, None where they do."""

    num_tokens: int
    rows: int
    dense: int | None = None

    def __str__(self) -> str:
        tail = "" if self.dense is None else f" (dense {self.dense})"
        return f"{self.rows} of {self.num_tokens} positions{tail}"

    @property
    def is_less(self) -> bool:
        """Whether packing on the way costs rows of this length."""
        return self.dense is not None and self.rows < self.dense


def capacities(plan: MemoryPlan, checkpoints: float) -> tuple[Capacity, ...]:
    """For rows of full length and, where rows are packed on their way, for those that just reach that place.

    Args:
        checkpoints: share of the budget that the plan was made with.
    """
    if not plan.boundary:
        return (Capacity(plan.max_model_len, rows_at_once(plan, plan.max_model_len)),)
    dense = _dense_plan(plan, checkpoints)
    lengths = (plan.max_model_len, plan.boundary)
    return tuple(Capacity(n, rows_at_once(plan, n), rows_at_once(dense, n)) for n in lengths)


def cost_of_packing(found: Sequence[Capacity]) -> str | None:
    """A warning where rows that are packed on their way are fewer than dense ones would be."""
    less = ", ".join(str(capacity) for capacity in found if capacity.is_less)
    return f"packing on the way serves fewer rows at once than no packing: {less}" if less else None


def rows_at_once(plan: MemoryPlan, num_tokens: int) -> int:
    """Rows that may grow to `num_tokens` together without overcommit."""
    needs = [(group.num_promised, group.spec.pages_for(num_tokens, plan.chunk)) for group in plan.groups]
    return min(plan.max_rows, *(promised // pages for promised, pages in needs if pages))


def _dense_plan(plan: MemoryPlan, checkpoints: float) -> MemoryPlan:
    """That of the same budget with all of a row's positions in the groups that it begins in."""
    specs = tuple(
        replace(group.spec, until=None, successor=None) for group in plan.groups if not group.spec.since
    )
    return plan_memory(
        specs,
        budget_bytes=plan.budget_bytes,
        weights_bytes=plan.weights_bytes,
        max_rows=plan.max_rows,
        max_model_len=plan.max_model_len,
        chunk=plan.chunk,
        checkpoints=checkpoints,
    )
