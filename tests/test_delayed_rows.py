"""Rows packed on their way: what they are promised, who may have them, and what they draw."""

import dataclasses
import random
from pathlib import Path

import mlx.core as mx
import pytest
from cache_subjects import PAGE
from daemon_process import daemon_process, process_config, write_tiny_model
from msgspec.structs import replace
from scheduling import World, make_config, submission
from test_quantized_planes import OwnAttention
from tiny_models import CHUNK, PACKABLE, VOCAB, make_rig, prompt_of

from mlxd.batching.errors import SettingError
from mlxd.batching.memory import plan_for
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.model import load_model
from mlxd.batching.runner import ignore_progress
from mlxd.batching.sampling_params import SamplingParams
from mlxd.batching.selftest import fault_in, oracle_logprobs, prompts
from mlxd.batching.tuning import reachable_widths, typical_widths
from mlxd.caches.kinds import (
    UnsupportedCacheError,
    group_specs,
    inspect_layers,
    native_caches,
    packed_layers,
    round_caches,
)
from mlxd.caches.quantization import Quantization
from mlxd.caches.sizing import GroupSpec, plan_memory
from mlxd.scheduler.config import CacheConfig
from mlxd.scheduler.events import Finished, Tokens

FOUR_BITS = Quantization(bits=4, group_size=32, start=CHUNK + 1)


def specs(start: int, page: int = PAGE, chunk: int = CHUNK) -> tuple[GroupSpec, ...]:
    layers = packed_layers(
        inspect_layers(make_rig("mistral/64").model), Quantization(bits=4, group_size=32, start=start)
    )
    return group_specs(layers, page, chunk)


def test_a_kind_without_such_a_form_is_refused_by_its_layer() -> None:
    [layer, *_] = inspect_layers(make_rig("llama/64").model)
    layer = dataclasses.replace(layer, kind=dataclasses.replace(layer.kind, make_delayed=None))
    with pytest.raises(UnsupportedCacheError, match="layer 0 can only be packed with start: 0"):
        packed_layers([layer], FOUR_BITS)


@pytest.mark.parametrize(("start", "boundary"), [(1, 16), (16, 16), (17, 32), (40, 48)])
def test_the_boundary_is_a_whole_number_of_chunks(start: int, boundary: int) -> None:
    groups = specs(start)
    assert [g.name for g in groups] == [
        f"{name}:{form}" for name in ("sliding:7", "full") for form in ("dense", "packed")
    ]
    assert [(g.since, g.until) for g in groups] == [(0, boundary), (boundary, None)] * 2
    assert [g.bytes_per_token for g in groups] == [1024, 192] * 2


@pytest.mark.parametrize(
    ("num_tokens", "pages"), [(1, (1, 0)), (31, (8, 0)), (32, (8, 8)), (33, (8, 9)), (100, (8, 25))]
)
def test_a_row_is_promised_dense_pages_to_its_boundary_and_packed_ones_from_it(
    num_tokens: int, pages: tuple[int, int]
) -> None:
    _, _, dense, packed = specs(32)
    assert (dense.pages_for(num_tokens, CHUNK), packed.pages_for(num_tokens, CHUNK)) == pages


def test_dense_pages_and_their_promise_go_back_when_a_row_is_packed() -> None:
    rig = make_rig("mistral/64", "in_place", quantization=FOUR_BITS)
    world = World(make_config(), rig.runner)
    world.submit(submission("a", prompt_of(40), max_tokens=6, temperature=0.0, ignore_eos=True))
    held: list[tuple[int, ...]] = []
    promised: list[int] = []
    while not world.is_idle:
        world.turn()
        held.append(tuple(pages for pages, _ in world.scheduler.space.pages.values()))
        promised.append(world.scheduler.space.reserved_bytes)
    assert held[0] == (4, 0, 4, 0)
    assert held[1][2:] == (8, 8), "both forms, where it is packed"
    assert held[2][0] == held[2][2] == 0
    assert held[2][3] == 10
    assert promised[0] == promised[1] > promised[2] > 0
    world.scheduler.space.check_empty()


def tokens_by_request(world: World) -> dict[str, list[int]]:
    drawn: dict[str, list[int]] = {}
    for event in world.events:
        if isinstance(event, Tokens):
            drawn.setdefault(event.key.request_id, []).extend(event.token_ids)
    return drawn


def test_preempted_rows_draw_what_undisturbed_rows_draw() -> None:
    lengths = [45, 20, 30, 12, 41, 33]
    rig = make_rig("llama/64", "in_place", quantization=FOUR_BITS, max_model_len=80, budget_bytes=180_000)
    undisturbed = [rig.generate(prompt_of(n), 24).output for n in lengths]
    rig.runner.reset()
    world = World(make_config(max_rows=6, overcommit=4.0), rig.runner)
    for number, length in enumerate(lengths):
        item = submission(str(number), prompt_of(length), max_tokens=24, temperature=0.0, ignore_eos=True)
        world.submit(item)
    world.run()
    assert sum(sum(step.preemptions.values()) for step in world.tape.steps) > 0
    drawn = tokens_by_request(world)
    assert [drawn[str(number)] for number in range(len(lengths))] == undisturbed
    assert all(event.outcome == "length" for event in world.events if isinstance(event, Finished))


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_are_cancelled_in_any_state_move_no_other(seed: int) -> None:
    chance = random.Random(seed)
    rig = make_rig("mistral/64", "in_place", quantization=FOUR_BITS)
    world = World(make_config(max_rows=6), rig.runner)
    wanted: dict[str, int] = {}
    for number in range(14):
        length = chance.choice((1, 17, 29, 32, 33, 34, 60, 75))
        wanted[str(number)] = length
        item = submission(str(number), prompt_of(length), max_tokens=12, temperature=0.0, ignore_eos=True)
        world.submit(item)
        for _ in range(chance.choice((0, 1, 3))):
            world.turn()
        if number % 3 == 2:
            world.cancel(item.key)
    world.run()
    rig.runner.reset()
    for request_id, drawn in tokens_by_request(world).items():
        assert drawn == rig.generate(prompt_of(wanted[request_id]), 12).output[: len(drawn)]


