"""What the sampler's graph is fed, row by row, and how its answers are read."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxd.batching.plan import DecodeEntry, RowResult, TokenLogprobs
from mlxd.batching.row import Row
from mlxd.batching.sampler import SamplingShape
from mlxd.batching.sampling_params import GREEDY, SamplingParams

_MIN_TEMPERATURE = 1e-5
"""Below it a draw is greedy in all but name, and scores over temperature leave float32."""


def uniforms(seeds: Sequence[int], output_indices: Sequence[int]) -> npt.NDArray[np.float32]:
    """One number in [0, 1 - 2^-24] for each (64-bit seed, output index), multiples of 2^-24.

    A counter hash: no generator has state, so a draw can be repeated in any batch, order or process.
    """
    stream = _mix(np.array(seeds, dtype=np.uint64))
    counter = np.array(output_indices, dtype=np.uint64) + np.uint64(1)
    bits = _mix(stream + counter * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014); wraps modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Draw:
    """One step's sampled tokens, on the device."""

    __slots__ = ("_arrays", "_entries")

    def __init__(self, entries: Sequence[DecodeEntry], arrays: dict[str, mx.array]) -> None:
        self._entries = tuple(entries)
        self._arrays = arrays

    @property
    def tokens(self) -> mx.array:
        """[B] int32, the next step's input."""
        return self._arrays["tokens"]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that `results` reads, to be evaluated with the step."""
        return tuple(self._arrays.values())

    def results(self) -> tuple[RowResult, ...]:
        """One a row, in the entries' order; waits for the device."""
        read = {name: np.asarray(array) for name, array in self._arrays.items()}
        return tuple(_result(entry.row, i, read) for i, entry in enumerate(self._entries))


def _result(row: Row, slot: int, read: dict[str, npt.NDArray[Any]]) -> RowResult:
    if not read["ok"][slot]:
        return RowResult(row.row_id, 0, fault="numeric")
    token, logprobs = int(read["tokens"][slot]), None
    if row.sampling.top_logprobs is not None:
        top = _likeliest(read["top_ids"][slot].tolist(), read["top_logprobs"][slot].tolist())
        logprobs = TokenLogprobs(float(read["logprob"][slot]), top[: row.sampling.top_logprobs])
    return RowResult(row.row_id, token, logprobs)


