"""A cache that raises, whichever layer and member: nobody else's numbers change, and nothing is lost."""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from scheduling import make_config, submission
from tiny_models import CHUNK, WATCHED, Rig, make_rig, pools_are_whole, prompt_of, seen
from tiny_zoo import zoo_model

from mlxd.batching.driver import Driver
from mlxd.batching.plan import StepPlan
from mlxd.batching.runner import PendingStep
from mlxd.caches.contract import RowCache
from mlxd.caches.delayed import DelayedRows
from mlxd.caches.quantization import Quantization
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import EngineFailedError
from mlxd.scheduler.events import Event, Finished, Rejected

LATE = Quantization(bits=4, group_size=32, start=CHUNK + 3)
BOUNDARY = 2 * CHUNK
JOINER = prompt_of(BOUNDARY + 1, seed=3)
"""Its second chunk ends where it is packed."""
DECODE = ("prepare_decode_step", "decode_slot", "decode_inputs", "commit_decode_step")
JOIN = ("scrub", "begin_prefill", "prefill", "finish", "commit_prefill", "_pack", "end_prefill")


def mistral() -> Rig:
    """Sliding and full layers, packed on their way."""
    return make_rig("mistral/64", "in_place", quantization=LATE)


@cache
def _falcon() -> Any:
    return zoo_model("falcon_h1")


def falcon() -> Rig:
    """In each layer recurrent state and full attention, packed on its way."""
    return make_rig("falcon_h1", "in_place", quantization=LATE, model=_falcon())


MAKERS = {"mistral": (mistral, 2), "falcon_h1": (falcon, 8)}
LAYERS = [(name, layer) for name, (_, num_layers) in MAKERS.items() for layer in range(num_layers)]


class BrokenCacheError(Exception):
    pass


def _raise(*_: object, **__: object) -> None:
    raise BrokenCacheError


def break_member(patch: pytest.MonkeyPatch, layer: RowCache, member: str, on_call: int = 1) -> None:
    """Let this member raise at its `on_call`th call, counted from now."""
    if member == "finish":
        _break_finish(patch, layer)
        return
    owner: Any = layer.storages[-1] if member == "scrub" else layer
    working, calls = getattr(owner, member), 0

    def counting(*args: Any, **options: Any) -> object:
        nonlocal calls
        calls += 1
        if calls == on_call:
            raise BrokenCacheError
        return working(*args, **options)

    patch.setattr(owner, member, counting)


def _break_finish(patch: pytest.MonkeyPatch, layer: RowCache) -> None:
    working = layer.prefill

    def prefill(view: Any) -> Any:
        stand_in: Any = working(view)
        stand_in.finish = _raise
        return stand_in

    patch.setattr(layer, "prefill", prefill)


def members_of(layer: RowCache, members: Sequence[str]) -> list[str]:
    return [m for m in members if m in ("scrub", "finish") or getattr(layer, m, None) is not None]


def rows_at_work(rig: Rig, driver: Driver) -> None:
    """Two rows that decode, of which one is packed soon; pages of a third, of both sorts, are dirty."""
    rig.runner.reset()
    gone = driver.join(prompt_of(BOUNDARY + 2, seed=5), WATCHED)
    for length in (BOUNDARY - 4, 7):
        driver.join(prompt_of(length), WATCHED)
    driver.prefill()
    for _ in range(2):
        driver.decode()
    driver.leave(gone)
    for pool in driver.pools:
        pool.scrub_dirty()


def steps_of(driver: Driver, count: int) -> list[list[object]]:
    return [seen(driver.decode()) for _ in range(count)]


def join_and_step(driver: Driver) -> None:
    driver.join(JOINER, WATCHED)
    driver.prefill()
    driver.decode()


def end(driver: Driver) -> None:
    for row in list(driver.rows):
        driver.leave(row)
    assert pools_are_whole(driver)


