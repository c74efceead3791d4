"""A tenant that floods the prefix cache takes what others do not use, and nothing of their parts."""

from collections.abc import Sequence

import pytest
from scheduling import VOCAB, World, cached, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.scheduler.config import Config

PAGE = 8
PROMPT = tuple(range(100, 140))
KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "full and sliding": {"window": 20, "num_window_pages": 40},
    "full and state": {"has_state": True, "num_states": 24},
    "packed on the way": {"boundary": 16},
}


def world_of(*weights: float, kind: str = "full", num_pages: int = 64) -> World:
    """Tenants "victim", which sends little, and "flood", which has at most two rows."""
    fields = {"max_rows": 3, "max_model_len": 128, "chunk": 16, "page_size": PAGE, "num_pages": num_pages}
    runner = FakeRunner(fake_memory(**fields, **KINDS[kind]), vocab_size=VOCAB)  # type: ignore[arg-type]
    return World(_config(*weights), runner)


def _config(victim: float, flood: float) -> Config:
    return make_config(
        make_tenant("victim", weight=victim),
        make_tenant("flood", weight=flood, max_running=2),
        max_rows=3,
    )


class Flood:
    """Prompts that have nothing in common, twelve at a time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0

    def rise(self) -> None:
        for _ in range(12):
            self._count += 1
            prompt = (self._count % VOCAB, self._count // VOCAB, *range(78))
            self._world.submit(submission(f"flood{self._count}", prompt, tenant="flood"))


def ask(world: World, request_id: str, prompt: Sequence[int] = PROMPT) -> int:
    """Have the victim's request served, and all others; tokens of its prompt that were found."""
    world.submit(submission(request_id, prompt, tenant="victim"))
    world.run()
    return cached(world, request_id)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 4.0), (5.0, 1.0)])
def test_who_keeps_less_than_its_part_finds_all_of_it_whatever_others_send(
    kind: str, weights: tuple[float, float]
) -> None:
    world = world_of(*weights, kind=kind)
    flood = Flood(world)
    found = [ask(world, "cold"), ask(world, "warm")]
    for wave in range(6):
        flood.rise()
        found.append(ask(world, f"beside {wave}"))
        flood.rise()
        world.run()
        found.append(ask(world, f"after {wave}"))
    assert found == [0] + [32] * 13
    assert world.scheduler.space.num_evicted > 500


@pytest.mark.parametrize(
    ("weights", "found"), [((1.0, 1.0), [112, 56]), ((1.0, 3.0), [88, 0]), ((3.0, 1.0), [112, 112])]
)
def test_who_keeps_more_than_its_part_is_left_with_that(
    weights: tuple[float, float], found: list[int]
) -> None:
    """The flood's two rows hold some 20 of the 64 pages, so 44 are parted."""
    world = world_of(*weights)
    prompts = [(number, *range(119)) for number in range(6)]
    for prompt in prompts:
        ask(world, f"cold {prompt[0]}", prompt)
    assert world.scheduler.space.cached_pages["full"] > 60
    flood = Flood(world)
    for _ in range(4):
        flood.rise()
    world.run()
    assert [ask(world, f"latest {back}", prompts[-back]) for back in (1, 2)] == found


def test_weights_of_a_reload_hold_at_once() -> None:
    world = world_of(1.0, 1.0)
    flood = Flood(world)
    ask(world, "cold")
    flood.rise()
    assert ask(world, "warm") == 32
    world.scheduler.set_tenants(_config(0.01, 1.0).tenants, world.now)
    flood.rise()
    world.run()
    assert ask(world, "after") == 0


def test_what_a_tenant_that_is_gone_kept_goes_before_all_else() -> None:
    world = world_of(1.0, 1.0, num_pages=44)
    prompts = [(number, *range(79)) for number in range(4)]

    def send(request_id: str, prompt: Sequence[int]) -> int:
        world.submit(submission(request_id, prompt, tenant="flood"))
        world.run()
        return cached(world, request_id)

    for prompt in prompts[:3]:
        send(f"cold {prompt[0]}", prompt)
    for base in (100, 200):
        ask(world, f"{base}", range(base, base + 40))
    world.scheduler.set_tenants(_config(1.0, 1.0).tenants[1:], world.now)
    send("cold 3", prompts[3])
    assert world.scheduler.space.num_evicted > 5
    assert [send(f"warm {prompt[0]}", prompt) for prompt in prompts] == [72] * 4
