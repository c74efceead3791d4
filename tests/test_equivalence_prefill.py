"""Prefill: whoever shares the forward, a row's keys and values are those it computes alone."""

import mlx.core as mx
import pytest
from tiny_models import CHUNK, FAMILIES, PAGE, WATCHED, Rig, make_rig, oracle, prompt_of, stored_bytes

from mlxd.batching import prefill, timing, tuning
from mlxd.batching.mlx_step import MlxStep
from mlxd.batching.plan import PrefillChunk, StepPlan
from mlxd.batching.prefill import Padding, cohorts
from mlxd.batching.row import Row
from mlxd.caches.quantization import Quantization


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cohort_stores_what_its_rows_store_one_by_one(family: str) -> None:
    """Lengths that share padded forwards, bit for bit; a prompt of one token has nothing to prefill."""
    prompts = [prompt_of(length) for length in (1, 4, 5, 5, 6, 8, 9, 9)]
    stored, tokens = [], []
    for together in (True, False):
        rig = make_rig(family)
        driver = rig.driver()
        rows = [driver.join(prompt, WATCHED) for prompt in prompts]
        for group in [rows] if together else [[row] for row in rows]:
            driver.prefill(group)
        stored.append(
            [stored_bytes(rig, row, len(row.prompt) - 1) if row.prompt[1:] else b"" for row in rows]
        )
        driver.decode()
        tokens.append([row.output for row in rows])

    assert stored[0] == stored[1]
    assert tokens[0] == tokens[1]


def chunk_of(length: int, start: int = 0) -> PrefillChunk:
    row = Row(0, WATCHED, 0, (0,) * (start + length + 1), [], ())
    return PrefillChunk(row, start, start + length, (0,) * length)


@pytest.mark.parametrize(
    ("lengths", "padded", "expected"),
    [
        pytest.param([8, 8], True, [[8, 8]], id="equal lengths share"),
        pytest.param([8, 4], True, [[8, 4]], id="up to twice the length is padded"),
        pytest.param([8, 3], True, [[8], [3]], id="more is not"),
        pytest.param([8, 8, 8], True, [[8, 8], [8]], id="no more padded tokens than a chunk"),
        pytest.param([8, 8], False, [[8], [8]], id="a model that must see no padding"),
    ],
)
def test_which_chunks_share_a_forward(lengths: list[int], padded: bool, expected: list[list[int]]) -> None:
    formed = cohorts([chunk_of(length) for length in lengths], CHUNK, padded=padded)
    assert [[chunk.num_tokens for chunk in cohort] for cohort in formed] == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([8] * 6, [[8] * 6], id="six rows of eight are eight"),
        pytest.param([16] * 3, [[16] * 3], id="three are four"),
        pytest.param([17] * 3, [[17] * 2, [17]], id="four would be more than a chunk"),
        pytest.param([9, 9, 9, 9, 9, 9], [[9] * 4, [9] * 2], id="of whole pages"),
    ],
)
def test_rows_that_are_padding_count_as_tokens_of_a_chunk(
    lengths: list[int], expected: list[list[int]]
) -> None:
    chunk = 64
    formed = cohorts([chunk_of(n) for n in lengths], chunk, padded=True, padding=Padding(PAGE, chunk))
    assert [[chunk.num_tokens for chunk in cohort] for cohort in formed] == expected


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_padded_forwards_have_few_numbers_of_rows(num_rows: int, padded: int) -> None:
    assert Padding(page_size=4, chunk=48).rows(num_rows) == padded


@pytest.mark.parametrize(
    ("num_tokens", "start", "length"),
    [(1, 0, 4), (4, 0, 4), (9, 0, 12), (48, 0, 48), (1, 48, 4), (9, 48, 16), (33, 48, 48), (48, 48, 48)],
)
def test_padded_forwards_have_few_lengths(num_tokens: int, start: int, length: int) -> None:
    assert Padding(page_size=4, chunk=48).length(num_tokens, start) == length


