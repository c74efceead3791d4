"""How long a machine takes for a step: plans in, results out, and nothing computed."""

from typing import Annotated

import msgspec
from msgspec import Meta

from mlxd.batching.plan import RowResult, StepPlan, StepResult

Milliseconds = Annotated[float, Meta(ge=0, le=3_600_000)]


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds, linear in rows and tokens. The defaults fit the CPU machine of docs/performance.md.

    `decode_ms`: of a decode step, and for each of its rows and each thousand positions that these attend to.
    """

    decode_ms: Milliseconds = 22.0
    decode_ms_per_row: Milliseconds = 4.0
    decode_ms_per_1000_positions: Milliseconds = 5.0
    prefill_ms_per_token: Milliseconds = 4.1

    def run(self, plan: StepPlan) -> StepResult:
        """Each row draws token 0, and 1 as the last one of as many as its seed says."""
        rows = tuple(
            RowResult(entry.row.row_id, int(entry.output_index + 1 == entry.row.seed))
            for entry in plan.decode
        )
        positions = sum(entry.position + 1 for entry in plan.decode)
        decode_ms = self.decode_ms + self.decode_ms_per_row * len(rows)
        decode_ms += self.decode_ms_per_1000_positions * positions / 1000
        return StepResult(
            rows,
            decode_s=decode_ms / 1000 if rows else 0.0,
            prefill_s=self.prefill_ms_per_token * plan.num_prefill_tokens / 1000,
        )
