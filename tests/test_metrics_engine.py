"""What a scrape shows of a real engine over a runner without a model."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from scheduling import make_config, make_tenant, submission
from scraping import Scraped, balance

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.metrics.health import judge
from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import EngineFailedError
from mlxd.scheduler.events import Event, Finished

NUM_REQUESTS = 120
CONFIG = make_config(make_tenant("acme"), make_tenant("beta", weight=2.0), max_rows=4)


class Run:
    """An engine whose requests end in many ways, and the events it gave."""

    def __init__(self, **runner: object) -> None:
        self.recorder = PrometheusRecorder([tenant.name for tenant in CONFIG.tenants], version="1")
        self.runner = FakeRunner(fake_memory(max_rows=4, max_model_len=128), **runner)  # type: ignore[arg-type]
        self.engine = Engine(CONFIG, runner_factory=lambda *_: self.runner, recorder=self.recorder)
        self.finished: list[Finished] = []
        self.is_done = threading.Event()
        self.engine.start(self._receive)
        self.engine.wait_ready(10)

    def submit(self, num_requests: int, *, cancel_every: int = 5) -> None:
        for i in range(num_requests):
            at = self.engine.clock()
            request = submission(
                f"r{i}", range(1, 3 + i % 50), tenant=("acme", "beta")[i % 2], at=at, max_tokens=1 + i % 9
            )
            self.engine.submit(request)
            if i % cancel_every == cancel_every - 1:
                self.engine.cancel(request.key)

    def scrape(self) -> Scraped:
        return Scraped(self.recorder.registry)

    def _receive(self, events: Sequence[Event]) -> None:
        self.finished += [event for event in events if isinstance(event, Finished)]
        if len(self.finished) == NUM_REQUESTS:
            self.is_done.set()


def test_an_engine_at_work_balances_at_every_scrape_and_ends_with_nothing_open() -> None:
    run = Run(decode_s=0.0005, sleep=time.sleep)
    run.submit(NUM_REQUESTS)
    scrapes = [run.scrape()]
    while not run.is_done.is_set():
        scrapes.append(run.scrape())
    run.engine.stop(10)
    final = run.scrape()
    assert [counts for counts in map(balance, scrapes) if counts[0] != counts[1]] == []
    assert final.total("mlxd_requests_accepted_total") == NUM_REQUESTS
    assert final.by("outcome", "mlxd_requests_total") == Counter(event.outcome for event in run.finished)
    assert final.total("mlxd_requests_running") == final.total("mlxd_requests_waiting") == 0
    assert final.get("mlxd_kv_bytes", state="used") == final.get("mlxd_kv_bytes", state="reserved") == 0


def test_tokens_counted_as_drawn_are_the_tokens_of_the_requests_that_ended() -> None:
    run = Run()
    run.submit(NUM_REQUESTS)
    assert run.is_done.wait(10)
    run.engine.stop(10)
    final = run.scrape()
    drawn = sum(event.usage.completion_tokens for event in run.finished)
    assert final.total("mlxd_generation_tokens_total") == drawn
    assert final.get("mlxd_request_generation_tokens_sum") == drawn
    gave_tokens = sum(event.usage.completion_tokens > 0 for event in run.finished)
    assert final.total("mlxd_time_to_first_token_seconds_count") == gave_tokens
    assert final.get("mlxd_inter_token_latency_seconds_count") == drawn - gave_tokens


def test_when_idle_every_prompt_token_was_counted_once_and_as_many_rows_left_as_joined() -> None:
    run = Run()
    run.submit(NUM_REQUESTS, cancel_every=NUM_REQUESTS + 1)
    assert run.is_done.wait(10)
    run.engine.stop(10)
    final = run.scrape()
    prompts = sum(event.usage.prompt_tokens for event in run.finished)
    by_source = final.by("source", "mlxd_prompt_tokens_total")
    cached = sum(event.usage.cached_tokens for event in run.finished)
    assert by_source == Counter(computed=prompts - cached, recomputed=0, cached=cached)
    assert final.get("mlxd_request_prompt_tokens_sum") == prompts
    assert final.by("op", "mlxd_batch_changes_total") == Counter(join=NUM_REQUESTS, leave=NUM_REQUESTS)


def test_a_failed_engine_balances_and_says_so() -> None:
    run = Run(fail_at_step=5)
    with suppress(EngineFailedError):
        run.submit(NUM_REQUESTS)
    wait_until(lambda: run.engine.snapshot.state == "failed")
    run.engine.stop(10)
    final = run.scrape()
    accepted, accounted = balance(final)
    assert accepted == accounted > 0
    assert final.get("mlxd_engine_state", state="failed") == 1
    assert final.total("mlxd_requests_running") == final.total("mlxd_requests_waiting") == 0
    assert judge(run.engine.snapshot, run.engine.clock()).reason.startswith("engine failed: RuntimeError")


def test_a_step_that_hangs_shows_its_work_and_turns_health_red() -> None:
    run = Run(hang_at_step=1)
    run.submit(2)
    wait_until(lambda: run.scrape().total("mlxd_requests_running") > 0)
    hanging, health = run.scrape(), judge(run.engine.snapshot, run.engine.clock() + 60)
    run.runner.resume.set()
    run.engine.stop(10)
    accepted, accounted = balance(hanging)
    assert accepted == accounted > 0
    assert not health.ok
    assert "no step for" in health.reason


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)
