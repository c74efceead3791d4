"""What a step holds, and what becomes of its tokens."""

import pytest
from plan_tape import CHUNK, PlanTape, finished, make_world, tokens_of
from scheduling import VOCAB, World, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.scheduler.errors import InvalidTransitionError
from mlxd.scheduler.events import RequestKey, Tokens
from mlxd.scheduler.request import RequestState, derive_seed


@pytest.mark.parametrize(
    ("num_prompt", "chunks"),
    [
        (1, []),
        (2, [(0, 1)]),
        (CHUNK, [(0, CHUNK - 1)]),
        (CHUNK + 1, [(0, CHUNK)]),
        (CHUNK + 2, [(0, CHUNK), (CHUNK, CHUNK + 1)]),
        (3 * CHUNK, [(0, 16), (16, 32), (32, 47)]),
    ],
)
def test_chunks_cover_all_but_the_last_prompt_token(num_prompt: int, chunks: list[tuple[int, int]]) -> None:
    world, runner = make_world()
    prompt = tuple(range(num_prompt))
    world.submit(submission("x", prompt, max_tokens=2))
    world.run()
    planned = [chunk for plan in runner.plans for chunk in plan.prefill]
    assert [(c.start, c.end) for c in planned] == chunks
    assert [token for c in planned for token in c.tokens] == list(prompt[:-1])
    entries = [entry for plan in runner.plans for entry in plan.decode]
    assert [(e.position, e.output_index, e.token) for e in entries] == [
        (num_prompt - 1, 0, prompt[-1]),
        (num_prompt, 1, None),
    ]


def test_a_row_decodes_in_the_step_after_its_last_chunk_was_launched() -> None:
    world, runner = make_world()
    world.submit(submission("x", (1,) * 10))
    world.turn()
    world.turn()
    assert [len(plan.prefill) for plan in runner.plans] == [1, 0]
    assert [len(plan.decode) for plan in runner.plans] == [0, 1]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_no_token_is_drawn_beyond_max_tokens(max_tokens: int) -> None:
    world, runner = make_world()
    world.submit(submission("x", (1,) * 5, max_tokens=max_tokens))
    world.run()
    assert sum(len(plan.decode) for plan in runner.plans) == max_tokens
    assert finished(world)["x"].outcome == "length"
    assert finished(world)["x"].usage.completion_tokens == max_tokens


@pytest.mark.parametrize("by", ["stop_token_ids", "eos"])
def test_a_stop_token_is_the_last_one_told_and_the_one_in_flight_is_dropped(by: str) -> None:
    prompt, expected = (1, 2, 3), fake_completion((1, 2, 3), 7, 20, VOCAB)
    eos = frozenset({expected[4]}) if by == "eos" else frozenset()
    runner = FakeRunner(fake_memory(), vocab_size=VOCAB, eos_token_ids=eos)
    world = World(make_config(), runner)
    stops = () if by == "eos" else (expected[4],)
    world.submit(submission("x", prompt, max_tokens=20, stop_token_ids=stops))
    world.run()
    assert tokens_of(world, "x") == expected[:5]
    assert finished(world)["x"].outcome == "stop"
    assert sum(step.decode_rows for step in world.tape.steps) == 6
    assert sum(step.generated_tokens.get("acme", 0) for step in world.tape.steps) == 5


def test_ignore_eos_goes_on_but_own_stop_tokens_still_end() -> None:
    expected = fake_completion((1, 2, 3), 7, 20, VOCAB)
    runner = FakeRunner(fake_memory(), vocab_size=VOCAB, eos_token_ids=frozenset({expected[2]}))
    world = World(make_config(), runner)
    world.submit(submission("on", max_tokens=9, ignore_eos=True))
    world.submit(submission("own", max_tokens=9, ignore_eos=True, stop_token_ids=(expected[2],)))
    world.run()
    assert tokens_of(world, "on") == expected[:9]
    assert tokens_of(world, "own") == expected[:3]


def test_logprobs_come_with_the_tokens_where_they_were_asked_for() -> None:
    world, _ = make_world()
    world.submit(submission("with", top_logprobs=2))
    world.submit(submission("without"))
    world.run()
    lengths = {e.key.request_id: len(e.logprobs) for e in world.events if isinstance(e, Tokens)}
    assert lengths == {"with": 1, "without": 0}


@pytest.mark.parametrize("where", ["decode", "prefill"])
def test_a_fault_ends_its_row_alone(where: str) -> None:
    def fault(item) -> str | None:  # type: ignore[no-untyped-def]
        return "numeric" if item.row.prompt[0] == 9 else None

    runner = FakeRunner(fake_memory(), vocab_size=VOCAB, **{f"{where}_fault": fault})  # type: ignore[arg-type]
    world = World(make_config(), runner)
    world.submit(submission("bad", (9, 2, 3)))
    world.submit(submission("good", (1, 2, 3)))
    world.run()
    assert finished(world)["bad"].outcome == "failed"
    assert finished(world)["bad"].error_code == "numeric"
    assert tokens_of(world, "bad") == []
    assert tokens_of(world, "good") == fake_completion((1, 2, 3), 7, 4, VOCAB)


