"""What holds for any trace, at every step: fairness, no idle row, caps, throughput, the same again."""

from collections import Counter
from math import inf
from pathlib import Path

import pytest
from random_traces import random_trace, with_pauses

from mlxd.batching.plan import StepPlan
from mlxd.scheduler.config import TenantLimits
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.simulation import Record, Simulation
from mlxd.scheduler.tenants import Tenant
from mlxd.scheduler.trace import Trace

HERE = Path(__file__).parent
NUM_DEFAULT, NUM_ALL, BLOCK = 300, 10_000, 50

default_blocks = pytest.mark.parametrize("first", range(0, NUM_DEFAULT, BLOCK))
all_blocks = pytest.mark.parametrize("first", range(NUM_DEFAULT, NUM_ALL, BLOCK))


class Judge:
    """Looks at a simulation after each planning, knowing the trace alone and the state as it is told.

    Attributes:
        plans: rows and positions of every step.
        largest_gap: between the counters of competing tenants.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._limits = {tenant.name: tenant for tenant in trace.tenants}
        self._least_ahead: dict[str, float] = dict.fromkeys(self._limits, inf)
        self._charged: dict[RequestKey, int] = {}
        self._prompts: Counter[str] = Counter()
        self._admissible: set[RequestKey] = set()
        self.plans: list[list[tuple[int, int, int]]] = []
        self.largest_gap = 0.0

    def __call__(self, simulation: Simulation, plan: StepPlan | None) -> None:
        if plan is not None:
            decoded = [(entry.row.row_id, entry.position, -1) for entry in plan.decode]
            self.plans.append([*decoded, *((c.row.row_id, c.start, c.end) for c in plan.prefill)])
        self._check_caps(simulation)
        self._check_no_row_is_idle(simulation, plan)
        simulation.scheduler.space.check_integrity()
        gap = simulation.scheduler.fairness.gap(simulation.competing())
        self.largest_gap = max(self.largest_gap, gap)

    def _check_caps(self, simulation: Simulation) -> None:
        scheduler = simulation.scheduler
        running = Counter(request.tenant for request in scheduler.batch._running.values())
        reserved: Counter[str] = Counter()
        for request in scheduler.batch._running.values():
            reserved[request.tenant] += sum(request.worst_case.pages)
            self._prompts[request.tenant] += request.num_charged - self._charged.get(request.key, 0)
            self._charged[request.key] = request.num_charged
        num_pages = scheduler.space.plan.groups[0].num_pages
        assert sum(running.values()) <= self._trace.scheduler.max_rows
        kept = sum(
            max(0, int(limits.kv_reserve * num_pages) - reserved[name])
            for name, limits in self._limits.items()
        )
        assert sum(reserved.values()) + kept <= num_pages
        for tenant in scheduler.book:
            limits = self._limits[tenant.name]
            assert running[tenant.name] == tenant.num_running <= limits.max_running
            assert reserved[tenant.name] <= limits.kv_share * num_pages
            if limits.max_priority == "batch":
                assert all(request.priority == 2 for lane in tenant.queue.lanes for request in lane)
            self._check_rate(tenant, limits, simulation)

    def _check_rate(self, tenant: Tenant, limits: TenantLimits, simulation: Simulation) -> None:
        """Used tokens less those a steady rate had allowed never rise by more than a minute's worth."""
        if limits.tokens_per_minute is None or tenant.bucket is None:
            return
        now = simulation.now
        assert 0 <= tenant.bucket.held <= tenant.bucket.level_at(now) + 1e-6
        used = self._prompts[tenant.name] + simulation.record.tenants[tenant.name].generated
        ahead = used - limits.tokens_per_minute * now / 60
        self._least_ahead[tenant.name] = min(self._least_ahead[tenant.name], ahead)
        assert ahead - self._least_ahead[tenant.name] <= limits.tokens_per_minute + 1e-6

    def _check_no_row_is_idle(self, simulation: Simulation, plan: StepPlan | None) -> None:
        """Whoever might have entered after the last planning, and still might, was passed over for nothing.

        Within a planning a tenant may come below its `max_prefilling` only after rows were given out.
        """
        before, self._admissible = self._admissible, self._find_admissible(simulation)
        ends = {chunk.row.row_id: chunk.end for chunk in plan.prefill} if plan is not None else {}
        book, running = simulation.scheduler.book, simulation.scheduler.batch._running
        prefilled = Counter(r.tenant for row_id, r in running.items() if ends.get(row_id) == r.prefill_end)
        for key in before & self._admissible:
            num_prefilling = book[key.tenant].num_prefilling + prefilled[key.tenant]
            assert num_prefilling >= self._limits[key.tenant].max_prefilling, "waits beside a free row"

    def _find_admissible(self, simulation: Simulation) -> set[RequestKey]:
        scheduler = simulation.scheduler
        waiting = scheduler._admission.reserving
        if waiting is not None and waiting in scheduler.book[waiting.tenant].queue:
            assert any(
                n > room for n, room in zip(waiting.worst_case.pages, scheduler.space.room, strict=True)
            )
            return set()
        if len(scheduler.batch) == self._trace.scheduler.max_rows:
            return set()
        queued = scheduler.book.queued.values()
        return {tenant.head.key for tenant in queued if self._may_enter(tenant, simulation)}

    def _may_enter(self, tenant: Tenant, simulation: Simulation) -> bool:
        scheduler, limits, request = simulation.scheduler, self._limits[tenant.name], tenant.head
        needed = request.worst_case.pages[0]
        num_pages = scheduler.space.plan.groups[0].num_pages
        reserved = sum(
            sum(row.worst_case.pages)
            for row in scheduler.batch._running.values()
            if row.tenant == tenant.name
        )
        kept = scheduler.book.reserves.kept_from(tenant.name)[0]
        return (
            tenant.num_running < limits.max_running
            and reserved + needed <= limits.kv_share * num_pages
            and needed + kept <= scheduler.space.room[0]
            and tenant.num_prefilling < limits.max_prefilling
            and request.num_inflight == 0
            and (
                tenant.bucket is None
                or tenant.bucket.ready_at(request.quota, simulation.now) <= simulation.now
            )
        )


