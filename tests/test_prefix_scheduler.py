"""Prefixes through the scheduler: what is reused, what never is, and who pays what."""

from collections.abc import Callable, Sequence

import msgspec
import pytest
from scheduling import VOCAB, World, cached, make_config, make_tenant, submission

from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.batching.plan import DecodeEntry, PrefillChunk
from mlxd.caches.sizing import MemoryPlan
from mlxd.scheduler.config import CacheConfig, Config
from mlxd.scheduler.events import RequestKey, Tokens
from mlxd.scheduler.snapshot import SnapshotMaker

PAGE, CHUNK = 8, 16
PROMPT = tuple(range(100, 140))


def memory(**fields: int) -> MemoryPlan:
    return fake_memory(**({"max_rows": 8, "max_model_len": 256, "chunk": CHUNK, "page_size": PAGE} | fields))


def world_of(
    config: Config | None = None,
    plan: MemoryPlan | None = None,
    *,
    decode_fault: Callable[[DecodeEntry], str | None] | None = None,
    prefill_fault: Callable[[PrefillChunk], str | None] | None = None,
) -> World:
    runner = FakeRunner(
        plan or memory(), vocab_size=VOCAB, decode_fault=decode_fault, prefill_fault=prefill_fault
    )
    return World(config or make_config(), runner)


def serve(world: World, request_id: str, prompt: Sequence[int] = PROMPT, **fields: object) -> int:
    """Run it alone to its end; tokens of the prompt that were found."""
    world.submit(submission(request_id, prompt, **fields))  # type: ignore[arg-type]
    world.run()
    return cached(world, request_id)


def tokens_of(world: World, request_id: str) -> list[int]:
    events = (e for e in world.events if isinstance(e, Tokens) and e.key.request_id == request_id)
    return [token for event in events for token in event.token_ids]


def computed(world: World) -> list[tuple[int, int]]:
    """Chunks of all steps so far, [start, end)."""
    return [(item[2], item[3]) for plan in world.plans for item in plan if item[0] == "chunk"]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("num_prompt", "found", "chunks"),
    [
        (1, 0, []),
        (PAGE, 0, [(0, PAGE - 1)]),
        (PAGE + 1, PAGE, []),
        (PAGE + 2, PAGE, [(PAGE, PAGE + 1)]),
        (3 * PAGE, 2 * PAGE, [(2 * PAGE, 3 * PAGE - 1)]),
        (3 * PAGE + 1, 3 * PAGE, []),
        (5 * PAGE + 3, 5 * PAGE, [(5 * PAGE, 5 * PAGE + 2)]),
    ],
)
def test_a_second_equal_prompt_computes_what_follows_its_full_pages_and_always_its_last_position(
    num_prompt: int, found: int, chunks: list[tuple[int, int]]
) -> None:
    world, prompt = world_of(), tuple(range(num_prompt))
    assert serve(world, "cold", prompt) == 0
    before = len(computed(world))
    assert serve(world, "warm", prompt) == found
    assert computed(world)[before:] == chunks
    assert tokens_of(world, "warm") == tokens_of(world, "cold") == fake_completion(prompt, 7, 4, VOCAB)


def test_chunks_after_a_hit_end_where_those_of_a_cold_run_end() -> None:
    world = world_of()
    serve(world, "short", PROMPT[: PAGE + 1])
    before = len(computed(world))
    assert serve(world, "long", PROMPT) == PAGE
    assert computed(world)[before:] == [(PAGE, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 39)]


@pytest.mark.parametrize("num_prompt", [PAGE - 1, PAGE, PAGE + 1, 21])
@pytest.mark.parametrize("num_output", range(1, 2 * PAGE + 2))
def test_a_growing_chat_reuses_all_full_pages_but_for_its_last_token(
    num_prompt: int, num_output: int
) -> None:
    """The last token's position may be written by a step that nobody reads: its page is not full yet."""
    world, prompt, reusable = world_of(), PROMPT[:num_prompt], 0
    for turn in range(3):
        serve(world, str(turn), prompt, max_tokens=num_output)
        assert tokens_of(world, str(turn)) == fake_completion(prompt, 7, num_output, VOCAB)
        known = len(prompt) + num_output
        prompt += (*tokens_of(world, str(turn)), 5, 6)
        assert cached(world, str(turn)) == reusable
        reusable = (known - 1) // PAGE * PAGE


