"""Rows of a sampling batch through steps, joins and leaves."""

from collections import Counter
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlxd.batching.plan import DecodeEntry, RowResult
from mlxd.batching.row import Row
from mlxd.batching.sampler import sample
from mlxd.batching.sampler_state import SamplingBatch, uniforms
from mlxd.batching.sampling_params import SamplingParams

VOCAB = 300
PENALISED = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25
)
MIXED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.2, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05, top_logprobs=3),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias={3: 2.5, 299: -100.0, 7: 1.0}, frequency_penalty=1.0),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, logit_bias={0: 5.0}, seed=3),
)
Sampler = Callable[..., list[mx.array]]


def _row(row_id: int, params: SamplingParams, prompt: Sequence[int] = (1, 2, 3)) -> Row:
    return Row(row_id, params, 1000 + row_id, prompt, [], ())


def _logits(row: Row, index: int) -> np.ndarray:
    """[VOCAB] float32: a model that looks at the row and the position alone."""
    return np.random.default_rng((row.row_id, index)).normal(size=VOCAB).astype(np.float32) * 2


class Loop:
    """Steps rows as a pipelined runner does: tokens stay on the device, the rows' host lists stay empty."""

    def __init__(self, sampler: Sampler = sample) -> None:
        self._sampler = sampler
        self._batch: SamplingBatch | None = None
        self._drawn: dict[int, mx.array] = {}
        self._launched: Counter[int] = Counter()
        self.results: dict[int, list[RowResult]] = {}

    def step(self, rows: Sequence[Row], bucket: int) -> None:
        entries = [DecodeEntry(row, 0, self._launched[row.row_id], None) for row in rows]
        if self._batch is None or not self._batch.serves(entries, bucket):
            self._batch = SamplingBatch(entries, bucket, VOCAB, self._batch)
        logits = np.zeros((bucket, VOCAB), np.float32)
        for slot, entry in enumerate(entries):
            logits[slot] = _logits(entry.row, entry.output_index)
        known = [self._drawn.get(row.row_id, mx.array(row.prompt[-1], mx.int32)) for row in rows]
        tokens_in = mx.stack(known + [mx.array(0, mx.int32)] * (bucket - len(rows)))
        inputs = self._batch.inputs(entries)
        draw = self._batch.commit(
            entries, self._sampler(self._batch.shape, mx.array(logits), tokens_in, inputs)
        )
        for slot, row in enumerate(rows):
            self._drawn[row.row_id] = draw.tokens[slot]
            self._launched[row.row_id] += 1
        for result in draw.results():
            self.results.setdefault(result.row_id, []).append(result)


def _alone(row: Row, num_steps: int) -> list[RowResult]:
    loop = Loop()
    fresh = Row(row.row_id, row.sampling, row.seed, row.prompt, [], ())
    for _ in range(num_steps):
        loop.step([fresh], 1)
    return loop.results[row.row_id]


def test_a_row_draws_the_same_whoever_shares_its_batch() -> None:
    rows = [_row(i, params) for i, params in enumerate(MIXED)]
    loop = Loop()
    for _ in range(12):
        loop.step(rows, 8)
    for row in rows:
        assert loop.results[row.row_id] == _alone(row, 12)


def test_joins_leaves_reordering_and_buckets_change_no_rows_tokens() -> None:
    rows = [_row(i, params) for i, params in enumerate(MIXED)]
    random = np.random.default_rng(5)
    loop = Loop()
    members: list[Row] = []
    waiting = rows.copy()
    for step in range(40):
        if waiting and step % 3 == 0:
            members.append(waiting.pop())
        if step % 4 == 0:
            random.shuffle(members)
        if step > 25 and step % 5 == 0:
            members.pop()
        loop.step(members, 8 if len(members) > 4 or step % 2 else 4)
    for row in rows:
        assert loop.results[row.row_id] == _alone(row, len(loop.results[row.row_id]))


def test_compiled_is_bit_equal_to_eager_and_traced_once() -> None:
    traces = []

    def build(shape, logits, tokens_in, inputs):
        if not compiled:

            def traced(logits, tokens_in, inputs):
                traces.append(shape)
                return sample(shape, logits, tokens_in, inputs)

            compiled.append(mx.compile(traced))
        return compiled[0](logits, tokens_in, inputs)

    compiled: list[Sampler] = []
    fast, plain = Loop(build), Loop()
    for loop in (fast, plain):
        rows = [_row(i, params) for i, params in enumerate(MIXED)]
        for _ in range(10):
            loop.step(rows, 8)
    assert fast.results == plain.results
    assert len(traces) == 1


def _penalised_greedy(row: Row, num_steps: int) -> list[int]:
    params, tokens = row.sampling, []
    for index in range(num_steps):
        scores = _logits(row, index).astype(np.float64)
        counts = Counter(tokens)
        for token in set(row.prompt) | set(tokens):
            down = scores[token] / params.repetition_penalty
            scores[token] = down if scores[token] > 0 else scores[token] * params.repetition_penalty
        for token, count in counts.items():
            scores[token] -= params.presence_penalty + params.frequency_penalty * count
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        tokens.append(int(np.argmax(scores)))
    return tokens


