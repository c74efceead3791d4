"""What benchmarks take for the floor of a step, and that a wrong step is not timed."""

import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import long_prompt
import models
from entry import BenchmarkError
from figures import read_lines
from floor import live_bytes, weights_bytes
from models import BenchModel, load, make_runner, random_model
from operations import of_step
from options import tokenizer_folder
from reference import check
from served_model import make_folder
from sides import MlxLm, Scheduled
from text_tokenizers import byte_level
from traffic import Arrival, poisson, serve

from mlxd.batching.attention import InPlace
from mlxd.batching.driver import Driver
from mlxd.batching.errors import MlxdError, SettingError
from mlxd.batching.memory import layers_of
from mlxd.batching.mlx_runner import MlxRunner

SMALL = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_a_step_reads_all_weights_but_an_embedding_beside_a_head() -> None:
    tied, untied = (random_model(SMALL | {"tie_word_embeddings": is_tied}) for is_tied in (True, False))
    assert weights_bytes(tied) == weights_bytes(untied)


def test_a_step_reads_no_position_outside_a_window() -> None:
    gemma = load("gemma3-tiny")
    layers = layers_of(gemma.model)
    position = 2 * 2 * 64 * 4  # keys and values, heads, width, float32
    sliding, full = 5, 1
    assert live_bytes(layers, [50]) == 6 * 50 * position
    assert live_bytes(layers, [100, 300]) == position * (full * 400 + sliding * 2 * 64)


@pytest.fixture(scope="module")
def bench() -> BenchModel:
    return load("tiny")


@pytest.fixture(scope="module")
def runner(bench: BenchModel) -> MlxRunner:
    return make_runner(
        bench, max_rows=3, max_model_len=128, page_size=16, chunk=64, attention="in_place", compile="off"
    )


def test_a_twin_has_the_same_arrays_in_other_modules(bench: BenchModel) -> None:
    twin = bench.twin()
    assert twin.model.layers[0].mlp is not bench.model.model.layers[0].mlp
    assert twin.model.layers[0].mlp.up_proj.weight is bench.model.model.layers[0].mlp.up_proj.weight


def test_a_right_step_is_near_float32(bench: BenchModel, runner: MlxRunner) -> None:
    line = check(bench, runner, 3, 70)
    assert line["rows_compared"] == 3
    assert line["mlxd"] < 1e-4


def test_a_wrong_step_ends_the_benchmark(
    bench: BenchModel, runner: MlxRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = InPlace.attend
    monkeypatch.setattr(InPlace, "attend", lambda *arguments: 1.5 * attend(*arguments))
    with pytest.raises(SystemExit, match="tiny: log-probabilities are off by"):
        check(bench, runner, 3, 70)


def test_the_reference_leaves_the_weights_as_they_were(bench: BenchModel, runner: MlxRunner) -> None:
    packed = BenchModel("tiny", bench.twin(), bench.vocab_size)
    packed.model.set_dtype(mx.bfloat16)
    check(packed, runner, 1, 20)
    assert packed.model.model.norm.weight.dtype == mx.bfloat16


def test_both_engines_serve_the_same_arrivals_to_their_end(bench: BenchModel, runner: MlxRunner) -> None:
    arrivals = poisson(6, 200.0, 20, 5, bench.vocab_size, seed=3)
    for side in (Scheduled(runner, 3, prefill_ms=50.0), MlxLm(bench, 3)):
        served = serve(side, arrivals, 3)
        assert [len(times) for times in served.tokens_at] == [each.num_tokens for each in arrivals]


def test_scrubbing_that_pools_wait_for_is_no_part_of_a_step(runner: MlxRunner) -> None:
    widths = [1 for _ in runner.info.memory.groups]
    expected = of_step(runner, 2, widths)
    driver = Driver(runner, runner.info.memory)
    row = driver.join([1, 2, 3])
    driver.prefill()
    driver.leave(row)
    driver.clean()
    assert of_step(runner, 2, widths) == expected


def test_weights_that_have_no_room_are_never_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "device_memory_bytes", lambda: 24e9)
    monkeypatch.setattr(mx, "eval", lambda *arrays: pytest.fail("weights were evaluated"))
    with pytest.raises(BenchmarkError, match=r"^8b needs 32\.1 GB for its weights; 24 GB are free$"):
        load("8b")


def test_attention_that_this_machine_has_not_is_refused_in_the_daemons_words(
    bench: BenchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match=r"^decode\.attention is 'kernel', which needs MLX's CUDA device"):
        make_runner(bench, max_rows=1, max_model_len=32, page_size=16, attention="kernel")


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "told"),
    [((1, 2), 0, "max_tokens"), ((), 1, "the prompt is empty"), ((1,) * 100, 100, "128")],
    ids=["no tokens", "no prompt", "too long"],
)
def test_a_request_that_will_not_run_is_told_at_once(
    runner: MlxRunner, prompt: tuple[int, ...], num_tokens: int, told: str
) -> None:
    with pytest.raises((BenchmarkError, MlxdError), match=told):
        Scheduled(runner, 3, prefill_ms=50.0).add(0, prompt, num_tokens)


def test_the_slowest_chunk_is_one_that_was_computed(runner: MlxRunner) -> None:
    side = Scheduled(runner, 3, prefill_ms=50.0)
    serve(side, [Arrival(0.0, (1,), 2)], 3)
    assert side.slowest_chunk_s == 0.0, "a prompt of one token has none"
    begun = time.perf_counter()
    serve(side, [Arrival(0.0, (1,) * 100, 2)], 3)
    assert 0 < side.slowest_chunk_s < time.perf_counter() - begun


def test_rows_that_are_longer_than_the_long_prompt_run_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "lines.jsonl"
    arguments = "--model tiny --rows 2 --context 300 --prompt 64 --attention in_place --out"
    monkeypatch.setattr(sys, "argv", ["long_prompt.py", *arguments.split(), str(out)])
    long_prompt.main()
    _, alone, beside = read_lines([out])
    assert (alone["kind"], beside["kind"]) == ("alone", "beside")
    assert alone["gaps"] == 2 * 199, "of each row, between 200 steps"
    assert beside["gaps"] >= 2, "those in which the prompt came among them"
    bound_ms = alone["gap_max_ms"] + max(100.0, beside["slowest_chunk_ms"])
    assert beside["bound_ms"] == pytest.approx(bound_ms, abs=0.05)
    assert beside["kept"] is (beside["gap_max_ms"] <= beside["bound_ms"])


def test_a_tokenizer_that_cannot_end_a_text_for_both_servers_is_told(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (model := tmp_path / "model").mkdir()
    with pytest.raises(BenchmarkError, match=r"the tokenizer has no <repo_name>, which is to end the text$"):
        make_folder("tiny", tokenizer_folder(str(tmp_path)), model)


def test_packed_shapes_are_packed() -> None:
    layer = load("tiny-4bit").model.model.layers[0].mlp.up_proj
    assert isinstance(layer, nn.QuantizedLinear)
    assert (layer.bits, layer.group_size) == (4, 64)