@pytest.mark.parametrize("turns", range(8))
def test_a_request_can_be_cancelled_at_any_moment_and_its_late_tokens_are_dropped(turns: int) -> None:
    world, _ = make_world(max_rows=1)
    world.submit(submission("x", (1,) * 40, max_tokens=30))
    world.submit(submission("next", max_tokens=2))
    for _ in range(turns):
        world.turn()
    world.cancel(RequestKey("acme", "x"), "client_gone")
    told = len(tokens_of(world, "x"))
    world.run()
    assert finished(world)["x"].outcome == "client_gone"
    assert finished(world)["x"].usage.completion_tokens == len(tokens_of(world, "x")) == told
    assert finished(world)["next"].outcome == "length"


def test_cancelling_an_unknown_request_is_nothing() -> None:
    world, _ = make_world()
    world.cancel(RequestKey("acme", "nobody"))
    assert world.events == []


def test_a_row_that_left_is_told_to_the_runner_once() -> None:
    world, runner = make_world()
    world.submit(submission("short", max_tokens=2))
    world.submit(submission("long", max_tokens=12))
    world.run()
    first_row = runner.plans[0].prefill[0].row.row_id
    assert [plan.left for plan in runner.plans if plan.left] == [(first_row,)]


def plans_of_row(runner: PlanTape, prompt: tuple[int, ...]) -> list[object]:
    """What the steps that hold the row say of it, tables included."""
    told: list[object] = []
    for plan in runner.plans:
        told += [("chunk", c.start, c.end, c.tokens) for c in plan.prefill if c.row.prompt == prompt]
        told += [("decode", e.position, e.token) for e in plan.decode if e.row.prompt == prompt]
    return told


@pytest.mark.parametrize("act", ["join", "leave", "cancel"])
def test_a_sibling_that_joins_or_leaves_moves_nothing_of_a_row(act: str) -> None:
    prompt = tuple(range(45))
    alone, alone_runner = make_world(memory={"window": 20})
    alone.submit(submission("x", prompt, max_tokens=30))
    alone.run()
    world, runner = make_world(memory={"window": 20})
    if act != "join":
        world.submit(submission("sibling", (5,) * 30, max_tokens=9))
    world.submit(submission("x", prompt, max_tokens=30))
    for turn in range(12):
        if turn == 6 and act == "join":
            world.submit(submission("sibling", (5,) * 30, max_tokens=9))
        if turn == 6 and act == "cancel":
            world.cancel(RequestKey("acme", "sibling"))
        world.turn()
    world.run()
    assert plans_of_row(runner, prompt) == plans_of_row(alone_runner, prompt)
    assert tokens_of(world, "x") == tokens_of(alone, "x")


def test_a_sliding_group_holds_a_bounded_number_of_pages_whatever_the_length() -> None:
    world, _ = make_world(memory={"window": 20})
    world.submit(submission("x", (1,) * 100, max_tokens=100))
    held = []
    while not world.is_idle:
        world.turn()
        held.append(world.scheduler.space.pages["sliding:20"][0])
    assert max(held) <= 3 + 1 + 2
    assert world.scheduler.space.pages["full"][0] == 0


def test_a_preempted_request_keeps_its_output_and_recomputes_it() -> None:
    world, runner = make_world(memory={"num_pages": 10}, overcommit=4.0)
    first, second = (1,) * 20, (2,) * 20
    world.submit(submission("first", first, max_tokens=40))
    world.submit(submission("second", second, max_tokens=40))
    world.run()
    assert sum(sum(step.preemptions.values()) for step in world.tape.steps) == 1
    assert tokens_of(world, "first") == fake_completion(first, 7, 40, VOCAB)
    assert tokens_of(world, "second") == fake_completion(second, 7, 40, VOCAB)
    again = [c.tokens for plan in runner.plans for c in plan.prefill if c.row.prompt == second and c.end > 20]
    assert again, "its own output is computed again"
    resumed = next(e for plan in runner.plans for e in plan.decode if e.token is not None and e.output_index)
    assert resumed.token == tokens_of(world, "second")[resumed.output_index - 1]


def test_the_row_that_entered_first_is_never_preempted() -> None:
    world, runner = make_world(memory={"num_pages": 12}, overcommit=8.0)
    for number in range(6):
        world.submit(submission(str(number), (number,) * 10, max_tokens=60))
    world.run()
    rows_of_first = {e.row.row_id for plan in runner.plans for e in plan.decode if e.row.prompt[0] == 0}
    assert len(rows_of_first) == 1
    assert sum(sum(step.preemptions.values()) for step in world.tape.steps) > 0
    assert {outcome.outcome for outcome in finished(world).values()} == {"length"}


def test_a_preempted_request_runs_before_its_tenants_waiting_ones() -> None:
    world, _ = make_world(memory={"num_pages": 10}, overcommit=4.0, max_rows=2)
    for name in ("a", "b", "c"):
        world.submit(submission(name, (1,) * 20, max_tokens=40))
    world.run()
    assert list(finished(world)) == ["a", "b", "c"]