@pytest.mark.parametrize(
    "params",
    [
        PENALISED,
        SamplingParams(temperature=0.0, repetition_penalty=3.0),
        SamplingParams(temperature=0.0, repetition_penalty=0.5),
        SamplingParams(temperature=0.0, presence_penalty=-2.0),
        SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias={5: 100.0}),
    ],
)
def test_penalties_follow_their_definition(params: SamplingParams) -> None:
    row = _row(1, params, prompt=[*range(0, VOCAB, 3), 3, 3])
    assert [result.token for result in _alone(row, 60)] == _penalised_greedy(row, 60)


def test_a_resumed_row_counts_the_tokens_it_had() -> None:
    row = _row(1, PENALISED, prompt=range(50))
    expected = _penalised_greedy(row, 40)
    resumed = Row(1, PENALISED, row.seed, row.prompt, expected[:25], ())
    batch = None
    for index in range(25, 40):
        entries = [DecodeEntry(resumed, 0, index, expected[index - 1])]
        batch = batch or SamplingBatch(entries, 1, VOCAB)
        logits, fed = mx.array(_logits(row, index)[None]), mx.array([expected[index - 1]])
        draw = batch.commit(entries, sample(batch.shape, logits, fed, batch.inputs(entries)))
        assert draw.tokens.item() == expected[index]


def test_a_step_can_be_asked_for_again_until_it_is_committed() -> None:
    entries = [DecodeEntry(_row(1, MIXED[5]), 0, 0, None)]
    batch = SamplingBatch(entries, 2, VOCAB)
    first, second = batch.inputs(entries), batch.inputs(entries)
    assert all(mx.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("params", "label"),
    [
        (SamplingParams(temperature=0.0, top_p=0.5, top_k=7), "greedy"),
        (SamplingParams(temperature=1.0, top_k=1, top_p=0.5), "greedy"),
        (SamplingParams(temperature=1e-9), "greedy"),
        (SamplingParams(), "draw"),
        (SamplingParams(min_p=0.1), "draw"),
        (SamplingParams(top_p=0.5), "draw+top_p"),
        (SamplingParams(top_k=5), "draw+top_k"),
        (SamplingParams(temperature=0.0, frequency_penalty=0.1, top_logprobs=0), "penalties+logprobs"),
        (SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(5), 1.0)), "bias8"),
        (SamplingParams(temperature=0.0, logit_bias={1: 1.0}), "bias1"),
    ],
)
def test_the_graph_holds_only_what_a_row_can_feel(params: SamplingParams, label: str) -> None:
    assert SamplingBatch([DecodeEntry(_row(1, params), 0, 0, 1)], 2, VOCAB).shape.label == label


def test_results_hold_what_each_row_asked_for() -> None:
    wanted = (None, 0, 2, 20)
    rows = [_row(i, SamplingParams(temperature=0.0, top_logprobs=n)) for i, n in enumerate(wanted)]
    loop = Loop()
    loop.step(rows, 4)
    for row, number in zip(rows, wanted, strict=True):
        (result,) = loop.results[row.row_id]
        if number is None:
            assert result.logprobs is None
            continue
        assert result.logprobs is not None
        exact = _logits(row, 0).astype(np.float64)
        exact -= np.log(np.exp(exact).sum())
        order = np.argsort(-exact)[:number]
        assert [token for token, _ in result.logprobs.top] == order.tolist()
        assert [value for _, value in result.logprobs.top] == pytest.approx(exact[order], abs=1e-5)
        assert result.logprobs.logprob == pytest.approx(exact.max(), abs=1e-5)


def test_a_faulty_row_is_reported_and_its_siblings_are_not() -> None:
    entries = [DecodeEntry(_row(i, SamplingParams(temperature=0.0)), 0, 0, 1) for i in range(3)]
    batch = SamplingBatch(entries, 4, VOCAB)
    logits = np.zeros((4, VOCAB), np.float32)
    logits[1, 5] = np.nan
    logits[3] = np.nan
    draw = batch.commit(entries, sample(batch.shape, mx.array(logits), mx.zeros(4, mx.int32), []))
    assert [result.fault for result in draw.results()] == [None, "numeric", None]


def test_uniforms_depend_on_seed_and_index_alone() -> None:
    seeds, indices = [0, 1, 2**64 - 1, 5], [0, 3, 2**31, 7]
    together = uniforms(seeds, indices)
    assert together.tolist() == [uniforms([s], [i]).item() for s, i in zip(seeds, indices, strict=True)]


@pytest.mark.parametrize("vary", ["seed", "index"])
def test_uniforms_fill_the_unit_interval_evenly(vary: str) -> None:
    numbers, constant = list(range(64_000)), [3] * 64_000
    drawn = uniforms(numbers, constant) if vary == "seed" else uniforms(constant, numbers)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() <= 1 - 2**-24
    counts, _ = np.histogram(drawn, bins=64, range=(0, 1))
    # 63 degrees of freedom: 1 in 1,000 fair generators exceeds 103.4.
    assert np.square(counts - 1000).sum() / 1000 < 103.4
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.015
