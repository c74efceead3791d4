"""A warm row on MLX gives what a cold one gives, bit for bit, and computes less."""

from typing import Literal

import pytest
from scheduling import World, answer_of, cached, make_config, serve, submission
from tiny_models import CHUNK, PAGE, make_rig, prompt_of

from mlxd.caches.quantization import Quantization

FAMILIES = ("llama", "qwen2", "qwen3", "phi3")


def num_computed(world: World) -> int:
    return sum(sum(step.prompt_tokens.values()) for step in world.tape.steps)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["gathered", "in_place"])
def test_warm_equals_cold_bit_for_bit_wherever_the_shared_part_ends(family: str, attention: str) -> None:
    rig = make_rig(family, attention)
    document = prompt_of(3 * CHUNK, seed=5)
    warm = World(make_config(), rig.runner)
    serve(warm, "document", document)
    before = num_computed(warm)
    prompts = [document[:n] + prompt_of(5, seed=n) for n in (PAGE, CHUNK - 1, CHUNK, CHUNK + PAGE, 47)]
    answers = [serve(warm, str(i), prompt) for i, prompt in enumerate(prompts)]
    reused = [cached(warm, str(i)) for i in range(len(prompts))]
    assert reused == [PAGE, CHUNK - PAGE, CHUNK, CHUNK + PAGE, 44]
    assert num_computed(warm) - before == sum(map(len, prompts)) - sum(reused)
    for prompt, answer in zip(prompts, answers, strict=True):
        rig.runner.reset()
        assert serve(World(make_config(), rig.runner), "cold", prompt) == answer


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_pages_are_reused_bit_for_bit(bits: Literal[4, 8]) -> None:
    rig = make_rig("llama/64", "in_place", quantization=Quantization(bits=bits, group_size=32))
    document = prompt_of(2 * CHUNK, seed=5)
    warm = World(make_config(), rig.runner)
    serve(warm, "document", document)
    prompt = document[: CHUNK + PAGE] + prompt_of(7)
    answer = serve(warm, "warm", prompt)
    assert cached(warm, "warm") == CHUNK + PAGE
    rig.runner.reset()
    assert serve(World(make_config(), rig.runner), "cold", prompt) == answer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_that_grows_on_its_own_answers_equals_cold_runs_bit_for_bit(family: str) -> None:
    """Pages of answers were computed by decode steps; a cold run computes the same positions in chunks."""
    rig = make_rig(family)
    chat = World(make_config(), rig.runner)
    prompt, turns, reusable = prompt_of(9), [], 0
    for turn in range(4):
        answer = serve(chat, str(turn), prompt, max_tokens=9)
        turns.append((prompt, answer))
        assert cached(chat, str(turn)) == reusable
        reusable = (len(prompt) + 9 - 1) // PAGE * PAGE
        prompt += (*answer[0], *prompt_of(4, seed=turn))
    for prompt, answer in turns:
        rig.runner.reset()
        assert serve(World(make_config(), rig.runner), "cold", prompt, max_tokens=9) == answer


def test_rows_that_share_pages_at_once_do_not_see_each_other() -> None:
    rig = make_rig("llama")
    document = prompt_of(2 * CHUNK, seed=3)
    prompts = [document + prompt_of(n, seed=n) for n in (1, 2, 3, 5, 8)]
    world = World(make_config(), rig.runner)
    serve(world, "document", (*document, 1))
    for i, prompt in enumerate(prompts):
        world.submit(submission(str(i), prompt, max_tokens=8, temperature=0.0, top_logprobs=20))
    world.run()
    assert [cached(world, str(i)) for i in range(5)] == [2 * CHUNK] * 5
    for i, prompt in enumerate(prompts):
        rig.runner.reset()
        alone = serve(World(make_config(), rig.runner), "cold", prompt, max_tokens=8)
        assert answer_of(world, str(i))[0] == alone[0]


def test_preempted_rows_resume_from_their_pages_with_the_tokens_of_an_undisturbed_run() -> None:
    rig = make_rig("llama", budget_bytes=15 * PAGE * 2 * 2 * 2 * 8 * 4)
    prompts = [prompt_of(20, seed=n) for n in range(4)]
    world = World(make_config(overcommit=8.0), rig.runner)
    for i, prompt in enumerate(prompts):
        world.submit(submission(str(i), prompt, max_tokens=20, temperature=0.0, top_logprobs=20))
    world.run()
    assert any(step.preemptions for step in world.tape.steps)
    assert any(step.prefix_hit_tokens for step in world.tape.steps)
    for i, prompt in enumerate(prompts):
        rig.runner.reset()
        assert answer_of(world, str(i))[0] == serve(World(make_config(), rig.runner), "x", prompt, 20)[0]
