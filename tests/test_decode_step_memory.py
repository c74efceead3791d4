"""Memory: the pools are the plan, steps write in place, and a full house stays within it."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from tiny_models import WIDE, Rig, make_rig, prompt_of

from mlxd.batching.mlx_step import MlxStep
from mlxd.batching.plan import DecodeEntry, PrefillChunk, StepPlan
from mlxd.batching.row import Row
from mlxd.batching.sampling_params import GREEDY, SamplingParams
from mlxd.caches.row_group import row_bucket, width_bucket
from mlxd.scheduler.config import Config, SchedulerConfig, TenantConfig
from mlxd.scheduler.events import Accepted, Event, Finished, Rejected, RequestKey, Submission
from mlxd.scheduler.scheduler import Scheduler


def extra_bytes(run: Callable[[], object]) -> int:
    """Most memory that `run` held at once, over what was held before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return max(0, mx.get_peak_memory() - before)


def big_rig(attention: str, *, compiled: bool = False) -> Rig:
    """Pools of 8 MiB for rows that need a fraction of it, so that a copy of a pool stands out."""
    return make_rig(
        "gemma3_text",
        attention,
        compiled=compiled,
        max_rows=64,
        max_model_len=4096,
        budget_bytes=8 * 2**20,
        page_size=16,
    )


def smallest_pool(rig: Rig) -> int:
    """Bytes of the smallest array of keys."""
    return min(layer.keys.nbytes for layer in rig.runner._caches)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("attention", ["gathered", "in_place"])
def test_no_step_copies_a_pool(attention: str, compiled: bool) -> None:
    rig = big_rig(attention, compiled=compiled)
    driver = rig.driver(pipelined=True)
    limit = smallest_pool(rig) // 2
    for length in (20, 3, 9):
        driver.join(prompt_of(length), GREEDY)

    assert extra_bytes(driver.prefill) < limit
    for _ in range(20):
        assert extra_bytes(driver.decode) < limit
    driver.flush()


@pytest.mark.parametrize("attention", ["gathered", "in_place"])
def test_a_step_launched_behind_a_prefill_copies_no_pool(attention: str) -> None:
    """The prefill is not read yet when the next step's writes are launched."""
    rig = big_rig(attention)
    driver = rig.driver()
    row = driver.join(prompt_of(9), GREEDY)
    driver.prefill()
    newcomer = driver.join(prompt_of(20), GREEDY)
    for table, other in zip(row.tables, newcomer.tables, strict=True):
        table.grow(10)
        other.grow(16)

    def two_steps() -> None:
        chunk = PrefillChunk(newcomer, 0, 16, tuple(newcomer.prompt[:16]))
        first = rig.runner.launch(StepPlan(50, decode=(entry(row, 0),), prefill=(chunk,)))
        second = rig.runner.launch(StepPlan(51, decode=(entry(row, 1),)))
        first.wait()
        second.wait()

    assert extra_bytes(two_steps) < smallest_pool(rig) // 2


def entry(row: Row, index: int) -> DecodeEntry:
    return DecodeEntry(row, len(row.prompt) - 1 + index, index, None if index else row.prompt[-1])


@pytest.mark.parametrize("attention", ["gathered", "in_place"])
def test_scrubbing_copies_no_pool(attention: str) -> None:
    rig = big_rig(attention)
    dirty = tuple(range(1, 9))
    scrub = StepPlan(1, scrub=(dirty,) * len(rig.memory.groups))

    def run() -> None:
        rig.runner.launch(scrub).wait()
        mx.eval([layer.state() for layer in rig.runner._caches])

    assert extra_bytes(run) < smallest_pool(rig) // 2


def workspace_bytes(rig: Rig) -> int:
    """What steps take beside the pools: two decode steps in flight, and the last chunk of a full row."""
    rows, tokens = rig.memory.max_rows, rig.memory.max_model_len
    pages = rig.memory.groups[0].num_pages
    decode = max(
        extra_bytes(lambda n=n: rig.runner.trace(row_bucket(n), (width_bucket(pages // n),), GREEDY))  # type: ignore[misc]
        for n in range(2, rows + 1)
    )
    driver = rig.driver()
    row = driver.join(prompt_of(tokens), GREEDY)
    prefill = extra_bytes(driver.prefill)
    driver.leave(row)
    return 2 * decode + prefill


def serve_all(rig: Rig, scheduler: Scheduler) -> dict[str, int]:
    """Run every open request to its end, a step ahead of what is read; tokens by request."""
    events: list[Event] = []
    unread: tuple[StepPlan, MlxStep] | None = None
    while scheduler.num_open or unread is not None:
        plan = scheduler.schedule(0.0, [])
        launched = None if plan is None else (plan, rig.runner.launch(plan))
        if unread is not None:
            scheduler.postprocess(unread[0], unread[1].wait(), 0.0, events)
        unread = launched
    scheduler.space.check_empty()
    return {e.key.request_id: e.usage.completion_tokens for e in events if isinstance(e, Finished)}


@pytest.mark.parametrize("attention", ["gathered", "in_place"])
def test_fifty_requests_in_a_budget_of_two_rows_stay_within_the_plan(attention: str) -> None:
    """Peak against weights + pools + scratch pages + workspace; all end, and one that never fits is told."""
    max_len, token_bytes = 128, 8 * 2 * 2 * 128 * 4
    rig = make_rig(
        WIDE,
        attention,
        max_rows=4,
        max_model_len=max_len,
        budget_bytes=2 * max_len * token_bytes,
        page_size=16,
    )
    spec = rig.memory.groups[0].spec
    assert spec.bytes_per_token == token_bytes
    assert rig.memory.groups[0].num_pages == 2 * spec.pages_for(max_len, rig.memory.chunk)
    pools = sum(array.nbytes for layer in rig.runner._caches for array in layer.state())
    assert pools == rig.memory.kv_bytes + spec.page_bytes
    plan = rig.memory.weights_bytes + pools + workspace_bytes(rig)
    tenant = TenantConfig(name="a", token_sha256="a" * 64, max_waiting=64)
    settings = Config(version=1, tenants=(tenant,), scheduler=SchedulerConfig(max_rows=4))
    scheduler = Scheduler(settings, rig.runner.info)

    def submit(name: str, num_prompt: int, max_tokens: int) -> Event:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return scheduler.submit(Submission(RequestKey("a", name), prompt_of(num_prompt), sampling, 0.0))

    wanted = {str(i): 1 + i % 12 for i in range(50)}
    for name, max_tokens in wanted.items():
        assert isinstance(submit(name, 5 + 7 * int(name) % 110, max_tokens), Accepted)
        if name == "20":
            refused = submit("giant", max_len, 2)
            assert isinstance(refused, Rejected)
            assert not refused.retryable
    served: dict[str, int] = {}

    beyond_pools = extra_bytes(lambda: served.update(serve_all(rig, scheduler)))

    assert served == wanted
    assert rig.memory.weights_bytes + pools + beyond_pools <= 1.05 * plan
