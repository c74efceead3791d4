"""Warm rows of models with every kind of state give what cold ones give, and compute less."""

from pathlib import Path

import pytest
from kind_runners import KINDS, runner_of, stride
from scheduling import Answer, World, answer_of, cached, make_config, serve, submission
from tiny_models import CHUNK, PAGE, prompt_of

from mlxd.caches.disk_store import DiskStore
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.persistence import PageCodec
from mlxd.scheduler.events import RequestKey

TOLERANCE = 1e-4


def fresh(kind: str, **config: object) -> World:
    runner_of(kind).reset()
    return World(make_config(**config), runner_of(kind))


def submit(world: World, request_id: str, prompt: tuple[int, ...], max_tokens: int = 6) -> None:
    """Greedily, with log-probabilities."""
    world.submit(submission(request_id, prompt, max_tokens=max_tokens, temperature=0.0, top_logprobs=20))


def check_cold(kind: str, prompt: tuple[int, ...], answer: Answer) -> None:
    tokens, logprobs = serve(fresh(kind), "cold", prompt, len(answer[0]))
    assert answer[0] == tokens
    for warm, cold in zip(answer[1], logprobs, strict=True):
        assert warm.logprob == pytest.approx(cold.logprob, abs=TOLERANCE)
        assert dict(warm.top) == pytest.approx(dict(cold.top), abs=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [PAGE, CHUNK, 2 * CHUNK + PAGE, 47])
def test_a_prompt_is_computed_from_its_last_page_on_the_second_time(kind: str, num_tokens: int) -> None:
    world, prompt = fresh(kind), prompt_of(num_tokens)
    serve(world, "cold", prompt)
    answer = serve(world, "warm", prompt)
    assert cached(world, "warm") == (num_tokens - 1) // stride(kind) * stride(kind)
    check_cold(kind, prompt, answer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_shared", [20, 3 * CHUNK + 3])
def test_a_third_prompt_begins_where_the_second_left_the_first(kind: str, num_shared: int) -> None:
    world, shared = fresh(kind), prompt_of(num_shared, seed=5)
    prompts = [shared + prompt_of(30 - n, seed=n) for n in range(3)]
    answers = [serve(world, str(n), prompt) for n, prompt in enumerate(prompts)]
    assert cached(world, "2") >= num_shared // stride(kind) * stride(kind)
    for prompt, answer in zip(prompts, answers, strict=True):
        check_cold(kind, prompt, answer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_chat_reuses_all_but_its_last_turn(kind: str) -> None:
    world, prompt, turns, known = fresh(kind), prompt_of(9), [], 0
    for turn in range(4):
        answer = serve(world, str(turn), prompt, max_tokens=11)
        turns.append((prompt, answer))
        assert cached(world, str(turn)) == max(0, known - 1) // stride(kind) * stride(kind)
        known = len(prompt) + 11
        prompt += (*answer[0], *prompt_of(5, seed=turn))
    for prompt, answer in turns:
        check_cold(kind, prompt, answer)


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_prefill_is_taken_up_where_it_was(kind: str) -> None:
    world, prompt = fresh(kind, prefill_ms=1.0), prompt_of(90)
    submit(world, "aborted", prompt)
    for _ in range(4):
        world.turn()
    world.cancel(RequestKey("acme", "aborted"), "client_gone")
    world.run()
    answer = serve(world, "retry", prompt)
    assert cached(world, "retry") >= 2 * CHUNK
    check_cold(kind, prompt, answer)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_begin_on_one_prefix_at_once_do_not_see_each_other(kind: str) -> None:
    world, shared = fresh(kind), prompt_of(2 * CHUNK, seed=3)
    prompts = [shared + prompt_of(n, seed=n) for n in (1, 2, 3, 5, 8)]
    serve(world, "document", (*shared, 1))
    for n, prompt in enumerate(prompts):
        submit(world, str(n), prompt)
    world.run()
    assert all(cached(world, str(n)) == 2 * CHUNK for n in range(5))
    for n, prompt in enumerate(prompts):
        check_cold(kind, prompt, answer_of(world, str(n)))


@pytest.mark.parametrize("kind", KINDS)
def test_under_pressure_of_pages_answers_stay_those_of_cold_runs(kind: str) -> None:
    """Rows are preempted and resume, cached pages are given up and written again."""
    prompts = [prompt_of(20, seed=n % 5) + prompt_of(5 + n, seed=n) for n in range(12)]
    small = runner_of(kind, _budget_of_rows(kind, 3))
    small.reset()
    world = World(make_config(overcommit=4.0), small)
    for n, prompt in enumerate(prompts):
        submit(world, str(n), prompt, 20)
    world.run()
    assert world.scheduler.space.num_evicted > 0
    for n in range(0, 12, 3):
        check_cold(kind, prompts[n], answer_of(world, str(n)))


def _budget_of_rows(kind: str, num_rows: int) -> int:
    memory = runner_of(kind).info.memory
    return sum(num_rows * g.spec.pages_for(60, CHUNK) * g.spec.page_bytes for g in memory.groups)


def start(kind: str, folder: Path) -> tuple[World, DiskTier]:
    """As after a restart: empty pools, and what is on disk."""
    runner = runner_of(kind)
    runner.reset()
    store = DiskStore(folder, 10**8)
    codec = PageCodec(runner.page_formats, store.secret)
    tier = DiskTier(store, codec, clock=lambda: 0.0, step_s=1.0)
    return World(make_config(), runner, disk=tier, secret=store.secret), tier


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_finds_on_disk_what_memory_knew(kind: str, tmp_path: Path) -> None:
    prompt = prompt_of(3 * CHUNK + 5)
    world, tier = start(kind, tmp_path)
    answer = serve(world, "cold", prompt)
    tier.close()
    chat = (*prompt, *answer[0], *prompt_of(4))
    for turn, tokens in {"warm": prompt, "chat": chat}.items():
        world, tier = start(kind, tmp_path)
        answer = serve(world, turn, tokens)
        tier.close()
        assert cached(world, turn) >= (len(prompt) - 1) // stride(kind) * stride(kind)
        assert tier.stats.pages["loaded"] > 0
        check_cold(kind, tokens, answer)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "mamba2", "llama/64"])
@pytest.mark.parametrize("damage", [b"", b"\0" * 64])
def test_bad_files_of_any_group_are_misses(kind: str, damage: bytes, tmp_path: Path) -> None:
    prompt = prompt_of(3 * CHUNK + 5)
    world, tier = start(kind, tmp_path)
    answer = serve(world, "cold", prompt)
    tier.close()
    for path in (tmp_path / "pages").iterdir():
        path.write_bytes(damage or path.read_bytes()[:-1])
    world, tier = start(kind, tmp_path)
    assert serve(world, "again", prompt) == answer
    tier.close()
    assert cached(world, "again") == tier.stats.pages["loaded"] == 0
    assert tier.stats.misses["truncated"] + tier.stats.misses["corrupt"] > 0
