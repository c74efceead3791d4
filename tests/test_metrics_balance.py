"""Accepted = ended + running + waiting, at every scrape; and recording never waits for one."""

import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from scraping import REQUEST, STEP, Scraped, balance, told

from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.metrics.stats import EngineSnapshot, TenantGauges
from mlxd.metrics.tally import OUTCOMES


@pytest.fixture
def recorder() -> PrometheusRecorder:
    return PrometheusRecorder(["acme", "beta"], version="1")


class SimulatedEngine:
    """Takes in, starts and ends random requests; tells every step, and a snapshot after each."""

    def __init__(self, recorder: PrometheusRecorder, seed: int) -> None:
        self.random = random.Random(seed)
        self.recorder = recorder
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.num_accepted = 0
        self.outcomes: Counter[str] = Counter()

    def turn(self) -> None:
        for _ in range(self.random.randrange(4)):
            tenant = self.random.choice(["acme", "beta", "stranger"])
            self.recorder.accepted(tenant)
            self.num_accepted += 1
            self.waiting.append(tenant)
        while self.waiting and len(self.running) < 8:
            self.running.append(self.waiting.pop(0))
        for queue in (self.waiting, self.running):
            for _ in range(self.random.randrange(min(3, len(queue) + 1))):
                self.end(queue.pop(self.random.randrange(len(queue))))
        self.recorder.step(replace(STEP, decode_rows=len(self.running), token_gaps_s=(0.01,)))
        time.sleep(0.0001)  # room for a scrape between the facts and their snapshot
        self.recorder.snapshot(self.snapshot())

    def end(self, tenant: str) -> None:
        outcome = self.random.choice(OUTCOMES)
        self.outcomes[outcome] += 1
        self.recorder.request(replace(REQUEST, tenant=tenant, outcome=outcome))

    def snapshot(self) -> EngineSnapshot:
        waiting, running = Counter(self.waiting), Counter(self.running)
        return EngineSnapshot(
            state="running",
            waiting=len(self.waiting),
            running=len(self.running),
            tenants={t: TenantGauges(waiting[t], running[t]) for t in waiting | running},
        )


def test_accepted_equals_ended_plus_open_at_every_concurrent_scrape(recorder: PrometheusRecorder) -> None:
    engine = SimulatedEngine(recorder, seed=1)
    scrapes: list[Scraped] = []

    def drive() -> None:
        while len(scrapes) < 400:
            engine.turn()

    def disturb() -> None:
        while driver.is_alive():
            recorder.rejected("acme", "queue_full")
            time.sleep(0.0001)

    def scrape() -> None:
        while driver.is_alive():
            scrapes.append(Scraped(recorder.registry))

    driver = threading.Thread(target=drive)
    threads = [driver, *(threading.Thread(target=target) for target in (disturb, scrape, scrape))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    final = Scraped(recorder.registry)
    assert [counts for counts in map(balance, scrapes) if counts[0] != counts[1]] == []
    assert final.total("mlxd_requests_accepted_total") == engine.num_accepted
    assert final.by("outcome", "mlxd_requests_total") == engine.outcomes


def test_between_snapshots_a_scrape_shows_the_earlier_moment(recorder: PrometheusRecorder) -> None:
    told(recorder)
    recorder.accepted("acme")
    recorder.step(STEP)
    between = Scraped(recorder.registry)
    assert balance(between) == (0, 0)
    assert between.total("mlxd_steps_total") == 0
    recorder.snapshot(EngineSnapshot(tenants={"acme": TenantGauges(waiting=1)}))
    assert balance(Scraped(recorder.registry)) == (1, 1)


def test_recording_never_waits_for_a_scrape_and_loses_nothing(recorder: PrometheusRecorder) -> None:
    with recorder._lock:
        started = time.monotonic()
        recorder.accepted("acme")
        recorder.snapshot(EngineSnapshot(tenants={"acme": TenantGauges(running=1)}))
        recorder.rejected("acme", "quota")
        assert time.monotonic() - started < 1
    scraped = Scraped(recorder.registry)
    assert balance(scraped) == (1, 1)
    assert scraped.get("mlxd_requests_rejected_total", tenant="acme", reason="quota") == 1


def test_nothing_piles_up_where_nobody_scrapes(recorder: PrometheusRecorder) -> None:
    engine = SimulatedEngine(recorder, seed=2)
    for _ in range(100):
        engine.turn()
        recorder.bad_message("not_msgpack")
    assert not recorder._told
    assert not recorder._held_back