@pytest.mark.parametrize(("name", "index"), LAYERS)
def test_a_join_that_fails_in_any_layer_leaves_the_others_as_they_were(name: str, index: int) -> None:
    """To the last bit; its pages come back, and it may join again."""
    rig = MAKERS[name][0]()
    undisturbed = rig.driver()
    rows_at_work(rig, undisturbed)
    expected = steps_of(undisturbed, 6)
    alone = rig.generate(JOINER, 4).output
    layer = rig.runner._caches[index]
    tried = members_of(layer, JOIN)
    assert len(tried) == (len(JOIN) if isinstance(layer, DelayedRows) else 3)
    for member in tried:
        driver = rig.driver()
        rows_at_work(rig, driver)
        held = [pool.num_held for pool in driver.pools]
        joiner = driver.join(JOINER, WATCHED)
        with pytest.MonkeyPatch.context() as patch:
            break_member(patch, layer, member)
            with pytest.raises(BrokenCacheError):
                driver.prefill([joiner])
        driver.leave(joiner)
        assert [pool.num_held for pool in driver.pools] == held
        assert steps_of(driver, 6) == expected, member
        again = driver.join(JOINER, WATCHED)
        driver.prefill([again])
        for _ in range(4):
            driver.decode()
        assert again.output == alone, member
        end(driver)


class AsksTwice(Driver):
    """Launches a step that raised once more."""

    failed = 0

    def _launch(self, plan: StepPlan) -> PendingStep:
        try:
            return super()._launch(plan)
        except BrokenCacheError:
            self.failed += 1
            return super()._launch(plan)


@pytest.mark.parametrize(("name", "index"), LAYERS)
def test_a_step_that_raises_before_caches_adopt_it_changed_nothing(name: str, index: int) -> None:
    rig = MAKERS[name][0]()
    undisturbed = rig.driver()
    rows_at_work(rig, undisturbed)
    expected = steps_of(undisturbed, 6)
    for member in DECODE[:3]:
        driver = AsksTwice(rig.runner, rig.memory)
        rows_at_work(rig, driver)
        with pytest.MonkeyPatch.context() as patch:
            break_member(patch, rig.runner._caches[index], member, on_call=2)
            assert steps_of(driver, 6) == expected, member
        assert driver.failed == 1
        end(driver)


@pytest.mark.parametrize(("name", "index"), [LAYERS[0], LAYERS[1], LAYERS[2], LAYERS[-1]])
def test_a_runner_that_is_reset_after_any_failure_is_as_new(name: str, index: int) -> None:
    rig = MAKERS[name][0]()
    undisturbed = rig.driver()
    rows_at_work(rig, undisturbed)
    expected = steps_of(undisturbed, 3)
    layer = rig.runner._caches[index]
    for member in (*DECODE, *members_of(layer, JOIN)):
        driver = rig.driver()
        rows_at_work(rig, driver)
        with pytest.MonkeyPatch.context() as patch:
            break_member(patch, layer, member)
            with pytest.raises(BrokenCacheError):
                join_and_step(driver)
        driver = rig.driver()
        rows_at_work(rig, driver)
        assert steps_of(driver, 3) == expected, member


@pytest.mark.parametrize("member", [*DECODE, *JOIN[1:]])
@pytest.mark.parametrize("name", MAKERS)
def test_an_engine_whose_cache_raises_ends_every_request_once(
    name: str, member: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One rule for all of them: which rows a half-adopted step has touched is not guessed."""
    maker, _ = MAKERS[name]
    events: list[Event] = []
    is_over = threading.Event()

    def note(new: Sequence[Event]) -> None:
        events.extend(new)
        if sum(isinstance(event, Finished | Rejected) for event in events) == 4:
            is_over.set()

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.CRITICAL):
        engine = Engine(make_config(max_rows=3), runner_factory=_broken_runner(patch, maker, member))
        engine.start(note)
        engine.wait_ready(60)
        engine.ping(lambda: _submit_four(engine))  # on its thread, so that it cannot fail in between
        assert is_over.wait(60)
        assert engine.stop(60)
    ends = [event for event in events if isinstance(event, Finished)]
    late = [event for event in events if isinstance(event, Rejected)]
    assert {event.key.request_id for event in (*ends, *late)} == {"0", "1", "2", "3"}
    assert {(event.outcome, event.error_code) for event in ends} == {("failed", "engine_failed")}
    with pytest.raises(EngineFailedError, match="BrokenCacheError"):
        engine.submit(submission("late"))


def _submit_four(engine: Engine) -> None:
    for number in range(4):
        prompt = prompt_of(BOUNDARY + 1, seed=number)
        engine.submit(submission(str(number), prompt, max_tokens=40, ignore_eos=True))


def _broken_runner(patch: pytest.MonkeyPatch, maker: Callable[[], Rig], member: str) -> Callable[..., Any]:
    """Of the last layer, at its third call."""

    def factory(config: object, progress: object) -> object:
        rig = maker()
        break_member(patch, rig.runner._caches[-1], member, on_call=3)
        return rig.runner

    return factory
