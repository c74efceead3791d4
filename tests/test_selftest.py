"""How far the self-test lets two right ways to compute differ, and what it tells meanwhile."""

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx
import pytest
from tiny_models import make_rig
from tiny_zoo import VOCAB, zoo_model

from mlxd.batching import prefill
from mlxd.batching.plan import PrefillChunk
from mlxd.batching.selftest import Work, fault_in, oracle_logprobs, prompts, tolerance
from mlxd.caches.quantization import Quantization


@pytest.mark.parametrize(
    ("dtype", "device", "limit"),
    [
        (mx.float32, mx.cpu, 2e-3),
        (mx.float32, mx.gpu, 0.05),
        (mx.float16, mx.cpu, 0.35),
        (mx.bfloat16, mx.cpu, 0.35),
        (mx.float16, mx.gpu, 0.35),
        (mx.bfloat16, mx.gpu, 0.35),
    ],
)
def test_rounding_is_told_from_error_by_what_the_device_rounds(
    dtype: mx.Dtype, device: mx.DeviceType, limit: float
) -> None:
    assert tolerance(dtype, device) == limit


@pytest.mark.parametrize(
    ("boundary", "pieces"), [(0, [512, 512, 5, 1, 1, 1]), (600, [512, 88, 429, 1, 1, 1])]
)
def test_the_oracle_tells_of_every_piece_of_a_long_prompt(boundary: int, pieces: list[int]) -> None:
    seen: list[int] = []
    prompt = [position % VOCAB for position in range(1030)]
    oracle_logprobs(zoo_model("llama"), prompt, Quantization(bits=8, group_size=32), boundary, seen.append)
    assert seen == pieces


def test_progress_rises_with_the_positions_computed_and_is_not_done_by_itself() -> None:
    shares: list[float] = []
    work = Work(lambda stage, share: shares.append(share), [[1] * 95, [1]], num_runs=2)
    for positions in (0, 50, 50, 100, 100):
        work(positions)
    assert shares == [0.0, 0.25, 0.5, 0.99, 0.99]


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.35), (4, 2.5)])
def test_codes_are_coarser_than_any_device_rounds(bits: Literal[4, 8], limit: float) -> None:
    for dtype in (mx.float32, mx.bfloat16):
        assert tolerance(dtype, mx.cpu, Quantization(bits=bits)) == limit


def test_its_prompts_share_a_forward_and_go_on_behind_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row and start of each forward's chunks."""
    rig = make_rig("llama", page_size=8)
    seen: list[list[tuple[int, int]]] = []

    def noted(chunks: Sequence[PrefillChunk], *arguments: int, **named: bool) -> list[list[PrefillChunk]]:
        formed = cohorts(chunks, *arguments, **named)
        seen.extend([(chunk.row.row_id, chunk.start) for chunk in cohort] for cohort in formed)
        return formed

    cohorts = prefill.cohorts
    monkeypatch.setattr(prefill, "cohorts", noted)
    ragged = prompts(rig.memory, rig.runner.info.vocab_size)
    oracle = [oracle_logprobs(rig.model, prompt) for prompt in ragged]
    assert fault_in(rig.runner, rig.memory, oracle, ragged) is None
    assert seen == [[(1, 0), (2, 0)], [(1, 8)], [(1, 16)]]