def run(trace: Trace, *, pauses: bool = False) -> tuple[Record, Judge]:
    judge, arrivals = Judge(trace), trace.arrivals(HERE)
    return Simulation(trace, with_pauses(arrivals, trace.seed) if pauses else arrivals, judge).run(), judge


def check_anything_goes(seed: int, *, pauses: bool = False) -> None:
    """Caps, classes, cancels: every request ends once, and the judge sees every step."""
    trace = random_trace(seed)
    record, _ = run(trace, pauses=pauses)
    ended = Counter(
        name
        for name, tenant in record.tenants.items()
        for _ in range(sum(tenant.outcomes.values()) + sum(tenant.rejected.values()))
    )
    assert ended == Counter(arrival.submission.key.tenant for arrival in trace.arrivals(HERE)), seed
    outcomes = {name for tenant in record.tenants.values() for name in tenant.outcomes}
    assert outcomes <= {"stop", "length", "cancelled"}, seed


def check_fairness(seed: int, *, pauses: bool = False) -> None:
    """No caps and one class: the gap of competing tenants stays within the bound, at every step."""
    trace = random_trace(seed, caps=False, classes=False)
    record, judge = run(trace, pauses=pauses)
    assert judge.largest_gap <= record.bound, seed


def throughput_ratio(seed: int) -> float:
    """Time that fcfs needs for all requests over the time that fair needs."""
    times = []
    for policy in ("fcfs", "fair"):
        trace = random_trace(seed, caps=False, classes=False, cancels=False, policy=policy, lasting=4)
        times.append(Simulation(trace, trace.arrivals(HERE)).run().end_s)
    return times[0] / times[1] if times[1] else 1.0


@default_blocks
def test_no_row_is_idle_beside_admissible_work_and_no_cap_is_exceeded(first: int) -> None:
    for seed in range(first, first + BLOCK):
        check_anything_goes(seed)


@default_blocks
def test_the_gap_between_competing_tenants_stays_within_the_bound(first: int) -> None:
    for seed in range(first, first + BLOCK):
        check_fairness(seed)


@default_blocks
def test_all_of_it_holds_with_clients_that_stop_reading_and_go_on(first: int) -> None:
    for seed in range(first, first + BLOCK):
        check_anything_goes(seed, pauses=True)
        check_fairness(seed, pauses=True)


def test_fair_serves_as_many_requests_in_a_time_as_fcfs() -> None:
    """Whose request is the last one is chance, and a long one runs alone: short traces differ by it."""
    ratios = [throughput_ratio(seed) for seed in range(25)]
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


@pytest.mark.slow
def test_fair_keeps_the_throughput_of_fcfs_over_five_hundred_traces() -> None:
    ratios = sorted(throughput_ratio(seed) for seed in range(25, 525))
    assert sum(ratios) / len(ratios) >= 0.99
    assert sum(ratio < 0.95 for ratio in ratios) <= 5
