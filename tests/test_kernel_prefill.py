"""Prefill beside attention that keeps its pools: nothing else may hold them while they are written."""

import pytest
from cpu_kernel import use_numpy_kernels
from tiny_models import Rig, make_rig, oracle, prompt_of

from mlxd.batching.mlx_step import MlxStep
from mlxd.batching.plan import StepPlan

FAMILY, OUTPUT = "llama/64", 12
RUNNING, JOINING = prompt_of(21), prompt_of(45, seed=1)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_kernels(monkeypatch)


def launched(rig: Rig, *, prefill: bool, scrub: bool = False) -> tuple[MlxStep, MlxStep]:
    """A step in flight and the next one, which decodes the same row and does what else is asked for."""
    driver = rig.driver()
    row = driver.join(RUNNING)
    driver.prefill()
    first = rig.runner.launch(StepPlan(1, decode=(driver._entry(row),)))
    joining = driver.join(JOINING)
    chunk = driver._next_chunk(joining)
    assert chunk is not None
    plan = StepPlan(
        2,
        decode=(driver._entry(row),),
        prefill=(chunk,) if prefill else (),
        scrub=tuple(tuple(pool.allocate(1)) for pool in driver.pools) if scrub else (),
    )
    return first, rig.runner.launch(plan)


@pytest.mark.parametrize(
    ("attention", "prefill", "scrub", "waits"),
    [
        ("kernel", True, False, True),
        ("kernel", False, True, True),
        ("kernel", False, False, False),
        ("in_place", True, True, False),
        ("gathered", True, False, False),
    ],
)
def test_a_step_that_writes_more_than_it_decodes_waits_for_the_one_in_flight(
    attention: str, prefill: bool, scrub: bool, waits: bool
) -> None:
    first, second = launched(make_rig(FAMILY, attention, page_size=16), prefill=prefill, scrub=scrub)
    assert (first._result is not None) == waits
    assert first.wait() is first.wait()
    assert len(second.wait().rows) == 1


@pytest.mark.parametrize("attention", ["kernel", "in_place"])
def test_rows_that_are_prefilled_beside_others_draw_what_mlx_lm_draws(attention: str) -> None:
    rig = make_rig(FAMILY, attention, page_size=16)
    driver = rig.driver()
    running = driver.join(RUNNING)
    driver.prefill()
    joining = driver.join(JOINING)
    pending: MlxStep | None = None
    while (chunk := driver._next_chunk(joining)) is not None:
        step = rig.runner.launch(StepPlan(0, decode=(driver._entry(running),), prefill=(chunk,)))
        if pending is not None:
            driver._finish(pending)
        pending = step
    assert pending is not None
    driver._finish(pending)
    while len(joining.output) < OUTPUT:
        driver.decode()
    for row in (running, joining):
        prompt = tuple(row.prompt)
        assert tuple(row.output) == oracle(FAMILY, prompt, len(row.output)).tokens
