"""One tenant sends a hundred times what another does, and more than the machine can serve."""

from pathlib import Path
from statistics import median

import pytest

from mlxd.batching.plan import StepPlan
from mlxd.scheduler.config import SchedulerConfig, TenantLimits
from mlxd.scheduler.cost_model import CostModel
from mlxd.scheduler.simulation import Record, Simulation
from mlxd.scheduler.trace import Load, Trace

VICTIM, FLOODER = "victim", "flooder"
CPU = CostModel()
GPU = CostModel(
    decode_ms=5.0, decode_ms_per_row=0.1, decode_ms_per_1000_positions=0.1, prefill_ms_per_token=0.1
)


class Rows:
    """How long each row was there."""

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}

    def __call__(self, simulation: Simulation, plan: StepPlan | None) -> None:
        for row_id in simulation.scheduler.batch._running:
            self._seen.setdefault(row_id, []).append(simulation.now)

    @property
    def service_s(self) -> float:
        return median(times[-1] - times[0] for times in self._seen.values())


def flood(
    cost: CostModel,
    lengths: tuple[int, int],
    *,
    policy: str = "fair",
    flooded: bool = True,
    rows: Rows | None = None,
) -> Record:
    """Five minutes; the victim asks every two and a half seconds. `lengths`: tokens of prompt and answer."""
    num_prompt, num_output = lengths
    rates = {VICTIM: 0.4, FLOODER: 40.0}
    trace = Trace(
        version=1,
        tenants=tuple(TenantLimits(name=name, max_waiting=32) for name in rates),
        scheduler=SchedulerConfig(policy=policy, max_rows=8),  # type: ignore[arg-type]
        cost=cost,
        load=tuple(
            Load(
                tenant=name,
                per_s=per_s,
                until_s=300,
                prompt_tokens=(num_prompt, num_prompt),
                output_tokens=(num_output, num_output),
            )
            for name, per_s in rates.items()
            if flooded or name == VICTIM
        ),
    )
    return Simulation(trace, trace.arrivals(Path()), rows).run()


def late(record: Record, tenant: str) -> float:
    """The 99th percentile of its first tokens, in seconds."""
    times = sorted(record.tenants[tenant].first_tokens_s)
    return times[-1 - len(times) // 100]


@pytest.mark.parametrize(
    ("cost", "lengths"),
    [
        pytest.param(CPU, (48, 16), id="short on a CPU"),
        pytest.param(CPU, (16, 48), id="long answers on a CPU"),
        pytest.param(GPU, (500, 100), id="longer on a GPU"),
    ],
)
def test_a_first_token_comes_within_twice_its_time_alone_and_a_rows_service(
    cost: CostModel, lengths: tuple[int, int]
) -> None:
    rows = Rows()
    alone = flood(cost, lengths, flooded=False)
    fair = flood(cost, lengths, rows=rows)
    fcfs = flood(cost, lengths, policy="fcfs")
    assert late(fair, VICTIM) <= 2 * late(alone, VICTIM) + rows.service_s < late(fcfs, VICTIM)
    served = [sum(tenant.generated for tenant in run.tenants.values()) / run.end_s for run in (fair, fcfs)]
    assert served[0] >= 0.95 * served[1]


def test_a_step_holds_no_more_prefill_than_its_time_though_eight_rows_wait_for_theirs() -> None:
    record = flood(CPU, (48, 16))
    decode_s = (CPU.decode_ms + 8 * CPU.decode_ms_per_row + CPU.decode_ms_per_1000_positions) / 1000
    limit_s = SchedulerConfig().prefill_ms / 1000 + decode_s
    late_gaps = sum(gap > limit_s for tenant in record.tenants.values() for gap in tenant.gaps_s)
    assert late_gaps == 0