def test_widths_to_trace_are_those_of_the_three_sorts_of_step() -> None:
    rig = make_rig("llama/64", quantization=FOUR_BITS, max_model_len=64)
    widths = reachable_widths(rig.memory)
    assert {(bool(dense), bool(packed)) for dense, packed in widths} == {
        (True, False),
        (True, True),
        (False, True),
    }
    assert widths[0] == (1, 0)
    assert typical_widths(rig.memory, 1) == (8, 0)


@pytest.mark.parametrize("family", PACKABLE)
def test_the_self_test_passes_with_rows_of_both_sorts(family: str) -> None:
    rig = make_rig(family, "in_place", quantization=FOUR_BITS)
    ragged = prompts(rig.memory, VOCAB)
    assert len(ragged[0]) > rig.memory.boundary == 32
    expected = [oracle_logprobs(rig.model, prompt, FOUR_BITS, rig.memory.boundary) for prompt in ragged]
    assert fault_in(rig.runner, rig.memory, expected, ragged, quantization=FOUR_BITS) is None


def test_the_self_test_finds_a_model_that_packed_numbers_do_not_reach() -> None:
    model = OwnAttention()
    layers = packed_layers(inspect_layers(model), FOUR_BITS)
    memory = plan_memory(
        group_specs(layers, PAGE, CHUNK),
        budget_bytes=2**20,
        weights_bytes=0,
        max_rows=4,
        max_model_len=64,
        chunk=CHUNK,
    )
    runner = MlxRunner(model, layers, memory, make_rig("llama/64").runner.info)
    runner.step.enabled = False
    ragged = prompts(memory, VOCAB)
    expected = [oracle_logprobs(model, prompt, FOUR_BITS, memory.boundary) for prompt in ragged]
    assert fault_in(runner, memory, expected, ragged, quantization=FOUR_BITS) is not None


@pytest.mark.parametrize(
    ("start", "max_model_len", "message"),
    [
        (
            61,
            64,
            "cache.quantization.start is 61 (64 in whole chunks of 16); "
            "rows have at most 64 positions, so none would be packed",
        ),
        (
            500,
            560,
            "cache.budget is 1048576: it has no room for the self-test, whose rows have 517, 6, 4 positions",
        ),
    ],
)
def test_a_start_that_no_row_reaches_is_refused(start: int, max_model_len: int, message: str) -> None:
    quantization = Quantization(bits=4, group_size=32, start=start)
    layers = packed_layers(inspect_layers(make_rig("llama/64").model), quantization)
    with pytest.raises(SettingError) as caught:
        plan_for(
            layers,
            weights_bytes=0,
            free_bytes=2**30,
            budget=2**20,
            page_size=PAGE,
            max_rows=4,
            max_model_len=max_model_len,
            chunk=CHUNK,
            checkpoints=0.0,
        )
    assert str(caught.value) == message


@pytest.mark.parametrize("page_size", [PAGE, CHUNK])
@pytest.mark.parametrize("max_rows", [1, 2])
def test_few_rows_may_be_packed_on_their_way(max_rows: int, page_size: int) -> None:
    layers = packed_layers(inspect_layers(make_rig("llama/64").model), FOUR_BITS)
    memory = plan_for(
        layers,
        weights_bytes=0,
        free_bytes=2**30,
        budget=2**24,
        page_size=page_size,
        max_rows=max_rows,
        max_model_len=128,
        chunk=CHUNK,
        checkpoints=0.0,
    )
    assert memory.boundary == 2 * CHUNK


def test_the_daemon_answers_as_mlx_lm_rounded_from_the_boundary_does(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=32)
    quantization = Quantization(bits=4, group_size=32, start=100)
    config = process_config(tmp_path, tmp_path)
    cache = CacheConfig(budget="64MiB", page_size=16, quantization=quantization)
    config = replace(config, cache=cache, scheduler=replace(config.scheduler, prefill_chunk=64))
    prompt = tuple(range(10, 120))
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with daemon_process(tmp_path, config) as daemon, daemon.client() as client:
        answer = client.generate(token_ids=prompt, sampling=sampling)
        assert "kv:delayed-quant:4:32:128:16" in str(client.status())

    model = load_model(tmp_path, ignore_progress).model
    caches, tokens = native_caches(model), list(prompt)
    for position in range(len(prompt) + 39):
        logits = model(mx.array([tokens[position : position + 1]]), cache=caches)[0, -1]
        if position + 1 == 128:
            round_caches(caches, quantization)
        if position + 1 >= len(prompt):
            tokens.append(int(mx.argmax(logits)))
    assert answer.token_ids == tuple(tokens[len(prompt) :])