def test_a_stop_token_leaves_the_same_pages_as_a_length() -> None:
    world = world_of()
    output = fake_completion(PROMPT, 7, 30, VOCAB)
    serve(world, "stopped", max_tokens=100, stop_token_ids=(output[23],))
    assert tokens_of(world, "stopped") == output[:24]
    assert serve(world, "next", (*PROMPT, *output[:24], 1)) == (40 + 24 - 1) // PAGE * PAGE


def test_a_running_rows_prompt_is_reused_from_its_first_token_on() -> None:
    world = world_of()
    world.submit(submission("first", PROMPT, max_tokens=100))
    while not tokens_of(world, "first"):
        world.turn()
    world.submit(submission("second", PROMPT))
    world.run()
    assert cached(world, "second") == 32
    assert tokens_of(world, "second") == tokens_of(world, "first")[:4]


@pytest.mark.parametrize(("turns", "found"), [(0, 0), (1, 16), (2, 32), (3, 48)])
def test_an_aborted_prefill_keeps_its_finished_pages(turns: int, found: int) -> None:
    world, prompt = world_of(make_config(prefill_ms=1.0)), tuple(range(200))
    world.submit(submission("aborted", prompt))
    for _ in range(turns):
        world.turn()
    world.cancel(RequestKey("acme", "aborted"), "client_gone")
    world.run()
    assert serve(world, "retry", prompt) == found
    assert tokens_of(world, "retry") == fake_completion(prompt, 7, 4, VOCAB)


def test_a_preempted_row_resumes_from_its_pages_and_is_charged_once() -> None:
    world = world_of(make_config(overcommit=4.0), memory(num_pages=12))
    for name in ("old", "new"):
        world.submit(submission(name, (ord(name[0]),) * 40, max_tokens=30))
    world.run()
    steps = world.tape.steps
    assert sum(sum(step.preemptions.values()) for step in steps) > 0
    hits = sum(step.prefix_hit_tokens.get("acme", 0) for step in steps)
    again = sum(step.recomputed_tokens.get("acme", 0) for step in steps)
    assert hits > again
    assert sum(step.prompt_tokens.get("acme", 0) for step in steps) == 80
    assert cached(world, "old") == cached(world, "new") == 0
    for name in ("old", "new"):
        assert tokens_of(world, name) == fake_completion((ord(name[0]),) * 40, 7, 30, VOCAB)


def test_tenants_with_equal_prompts_never_hit_each_other() -> None:
    world = world_of(make_config(make_tenant("acme"), make_tenant("beta")))
    assert serve(world, "a1", tenant="acme") == 0
    assert serve(world, "b1", tenant="beta") == 0
    assert serve(world, "a2", tenant="acme") == 32
    before = {name: world.scheduler.book[name].service for name in ("acme", "beta")}
    assert serve(world, "b2", tenant="beta") == 32
    assert world.scheduler.book["acme"].service == before["acme"]
    hits = [step.prefix_hit_tokens for step in world.tape.steps if step.prefix_hit_tokens]
    assert hits == [{"acme": 32}, {"beta": 32}]


def test_who_gets_the_name_of_a_tenant_that_is_gone_finds_nothing_of_what_it_sent() -> None:
    """And who had it all the time finds it."""
    acme, beta = make_tenant("acme"), make_tenant("beta")
    world = world_of(make_config(acme, beta))
    for name in ("acme", "beta"):
        serve(world, name, tenant=name)
    world.scheduler.set_tenants([beta], world.now)
    world.scheduler.set_tenants([acme, beta], world.now)
    assert serve(world, "another's", tenant="acme") == 0
    assert serve(world, "its own", tenant="acme") == 32
    assert serve(world, "still", tenant="beta") == 32


def test_equal_prompts_at_one_instant_all_end_alike_and_all_hit_the_second_time() -> None:
    world = world_of()
    for wave in range(2):
        for number in range(8):
            world.submit(submission(f"{wave}.{number}", PROMPT))
        world.run()
    outputs = {tuple(tokens_of(world, f"{w}.{n}")) for w in range(2) for n in range(8)}
    assert outputs == {tuple(fake_completion(PROMPT, 7, 4, VOCAB))}
    assert [cached(world, f"1.{n}") for n in range(8)] == [32] * 8


