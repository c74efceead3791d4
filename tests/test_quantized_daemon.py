"""Packed keys and values by configuration, from the file to the answer."""

from pathlib import Path

import mlx.core as mx
import pytest
from daemon_process import daemon_process, process_config, refusal, write_config, write_tiny_model
from mlx_lm.models.cache import QuantizedKVCache
from msgspec.structs import replace

from mlxd.batching.model import load_model
from mlxd.batching.preview import preview_plan
from mlxd.batching.runner import ignore_progress
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.quantization import Quantization
from mlxd.scheduler.config import CacheConfig, Config

PROMPT = tuple(range(10, 110))
NUM_TOKENS = 40
FOUR_BITS = Quantization(bits=4, group_size=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, head_dim=32)
    return folder


def packed_config(folder: Path, model: Path, quantization: Quantization | None) -> Config:
    config = process_config(folder, model)
    return replace(config, cache=CacheConfig(budget="64MiB", quantization=quantization))


def mlx_lm_tokens(folder: Path) -> tuple[int, ...]:
    """What mlx-lm's own quantised cache makes of PROMPT, greedily."""
    loaded = load_model(folder, ignore_progress)
    caches = [QuantizedKVCache(FOUR_BITS.group_size, FOUR_BITS.bits) for _ in loaded.model.layers]
    logits = loaded.model(mx.array([PROMPT]), cache=caches)
    tokens: list[int] = []
    for _ in range(NUM_TOKENS):
        tokens.append(int(mx.argmax(logits[0, -1])))
        logits = loaded.model(mx.array([tokens[-1:]]), cache=caches)
    return tuple(tokens)


def test_the_daemon_answers_as_mlx_lms_quantised_cache_does(model: Path, tmp_path: Path) -> None:
    config = packed_config(tmp_path, model, FOUR_BITS)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with daemon_process(tmp_path, config) as daemon, daemon.client() as client:
        answer = client.generate(token_ids=PROMPT, sampling=sampling)
        assert "kv:paged-quant:4:32:64" in str(client.status())
    assert answer.token_ids == mlx_lm_tokens(model)


def test_a_model_whose_heads_are_too_narrow_is_one_line(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    code, lines = refusal(write_config(tmp_path, packed_config(tmp_path, tmp_path, FOUR_BITS)))
    [line] = lines
    assert code == 2
    assert line.endswith(
        "cache.quantization does not go with this model: "
        "layer 0 has heads 8 wide, not a multiple of group_size, 32"
    )


def test_the_same_budget_holds_five_times_as_many_pages(model: Path) -> None:
    """Of float32 numbers at 4 bits: 4 / 32 for codes, 2 / 32 for a scale and a bias a group."""

    def pages(quantization: Quantization | None) -> int:
        [group] = preview_plan(
            model_path=str(model),
            max_model_len=8192,
            max_rows=1024,
            prefill_chunk=64,
            budget="8MiB",
            page_size=64,
            checkpoints=0.1,
            quantization=quantization,
            attention="auto",
            progress=ignore_progress,
        ).groups
        return group.num_pages

    assert pages(FOUR_BITS) == 32 // 6 * pages(None) + pages(None) // 3
