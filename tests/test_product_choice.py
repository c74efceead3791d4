"""Whose products serve a step: the faster ones, by row bucket."""

import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from daemon_process import write_tiny_model
from loading import load
from plain_product import use_plain_product
from tiny_models import make_rig
from tiny_zoo import zoo_model

from mlxd.batching.decode import DecodeStep
from mlxd.batching.few_rows import ROW_BUCKETS
from mlxd.batching.few_rows_rewrite import multiply_few_rows
from mlxd.batching.mlx_runner import MlxRunner
from mlxd.batching.product_choice import choose_products
from mlxd.batching.timing import TimeBox


def runner_that_takes(seconds: Callable[[int, bool], float], monkeypatch: pytest.MonkeyPatch) -> MlxRunner:
    """Steps of so many rows, by whether products are our own."""
    runner = make_rig("llama", "gathered", max_rows=64, max_model_len=16).runner
    runner.step.own_products = ROW_BUCKETS
    monkeypatch.setattr(runner, "trace", lambda rows, *_: seconds(rows, rows in runner.step.own_products))
    return runner


def test_each_row_bucket_has_the_faster_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_that_takes(lambda rows, own: 1.0 + own * (rows - 8.5), monkeypatch)
    times = choose_products(runner, runner.info.memory, TimeBox(60.0))
    assert times[4] == {"kernel": -3.5, "mlx": 1.0}
    assert list(times) == [2, 4, 8, 16, 32]
    assert runner.step.own_products == {2, 4, 8}


def test_buckets_not_reached_in_time_do_as_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    box = TimeBox(60.0)

    def seconds(rows: int, own: bool) -> float:
        if rows == 2 and not own:
            monkeypatch.setattr(TimeBox, "is_over", True)
        return 1.0 + own * (rows - 8.5)

    runner = runner_that_takes(seconds, monkeypatch)
    assert list(choose_products(runner, runner.info.memory, box)) == [2, 32]
    assert runner.step.own_products == {2, 4, 8, 16}


def test_without_time_all_have_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_that_takes(lambda rows, own: 1.0, monkeypatch)
    assert choose_products(runner, runner.info.memory, TimeBox(0.0)) == {}
    assert runner.step.own_products == ROW_BUCKETS


def test_a_model_without_layers_of_ours_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_that_takes(lambda rows, own: pytest.fail("was timed"), monkeypatch)
    runner.step.own_products = frozenset()
    assert choose_products(runner, runner.info.memory, TimeBox(60.0)) == {}


def test_a_step_of_a_rewritten_model_has_our_own_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_product(monkeypatch)
    model = zoo_model("llama")
    assert DecodeStep(model, [], [], []).own_products == frozenset()
    multiply_few_rows(model, mx.float32)
    assert DecodeStep(model, [], [], []).own_products == ROW_BUCKETS


@pytest.mark.parametrize(
    ("warmup_s", "note"),
    [
        (0.0, "by a kernel in 8 layers"),
        (20.0, r"by a kernel in 8 layers; 2 rows: (\w+) \(kernel [\d.]+ ms, mlx [\d.]+ ms\); 4 rows: .*"),
    ],
)
def test_status_says_whose_products_serve(
    tmp_path: Path, warmup_s: float, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_plain_product(monkeypatch)
    write_tiny_model(tmp_path, hidden_size=64, intermediate_size=64)
    runner = load(tmp_path, compile="on", attention="gathered", warmup_s=warmup_s)
    assert re.fullmatch(note, runner.info.notes["products"])
    timed = {bucket.num_rows for bucket in runner.step._graphs if bucket.products}
    assert timed == ({2, 4} if warmup_s else set())
