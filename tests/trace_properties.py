"""What holds for any trace, at every step: fairness, no idle row, caps, work charged, the plain order.

As a script it checks many traces, several at a time, and needs msgspec and pyyaml alone:

    PYTHONPATH=... python tests/trace_properties.py [--seeds 0:10000] [--jobs 12]

Seeds are a half-open range. It prints a line for each that breaks a rule, and how many were checked; it ends
with 1 where there was any.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from math import inf, isclose
from multiprocessing import Pool
from pathlib import Path

from plain_line import PlainLine
from random_traces import random_trace, with_pauses

from mlxd.batching.plan import StepPlan
from mlxd.scheduler.config import TenantLimits
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.policy import make_policy
from mlxd.scheduler.simulation import Record, Simulation
from mlxd.scheduler.tenant import Tenant
from mlxd.scheduler.trace import Trace

HERE = Path(__file__).parent

Span = tuple[int, int, int]
"""A row and the positions [start, end) that a step computes of it."""


class Tape:
    """Watches a simulation.

    Attributes:
        plans: what every step computes.
    """

    def __init__(self) -> None:
        self.plans: list[list[Span]] = []

    def __call__(self, simulation: Simulation, plan: StepPlan | None) -> None:
        if plan is not None:
            decoded = [(entry.row.row_id, entry.position, entry.position + 1) for entry in plan.decode]
            self.plans.append([*decoded, *((c.row.row_id, c.start, c.end) for c in plan.prefill)])


class Judge(Tape):
    """Looks at a simulation after each planning, knowing the trace alone and the state as it is told.

    Attributes:
        work: what each tenant's share has to be charged for the steps so far.
        largest_gap: between the counters of competing tenants.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self._limits = {tenant.name: tenant for tenant in trace.tenants}
        self._least_ahead: dict[str, float] = dict.fromkeys(self._limits, inf)
        self._charged: dict[RequestKey, int] = {}
        self._prompts: Counter[str] = Counter()
        self._admissible: set[RequestKey] = set()
        self._reached: Counter[RequestKey] = Counter()
        self.work: Counter[str] = Counter()
        self.largest_gap = 0.0

    def __call__(self, simulation: Simulation, plan: StepPlan | None) -> None:
        super().__call__(simulation, plan)
        if plan is not None:
            self._count_work(simulation, plan)
        self._check_caps(simulation)
        self._check_no_row_is_idle(simulation, plan)
        simulation.scheduler.space.check_integrity()
        gap = simulation.scheduler.fairness.gap(simulation.competing())
        self.largest_gap = max(self.largest_gap, gap)

    def _count_work(self, simulation: Simulation, plan: StepPlan) -> None:
        """Tokens that are drawn, whoever reads them, and prompt positions at their first time."""
        weights, running = self._trace.scheduler, simulation.scheduler.batch._running
        reached = [(chunk.row.row_id, chunk.end) for chunk in plan.prefill]
        for entry in plan.decode:
            self.work[running[entry.row.row_id].tenant] += weights.output_weight
            reached.append((entry.row.row_id, entry.position + 1))
        for row_id, end in reached:
            request = running[row_id]
            end = min(end, len(request.prompt))
            fresh = max(0, end - self._reached[request.key])
            self._reached[request.key] += fresh
            self.work[request.tenant] += weights.prompt_weight * fresh

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
    record, judge = run(trace, pauses=pauses)
    ended = Counter(
        name
        for name, tenant in record.tenants.items()
        for _ in range(sum(tenant.outcomes.values()) + sum(tenant.rejected.values()))
    )
    assert ended == Counter(arrival.submission.key.tenant for arrival in trace.arrivals(HERE)), seed
    outcomes = {name for tenant in record.tenants.values() for name in tenant.outcomes}
    assert outcomes <= {"stop", "length", "cancelled"}, seed
    for limits in () if pauses else trace.tenants:
        charged = record.samples[-1][1][limits.name] * limits.weight
        assert isclose(charged, judge.work[limits.name], rel_tol=1e-9), f"{limits.name} is not charged all"


def check_fairness(seed: int, *, pauses: bool = False) -> None:
    """No caps and one class: the gap of competing tenants stays within the bound, at every step."""
    trace = random_trace(seed, caps=False, classes=False)
    record, judge = run(trace, pauses=pauses)
    assert judge.largest_gap <= record.bound, seed


def check_order(seed: int) -> None:
    """Whoever is next is so by the plain rule: the same steps with every tenant looked at each time."""
    for policy in ("fair", "fcfs"):
        trace = random_trace(seed, policy=policy, deadlines=True)
        judge, tape = Judge(trace), Tape()
        arrivals = with_pauses(trace.arrivals(HERE), seed)
        simulation = Simulation(trace, arrivals, judge)
        plain = Simulation(trace, arrivals, tape)
        book = plain.scheduler.book
        book.line = PlainLine(book, make_policy(trace.scheduler))  # type: ignore[assignment]
        assert simulation.run() == plain.run(), (policy, "records")
        assert judge.plans == tape.plans, (policy, "plans")


def throughput_ratio(seed: int) -> float:
    """Time that fcfs needs for all requests over the time that fair needs."""
    times = []
    for policy in ("fcfs", "fair"):
        trace = random_trace(seed, caps=False, classes=False, cancels=False, policy=policy, lasting=4)
        times.append(Simulation(trace, trace.arrivals(HERE)).run().end_s)
    return times[0] / times[1] if times[1] else 1.0


def check_pauses(seed: int) -> None:
    """All of it with clients that stop reading, and go on."""
    check_anything_goes(seed, pauses=True)
    check_fairness(seed, pauses=True)


CHECKS: tuple[Callable[[int], None], ...] = (check_anything_goes, check_fairness, check_pauses, check_order)


def broken(seed: int) -> list[str]:
    """A line for each rule that this seed's traces break."""
    found = []
    for check in CHECKS:
        try:
            check(seed)
        except AssertionError as error:
            found.append(f"seed {seed}: {check.__name__}: {error}")
    return found


def seeds(text: str) -> range:
    first, last = text.split(":")
    return range(int(first), int(last))


def main() -> int:
    parser = argparse.ArgumentParser(description="Rules of the scheduler over random traces.")
    parser.add_argument("--seeds", type=seeds, default=range(10_000), help="FIRST:END, END not included")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    begun, num_broken = time.monotonic(), 0
    with Pool(options.jobs) as pool:
        for lines in pool.imap_unordered(broken, options.seeds, chunksize=10):
            num_broken += bool(lines)
            for line in lines:
                print(line, flush=True)
    print(f"{len(options.seeds)} seeds, {num_broken} broken, {time.monotonic() - begun:.0f} s")
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