@pytest.mark.parametrize("when", ["first token", "later token", "chunk"])
def test_nothing_that_a_faulty_row_held_is_reused(when: str) -> None:
    position = {"first token": 39, "later token": 42, "chunk": 99}[when]
    is_bad = True

    def decode_fault(entry: DecodeEntry) -> str | None:
        return "numeric" if is_bad and entry.position == position else None

    def prefill_fault(chunk: PrefillChunk) -> str | None:
        return "numeric" if is_bad and when == "chunk" and chunk.end == 39 else None

    world = world_of(decode_fault=decode_fault, prefill_fault=prefill_fault)
    serve(world, "bad", max_tokens=9)
    is_bad = False
    assert world.scheduler.space.cached_pages == {"full": 0}
    assert serve(world, "good") == 0
    is_bad = True
    assert serve(world, "bad again", max_tokens=9) == 32
    is_bad = False
    assert serve(world, "after") == 0


def test_a_hit_after_eviction_is_a_miss() -> None:
    world = world_of(plan=memory(num_pages=12))
    serve(world, "first")
    assert world.scheduler.space.cached_pages == {"full": 5}
    serve(world, "large", tuple(range(90)))
    assert world.scheduler.space.num_evicted == 5
    assert serve(world, "again") == 0
    assert tokens_of(world, "again") == tokens_of(world, "first")


def test_cached_pages_are_room_for_rows_and_are_neither_used_nor_reserved() -> None:
    world = world_of(plan=memory(num_pages=20))
    for number in range(30):
        serve(world, str(number), tuple(range(number, number + 70)), max_tokens=20)
    space = world.scheduler.space
    assert (space.used_bytes, space.reserved_bytes, space.pages) == (0, 0, {"full": (0, 20)})
    assert space.cached_pages["full"] > 10
    assert serve(world, "whole", tuple(range(150)), max_tokens=10) == 0


def test_a_cached_prompt_token_costs_its_part_of_a_computed_one() -> None:
    world = world_of(make_config(prompt_weight=1.0, output_weight=2.0, cached_weight=0.25))
    tenant = world.scheduler.book["acme"]
    serve(world, "cold", max_tokens=1)
    assert tenant.service == 40 + 2
    serve(world, "warm", max_tokens=1)
    assert tenant.service == 40 + 2 + 0.25 * 32 + 8 + 2


def test_steps_and_requests_tell_what_was_looked_up_found_and_computed() -> None:
    world = world_of()
    serve(world, "cold")
    serve(world, "warm")
    queries, hits, found, fresh = (
        [counts["acme"] for step in world.tape.steps if (counts := getattr(step, name))]
        for name in ("prefix_query_tokens", "prefix_hit_tokens", "cached_tokens", "prompt_tokens")
    )
    assert (queries, hits, found, sum(fresh)) == ([40, 40], [32], [32], 48)
    assert [stats.cached_tokens for stats in world.tape.requests] == [0, 32]


def test_a_row_that_hits_and_leaves_before_any_step_has_it_was_never_in_a_plan() -> None:
    world = world_of(make_config(prefill_ms=1.0))
    serve(world, "warm", tuple(range(100)))
    world.submit(submission("other", range(300, 350)))
    world.submit(submission("hit", (*range(64), *range(200, 250))))
    world.turn()
    world.cancel(RequestKey("acme", "hit"))
    world.run()
    assert serve(world, "again", (*range(64), 1)) == 64


@pytest.mark.parametrize(
    ("cache", "fields", "note"),
    [
        (CacheConfig(), {}, "on"),
        (CacheConfig(prefix=False), {}, "off: cache.prefix is false"),
        (CacheConfig(), {"window": 20}, "on"),
    ],
)
def test_where_prefixes_are_off_status_says_why_and_nothing_is_kept(
    cache: CacheConfig, fields: dict[str, int], note: str
) -> None:
    world = world_of(msgspec.structs.replace(make_config(), cache=cache), memory(**fields))
    serve(world, "first")
    assert serve(world, "second") == (32 if note == "on" else 0)
    snapshot = SnapshotMaker(world.scheduler, world.runner).make(
        state="running", now=0.0, last_step_at=0.0, busy_since=0.0
    )
    assert snapshot.notes["prefix"] == note
    assert (sum(snapshot.cached_pages.values()) > 0) == (note == "on")
    assert any(step.prefix_query_tokens for step in world.tape.steps) == (note == "on")