def _likeliest(ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    """Likeliest first, ties by id; barred tokens (-inf) are not reported."""
    finite = [pair for pair in zip(ids, logprobs, strict=True) if math.isfinite(pair[1])]
    return tuple(sorted(finite, key=lambda pair: (-pair[1], pair[0])))


class SamplingBatch:
    """Sampling parameters and state of the rows of one batch, as device arrays padded to the bucket.

    Built anew whenever the batch's rows or bucket change; rows past the entries are greedy and stand for
    nobody. Only a batch with penalties has state: how often each row generated each token. It stays on the
    device, since the host may not know a row's latest token yet: that token is an input of the step and is
    counted in the graph.

    Attributes:
        shape: which parts the rows need; part of the decode graph's key.
    """

    def __init__(
        self,
        entries: Sequence[DecodeEntry],
        bucket: int,
        vocab_size: int,
        previous: "SamplingBatch | None" = None,
    ) -> None:
        """Take the rows of `entries`, in their order.

        Args:
            bucket: rows of the decode graph, at least len(entries).
            vocab_size: width of the logits; every token id of the rows is below it.
            previous: the batch before this one; rows that go on take their counts from it.
        """
        self._entries = tuple(entries)
        self._bucket = bucket
        self._vocab_size = vocab_size
        self._row_ids = tuple(entry.row.row_id for entry in entries)
        self._next_index: dict[int, int] = {}
        params = [_effective(entry.row.sampling) for entry in entries]
        params += [GREEDY] * (bucket - len(entries))
        self.shape = _shape_of(params)
        self._arrays = self._parameters(params)
        if self.shape.penalties:
            self._arrays |= self._penalty_state(previous)

    def serves(self, entries: Sequence[DecodeEntry], bucket: int) -> bool:
        """Whether these are its rows, in its order and bucket."""
        return bucket == self._bucket and self._row_ids == tuple(entry.row.row_id for entry in entries)

    def inputs(self, entries: Sequence[DecodeEntry]) -> list[mx.array]:
        """Arrays for `sample` in this step. Changes nothing: a step that failed can be asked for again."""
        step: dict[str, mx.array] = {}
        if self.shape.penalties:
            # The input of output 0 is the prompt's last token, which was not generated.
            step["counted"] = self._padded(np.array([e.output_index > 0 for e in entries], np.int32))
        if self.shape.draw:
            numbers = uniforms([e.row.seed for e in entries], [e.output_index for e in entries])
            step["uniforms"] = self._padded(numbers)
        return [step[name] if name in step else self._arrays[name] for name in self.shape.inputs]

    def commit(self, entries: Sequence[DecodeEntry], outputs: Sequence[mx.array]) -> Draw:
        """Adopt what `sample` returned for `inputs(entries)`: its counts become this batch's state.

        Call it before the evaluation, and hold no list of inputs across it, or the counts are copied.
        """
        made = dict(zip(self.shape.outputs, outputs, strict=True))
        if self.shape.penalties:
            self._arrays["counts"] = made.pop("counts")
            self._next_index = {e.row.row_id: e.output_index + 1 for e in entries}
        return Draw(entries, made)

    def _parameters(self, params: Sequence[SamplingParams]) -> dict[str, mx.array]:
        """Arrays that stay as they are while the rows do; only those in the shape."""
        columns = {
            "temperature": mx.array([p.temperature for p in params]),
            "min_p": mx.array([p.min_p for p in params]),
            "top_k": mx.array(
                [min(p.top_k or self._vocab_size, self._vocab_size) for p in params], mx.uint32
            ),
            "top_p": mx.array([p.top_p for p in params]),
            "repetition": mx.array([p.repetition_penalty for p in params]),
            "presence": mx.array([p.presence_penalty for p in params]),
            "frequency": mx.array([p.frequency_penalty for p in params]),
        }
        if self.shape.bias_width:
            ids = np.zeros((self._bucket, self.shape.bias_width), np.int32)
            bias = np.zeros(ids.shape, np.float32)
            for i, p in enumerate(params):
                ids[i, : len(p.logit_bias)] = list(p.logit_bias.keys())
                bias[i, : len(p.logit_bias)] = list(p.logit_bias.values())
            columns |= {"bias_ids": mx.array(ids), "bias": mx.array(bias)}
        return {name: columns[name] for name in self.shape.inputs if name in columns}

    def _penalty_state(self, previous: "SamplingBatch | None") -> dict[str, mx.array]:
        """Counts of rows that go on are gathered from `previous`; a new row's come from its token lists."""
        sources: list[int] = []
        prompts: dict[int, Sequence[int]] = {}
        outputs: dict[int, Sequence[int]] = {}
        for slot, entry in enumerate(self._entries):
            source = previous._slot_of(entry) if previous is not None else -1
            sources.append(source)
            if source < 0 and _is_penalised(entry.row.sampling):
                # The step's own input is counted in the graph, so the host need not know it.
                num_known = max(0, entry.output_index - 1)
                assert len(entry.row.output) >= num_known, f"row {entry.row.row_id} lacks generated tokens"
                prompts[slot], outputs[slot] = entry.row.prompt, entry.row.output[:num_known]
        counts = self._carried("counts", mx.int32, sources, previous)
        seen = self._carried("prompt_seen", mx.bool_, sources, previous)
        if prompts:
            counts = counts.at[_cells(outputs)].add(1)
            seen = seen.at[_cells(prompts)].maximum(mx.array(True))
        return {"counts": counts, "prompt_seen": seen}

    def _slot_of(self, entry: DecodeEntry) -> int:
        """Where the row's state lies, if it has counted all but this entry's input; else -1."""
        if self._next_index.get(entry.row.row_id) != entry.output_index:
            return -1
        return self._row_ids.index(entry.row.row_id)

    def _carried(
        self, name: str, dtype: mx.Dtype, sources: Sequence[int], previous: "SamplingBatch | None"
    ) -> mx.array:
        """Rows `sources` of the previous batch's state, zeros for -1 and for rows past them; [bucket, V]."""
        if previous is None or all(source < 0 for source in sources):
            return mx.zeros((self._bucket, self._vocab_size), dtype)
        index = self._padded(np.array(sources, np.int32), fill=-1)
        gathered = mx.take(previous._arrays[name], mx.maximum(index, 0), axis=0)
        return mx.where(index[:, None] >= 0, gathered, mx.zeros((), dtype))

    def _padded(self, values: npt.NDArray[Any], fill: int = 0) -> mx.array:
        """One number a row and `fill` for the rest of the bucket, [bucket] of the values' type."""
        return mx.array(np.pad(values, (0, self._bucket - len(values)), constant_values=fill))


def _cells(tokens: Mapping[int, Sequence[int]]) -> tuple[mx.array, mx.array]:
    """(row, token) index of each token of each row, two int32 arrays."""
    rows = np.repeat(np.array(list(tokens), np.int32), [len(ids) for ids in tokens.values()])
    return mx.array(rows), mx.array(np.concatenate([np.array(ids, np.int32) for ids in tokens.values()]))


def _effective(params: SamplingParams) -> SamplingParams:
    """The same draws with the fewest parts: a row that can only take its likeliest token needs no filters."""
    if params.temperature >= _MIN_TEMPERATURE and params.top_k != 1:
        return params
    return SamplingParams(
        temperature=0.0,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        top_logprobs=params.top_logprobs,
    )


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _shape_of(params: Sequence[SamplingParams]) -> SamplingShape:
    widest = max(len(p.logit_bias) for p in params)
    return SamplingShape(
        draw=any(p.temperature > 0 for p in params),
        top_k=any(p.top_k > 0 for p in params),
        top_p=any(p.top_p < 1 for p in params),
        penalties=any(_is_penalised(p) for p in params),
        bias_width=1 << (widest - 1).bit_length() if widest else 0,
        logprobs=any(p.top_logprobs is not None for p in params),
    )