def test_a_chunk_with_history_goes_alone() -> None:
    chunks = [chunk_of(8), chunk_of(8, start=16), chunk_of(8, start=16)]
    assert sorted(len(cohort) for cohort in cohorts(chunks, 4 * CHUNK, padded=True)) == [1, 1, 1]


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gpt_oss"])
def test_a_long_prompt_holds_its_window_and_a_chunk(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five windows and more, chunk by chunk: the sliding group's pages stay bounded, the answer right."""
    rig = make_rig(family, max_model_len=128)
    window = FAMILIES[family].window
    assert window is not None
    prompt = prompt_of(5 * window + CHUNK + 3)
    sliding = next(i for i, group in enumerate(rig.memory.groups) if group.spec.window == window)
    held: list[int] = []

    def note_pages(plan: StepPlan) -> MlxStep:
        held.append(len(row.tables[sliding].pages))
        return launch(plan)

    launch = rig.runner.launch
    monkeypatch.setattr(rig.runner, "launch", note_pages)
    driver = rig.driver()
    row = driver.join(prompt, WATCHED)
    driver.prefill()
    num_chunks = len(held)
    for _ in range(12):
        driver.decode()

    window_pages = -(-window // PAGE) + 1
    most = window_pages + CHUNK // PAGE
    assert num_chunks == -(-(len(prompt) - 1) // CHUNK)
    assert max(held) <= most == rig.memory.groups[sliding].spec.pages_for(len(prompt) + 12, CHUNK)
    assert max(held[num_chunks + 1 :]) <= window_pages
    assert tuple(row.output) == oracle(family, prompt, 12).tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_padded_to_whole_pages_draw_what_mlx_lm_draws(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA; with a history, a power of two of pages, more than the row may hold."""
    monkeypatch.setattr(prefill, "plans_by_shape", lambda: True)
    rig = make_rig(family)
    shapes = note_shapes(rig, monkeypatch)
    prompts = [
        prompt_of(length, seed=length)
        for length in (2, 3, 4, 5, 5, PAGE + 3, CHUNK + PAGE + 2, CHUNK + 2 * PAGE + 2, 3 * CHUNK)
    ]
    driver = rig.driver()
    rows = [driver.join(prompt, WATCHED) for prompt in prompts]
    driver.prefill()
    for _ in range(6):
        driver.decode()
    assert all(num_rows in (1, 2, 4) and length % PAGE == 0 for num_rows, length in shapes)
    assert (4, PAGE) in shapes, "three rows, and one of padding"
    for prompt, row in zip(prompts, rows, strict=True):
        assert tuple(row.output) == oracle(family, prompt, 6).tokens


@pytest.mark.parametrize(
    ("plans", "limit_s", "has_time"), [(True, 60, True), (True, 0, False), (False, 60, False)]
)
def test_chunks_are_planned_at_start_where_attention_is(
    plans: bool, limit_s: float, has_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prefill, tuning):
        monkeypatch.setattr(module, "plans_by_shape", lambda: plans)
    rig = make_rig("llama")
    shapes = note_shapes(rig, monkeypatch)
    tuning.plan_prompts(rig.runner, rig.memory, timing.TimeBox(limit_s))
    alone = [(1, 4), (1, 8), (1, 12), (1, 16)]
    together = [(2, 4), (2, 8), (4, 4)]
    deeper = [(1, 16)] * 8
    assert shapes == ([*alone, *together, *deeper] if has_time else [])


@pytest.mark.parametrize("start", [0, 16])
def test_packed_prompts_padded_to_whole_pages_draw_what_they_draw_without(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = []
    for pads in (False, True):
        monkeypatch.setattr(prefill, "plans_by_shape", lambda pads=pads: pads)
        quantization = Quantization(bits=8, group_size=32, start=start)
        driver = make_rig("llama/64", "in_place", quantization=quantization, page_size=16).driver()
        rows = [driver.join(prompt_of(length, seed=length), WATCHED) for length in (2, 19, 40, 70)]
        driver.prefill()
        for _ in range(6):
            driver.decode()
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]


def note_shapes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows, and tokens of each, of every prefill forward from now on."""
    shapes: list[tuple[int, int]] = []
    forward = type(rig.model).__call__

    def noted(self: object, tokens: mx.array, *args: object, **kwargs: object) -> mx.array:
        if tokens.shape[1] > 1:
            rows, length = tokens.shape
            shapes.append((rows, length))
        result: mx.array = forward(self, tokens, *args, **kwargs)
        return result

    monkeypatch.setattr(type(rig.model), "__call__", noted)
    return shapes