def test_a_recomputation_is_not_charged_to_the_tenant() -> None:
    services = []
    for num_pages in (None, 10):
        world, _ = make_world(memory={"num_pages": num_pages}, overcommit=4.0)
        for name in ("a", "b"):
            world.submit(submission(name, (1,) * 20, max_tokens=40))
        world.run()
        [tenant] = world.scheduler.book
        services.append(tenant.service)
        computed, recomputed = positions_computed(world)
        assert computed == 2 * 20
        assert (recomputed > 0) == (num_pages is not None)
    assert services == [2 * (20 + 2 * 40)] * 2


def positions_computed(world: World) -> tuple[int, int]:
    """Of prompts for the first time, and of any token again."""
    steps = world.tape.steps
    computed = sum(sum(step.prompt_tokens.values()) for step in steps)
    return computed, sum(sum(step.recomputed_tokens.values()) for step in steps)


@pytest.mark.parametrize("num_prompt", [1, 2, 16, 17, 33])
def test_every_position_of_a_prompt_is_counted_and_charged_once(num_prompt: int) -> None:
    world, _ = make_world()
    world.submit(submission("x", (1,) * num_prompt, max_tokens=1))
    world.run()
    [tenant] = world.scheduler.book
    assert positions_computed(world) == (num_prompt, 0)
    assert tenant.service == num_prompt + 2 * 1


def test_a_request_that_ends_before_it_got_a_row_is_no_row_that_left() -> None:
    world, _ = make_world(max_rows=1)
    for name in ("running", "waiting"):
        world.submit(submission(name))
    world.turn()
    world.cancel(RequestKey("acme", "waiting"))
    world.run()
    assert sum(step.joined for step in world.tape.steps) == 1
    assert sum(step.left for step in world.tape.steps) == 1


def test_facts_of_steps_and_requests_add_up() -> None:
    world, _ = make_world()
    for number in range(3):
        world.submit(submission(str(number), (1,) * 20, max_tokens=5))
    world.run()
    steps, requests = world.tape.steps, world.tape.requests
    assert sum(step.joined for step in steps) == sum(step.left for step in steps) == 3
    assert sum(step.prompt_tokens.get("acme", 0) for step in steps) == 3 * 20
    assert not any(step.recomputed_tokens for step in steps)
    assert sum(step.generated_tokens.get("acme", 0) for step in steps) == 3 * 5
    assert sum(len(step.token_gaps_s) for step in steps) == 3 * 4
    assert [(r.prompt_tokens, r.generated_tokens) for r in requests] == [(20, 5)] * 3
    for r in requests:
        assert r.queue_s is not None
        assert r.first_token_s is not None
        assert 0 < r.queue_s < r.first_token_s < r.duration_s


def test_ending_all_ends_waiting_and_running_ones_and_leaves_nothing_behind() -> None:
    world, _ = make_world(max_rows=1)
    world.submit(submission("running"))
    world.submit(submission("waiting"))
    world.turn()
    world.events += world.scheduler.end_all("draining", "draining", "the daemon stopped", world.now)
    world.scheduler.space.check_empty()
    assert {e.outcome for e in finished(world).values()} == {"draining"}
    assert len(finished(world)) == 2


@pytest.mark.parametrize(
    ("start", "allowed"),
    [
        (RequestState.WAITING, {RequestState.RUNNING, RequestState.PAUSED, RequestState.FINISHED}),
        (RequestState.RUNNING, {RequestState.PREEMPTED, RequestState.PAUSED, RequestState.FINISHED}),
        (RequestState.PREEMPTED, {RequestState.RUNNING, RequestState.PAUSED, RequestState.FINISHED}),
        (RequestState.PAUSED, {RequestState.PREEMPTED, RequestState.FINISHED}),
        (RequestState.FINISHED, set()),
    ],
)
def test_states_change_by_the_table_only(start: RequestState, allowed: set[RequestState]) -> None:
    world, _ = make_world()
    for to in RequestState:
        request = world.scheduler._make_request(submission("x"))
        request.state = start
        if to in allowed:
            request.transition(to)
            assert request.state is to
        else:
            with pytest.raises(InvalidTransitionError, match=f"{start.name} -> {to.name}"):
                request.transition(to)


def test_seeds_are_the_clients_or_follow_from_the_engines_seed_and_the_arrival() -> None:
    seeds = {}
    for engine_seed in (1, 1, 2):
        runner = PlanTape()
        world = World(make_config(make_tenant("acme")), runner, seed=engine_seed)
        world.submit(submission("given", seed=2**64 - 1))
        for number in range(3):
            world.submit(submission(str(number), (number,), seed=None))
        world.run()
        found = {e.row.row_id: e.row.seed for plan in runner.plans for e in plan.decode}
        assert sorted(found.values()) == sorted(
            [2**64 - 1, *(derive_seed(engine_seed, n) for n in (1, 2, 3))]
        )
        seeds[engine_seed] = set(found.values())
    assert seeds[1] & seeds[2] == {2**64 - 1}
