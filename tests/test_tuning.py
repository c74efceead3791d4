"""Choices by timing: within their time, with what rows can have, and counted apart from service."""

from pathlib import Path
from typing import Any

import pytest
from daemon_process import process_config, write_tiny_model
from tiny_models import make_rig

from mlxd.batching import decode, timing, tuning
from mlxd.batching.fake_runner import fake_memory
from mlxd.batching.runner import ignore_progress
from mlxd.caches.sizing import GroupSpec, plan_memory
from mlxd.scheduler.config import DecodeConfig
from mlxd.scheduler.engine import Engine


@pytest.mark.parametrize(("pages", "rows", "width"), [(640, 1, 32), (640, 32, 20), (16, 32, 1)])
def test_rows_are_timed_as_long_as_all_of_them_can_be(pages: int, rows: int, width: int) -> None:
    spec = GroupSpec(name="full", layers=(0,), window=None, page_size=16, bytes_per_token=1)
    memory = plan_memory(
        (spec,), budget_bytes=pages * 16, weights_bytes=0, max_rows=32, max_model_len=1024, chunk=64
    )
    assert tuning.typical_widths(memory, rows) == (tuning.width_bucket(width),)


@pytest.mark.parametrize(
    ("kind", "widths"),
    [
        ({"window": 24}, (2,)),
        ({"has_state": True}, (1,)),
        ({"window": 24, "has_state": True}, (2, 1)),
    ],
)
def test_rows_that_do_not_grow_are_timed_all_the_same(kind: dict[str, Any], widths: tuple[int, ...]) -> None:
    assert tuning.typical_widths(fake_memory(has_full=False, chunk=16, **kind), 4) == widths


def test_steps_of_the_start_are_not_counted_as_service(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = process_config(tmp_path, tmp_path, decode=DecodeConfig(compile="on", warmup_s=1))
    with Engine(config) as engine:
        engine.start(lambda events: None)
        engine.wait_ready(60)
        snapshot = engine.snapshot
    assert (snapshot.runner.compiled_steps, snapshot.runner.eager_steps) == (0, 0)
    assert snapshot.runner.graph_compiles > 0


@pytest.mark.parametrize(
    ("ms_per_token", "page_size", "max_model_len", "chunk"),
    [
        (0.1, 64, 8192, 1024),
        (0.1, 64, 512, 512),
        (10.0, 64, 8192, 64),
        (10.0, 256, 8192, 256),
        (1e-3, 64, 8192, 2048),
    ],
)
def test_a_chunk_is_the_largest_that_runs_within_its_bound(
    ms_per_token: float, page_size: int, max_model_len: int, chunk: int
) -> None:
    def chunk_s(num_tokens: int) -> float:
        return num_tokens * ms_per_token / 1000

    box = timing.TimeBox(60)
    assert tuning.choose_chunk(chunk_s, 150, page_size, max_model_len, box, ignore_progress) == chunk


def test_no_more_graphs_are_traced_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first ones, of short contexts, would be gone before anybody used them."""
    monkeypatch.setattr(decode, "MOST_GRAPHS", 3)
    rig = make_rig("llama", "in_place", compiled=True, max_rows=2, max_model_len=16)
    done, total = tuning.trace_buckets(rig.runner, rig.memory, timing.TimeBox(60.0), ignore_progress)
    assert (done, total, rig.runner.step.compiles) == (3, 16, 3)
    assert [bucket.num_rows for bucket in rig.runner.step._graphs] == [1, 1, 2]
