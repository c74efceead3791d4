"""Whose prompt is computed next, and how much of it between two decode steps."""

import pytest
from plan_tape import CHUNK, PlanTape, make_world
from scheduling import World, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_memory


def test_every_step_decodes_every_row_that_can_while_prompts_are_computed() -> None:
    world, runner = make_world()
    world.submit(submission("running", (1,), max_tokens=40))
    world.turn()
    world.submit(submission("long", (2,) * 200, max_tokens=1))
    for _ in range(12):
        world.turn()
    assert [len(plan.decode) for plan in runner.plans[1:]] == [1] * 12
    assert [len(plan.prefill) for plan in runner.plans[1:]] == [1] * 12


@pytest.mark.parametrize(
    ("seconds_per_token", "limit_ms", "most_chunks"),
    [(0.001, 16, 1), (0.001, 64, 4), (0.001, 40, 2), (1.0, 1, 1)],
)
def test_prefill_between_two_decode_steps_stays_inside_its_time(
    seconds_per_token: float, limit_ms: float, most_chunks: int
) -> None:
    memory = fake_memory(max_rows=8, max_model_len=256, chunk=CHUNK, page_size=8)
    runner = FakeRunner(memory, prefill_s_per_token=seconds_per_token)
    world = World(make_config(prefill_ms=limit_ms), runner)
    for number in range(8):
        world.submit(submission(str(number), (number,) * (4 * CHUNK + 1), max_tokens=1))
    world.run()
    chunks = [sum(1 for item in plan if item[0] == "chunk") for plan in world.plans]
    assert max(chunks) == most_chunks
    assert sum(chunks) == 8 * 4


def test_short_prompts_share_a_step() -> None:
    memory = fake_memory(max_rows=8, chunk=CHUNK)
    world = World(make_config(), FakeRunner(memory, prefill_s_per_token=0.001))
    world.submit(submission("first", (1,) * CHUNK))
    world.run()
    for number in range(5):
        world.submit(submission(str(number), (1,) * 6))
    before = len(world.plans)
    world.turn()
    assert [item[0] for item in world.plans[before]] == ["chunk"] * 5


def test_a_short_prompt_passes_a_long_one_and_the_long_one_never_waits_two_chunks() -> None:
    world, runner = make_world(max_rows=4)
    long = (1,) * 200
    world.submit(submission("long", long, max_tokens=1))
    for number in range(30):
        world.turn()
        world.submit(submission(f"short {number}", (2,) * 10, max_tokens=1))
    world.run()
    owners = [chunk.row.prompt == long for plan in runner.plans for chunk in plan.prefill]
    last = max(i for i, is_long in enumerate(owners) if is_long)
    assert any(not is_long for is_long in owners[:last])
    assert all(owners[i] or owners[i + 1] for i in range(last))


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("turns_before", range(4))
def test_the_shortest_prompt_has_its_first_token_after_twice_its_chunks_and_one_step(
    chunks: int, turns_before: int
) -> None:
    """Whatever is computed before it: three long prompts of other tenants, a chunk a step."""
    tenants = [make_tenant(name) for name in "abcs"]
    runner = PlanTape(max_rows=8)
    world = World(make_config(*tenants, max_rows=8), runner)
    for name in "abc":
        world.submit(submission(name, (1,) * 240, tenant=name, max_tokens=1))
    for _ in range(1 + turns_before):
        world.turn()
    world.submit(submission("short", (2,) * (chunks * CHUNK + 1), tenant="s", max_tokens=1))
    before = len(runner.plans)
    world.run()
    drawn = next(
        index
        for index, plan in enumerate(runner.plans[before:])
        if any(entry.row.prompt[0] == 2 for entry in plan.decode)
    )
    assert drawn + 1 <= 2 * chunks + 1
