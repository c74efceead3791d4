"""What holds for any trace, at every step: see trace_properties."""

import pytest
from random_traces import random_trace
from trace_properties import (
    HERE,
    Judge,
    check_anything_goes,
    check_fairness,
    check_order,
    run,
    throughput_ratio,
)

from mlxd.batching.plan import StepPlan
from mlxd.scheduler.simulation import Simulation

NUM_DEFAULT, NUM_ALL, BLOCK = 100, 10_000, 50

default_blocks = pytest.mark.parametrize("first", range(0, NUM_DEFAULT, BLOCK))
all_blocks = pytest.mark.parametrize("first", range(NUM_DEFAULT, NUM_ALL, BLOCK))


@default_blocks
def test_no_row_is_idle_beside_admissible_work_and_no_cap_is_exceeded(first: int) -> None:
    for seed in range(first, first + BLOCK):
        check_anything_goes(seed)


@default_blocks
def test_the_gap_between_competing_tenants_stays_within_the_bound(first: int) -> None:
    for seed in range(first, first + BLOCK):
        check_fairness(seed)


@pytest.mark.parametrize("seed", [2155, 2713, 3859, 7431])
def test_whoever_comes_while_nobody_competes_gains_nothing_by_it(seed: int) -> None:
    """Others had just entered with long prompts, and had no queue then, or all of the memory."""
    check_fairness(seed)
    check_fairness(seed, pauses=True)


@default_blocks
def test_all_of_it_holds_with_clients_that_stop_reading_and_go_on(first: int) -> None:
    for seed in range(first, first + BLOCK):
        check_anything_goes(seed, pauses=True)
        check_fairness(seed, pauses=True)


@default_blocks
def test_who_is_next_is_so_by_the_plain_rule(first: int) -> None:
    for seed in range(first, first + BLOCK):
        check_order(seed)


def test_fair_serves_as_many_requests_in_a_time_as_fcfs() -> None:
    """Whose request is the last one is chance, and a long one runs alone: short traces differ by it."""
    ratios = [throughput_ratio(seed) for seed in range(12)]
    assert min(ratios) >= 0.95
    assert sum(ratios) / len(ratios) >= 0.99


@pytest.mark.parametrize("seed", range(10))
def test_the_same_trace_gives_the_same_schedule(seed: int) -> None:
    first, second = (run(random_trace(seed)) for _ in range(2))
    assert first[1].plans == second[1].plans
    assert first[0] == second[0]


@pytest.mark.parametrize("seed", range(10))
def test_a_reload_that_changes_nothing_changes_nothing(seed: int) -> None:
    """Promises and held tokens are counted anew, with rows running, preempted and in flight."""
    trace = random_trace(seed)
    judge = Judge(trace)

    def reload(simulation: Simulation, plan: StepPlan | None) -> None:
        judge(simulation, plan)
        assert not simulation.scheduler.set_tenants(trace.tenants, simulation.now)

    simulation = Simulation(trace, trace.arrivals(HERE), reload)
    simulation.run()
    assert judge.plans == run(trace)[1].plans
    assert all(tenant.bucket is None or tenant.bucket.held == 0 for tenant in simulation.scheduler.book)


@pytest.mark.slow
@all_blocks
def test_ten_thousand_traces_hold(first: int) -> None:
    for seed in range(first, first + BLOCK):
        for pauses in (False, True):
            check_anything_goes(seed, pauses=pauses)
            check_fairness(seed, pauses=pauses)
        check_order(seed)


@pytest.mark.slow
def test_fair_keeps_the_throughput_of_fcfs_over_five_hundred_traces() -> None:
    ratios = sorted(throughput_ratio(seed) for seed in range(12, 512))
    assert sum(ratios) / len(ratios) >= 0.99
    assert sum(ratio < 0.95 for ratio in ratios) <= 5
