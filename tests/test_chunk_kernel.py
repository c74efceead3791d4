"""Chunks written in place: where they belong, and found out where they are not.

The kernel itself runs in benchmarks/kernel.py, on a machine with CUDA; here numpy writes what it would.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cpu_kernel import numpy_writer, use_numpy_kernels
from daemon_process import write_tiny_model
from loading import load

from mlxd.batching import chunk_kernel
from mlxd.batching.chunk_check import fault_in, random_chunk
from mlxd.batching.chunk_kernel import ChunkCase, KernelWriter
from mlxd.batching.cuda_kernel import Launch
from mlxd.caches.page_pool import PagePool
from mlxd.caches.page_table import PageTable
from mlxd.caches.paged_view import PrefillView
from mlxd.caches.sizing import GroupSpec

CASE = ChunkCase(64, 64, mx.float32, 16)
CASES = (CASE, replace(CASE, key_dim=192, value_dim=128), replace(CASE, dtype=mx.float16, page_size=32))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_kernels(monkeypatch)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("start", "lengths", "padding"),
    [
        pytest.param(0, [1], (0, 0), id="one token"),
        pytest.param(0, [64], (0, 0), id="whole pages"),
        pytest.param(0, [40, 5, 33], (0, 0), id="rows of unequal lengths"),
        pytest.param(0, [40, 33], (2, 24), id="rows and tokens that are padding"),
        pytest.param(64, [50], (0, 14), id="a history, padded past the row's pages"),
    ],
)
def test_a_chunk_is_written_where_built_in_operations_put_it(
    case: ChunkCase, start: int, lengths: list[int], padding: tuple[int, int]
) -> None:
    mx.random.seed(len(lengths))
    chunk = random_chunk(case, 2, start, lengths, padding)
    expected = chunk.expected()
    assert not chunk.is_written(expected)
    chunk.run()
    assert chunk.is_written(expected)


@pytest.mark.usefixtures("kernel")
def test_numbers_wider_than_the_pool_are_rounded_as_built_in_operations_round_them() -> None:
    chunk = random_chunk(replace(CASE, dtype=mx.float16), 2, 0, [20, 3])
    keys, values = (mx.random.normal(x.shape) for x in chunk.new)
    chunk = replace(chunk, new=(keys, values))
    expected = chunk.expected()
    chunk.run()
    assert chunk.is_written(expected)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype", "page_size", "serves"),
    [
        (64, 64, mx.bfloat16, 64, True),
        (192, 128, mx.float16, 16, True),
        (8, 8, mx.float32, 16, False),
        (64, 0, mx.float32, 16, False),
        (64, 64, mx.float32, 4, False),
    ],
)
def test_it_serves_the_pools_that_decode_steps_keep(
    key_dim: int, value_dim: int, dtype: mx.Dtype, page_size: int, serves: bool
) -> None:
    keys, values = (mx.zeros((2, 1, page_size, dim), dtype) for dim in (key_dim, value_dim))
    assert KernelWriter().serves(keys, values) == serves


def view_of(start: int, end: int, num_tokens: int, spec: GroupSpec) -> PrefillView:
    table = PageTable(spec, PagePool(8))
    table.grow(end)
    return PrefillView(spec, [table], start, [end], num_tokens)


@pytest.mark.parametrize("window", [None, 5])
def test_a_chunk_reads_the_pages_before_it_and_itself(window: int | None) -> None:
    """So what is being written need not be read; columns past the row's end are the chunk's own, too."""
    spec = GroupSpec("full", (0,), window, 4, 0)
    view = view_of(start=8, end=14, num_tokens=8, spec=spec)
    pool = mx.random.normal((9, 2, 4, 3))
    new = mx.random.normal((1, 2, 8, 3))
    pages = view.tables[0].pages
    history = mx.concatenate([pool[page] for page in pages[:2]], axis=1)[None]
    expected = mx.concatenate([history, new], axis=2)
    assert mx.array_equal(view.read(pool, new), expected)
    assert mx.array_equal(view.read(view.write(pool, new), new), expected)


@pytest.mark.parametrize("start", [0, 8])
def test_a_chunk_without_pages_before_it_reads_itself_alone(start: int) -> None:
    spec = GroupSpec("sliding:1", (0,), 1, 4, 0)
    table = PageTable(spec, PagePool(4))
    table.grow(8)
    table.release_before(start)
    table.grow(start + 4)
    new = mx.random.normal((1, 2, 4, 3))
    view = PrefillView(spec, [table], start, [start + 4])
    assert view.read(mx.zeros((5, 2, 4, 3)), new) is new


def unwritten() -> Launch:
    """Leaves the pools as they are."""
    return lambda **arguments: [mx.zeros((1,))]


def uncompiled() -> Launch:
    raise RuntimeError("Failed to compile kernel: expected a ';'.")


def at_other_strides() -> Launch:
    """Takes heads for positions."""
    launch = numpy_writer()

    def run(*, inputs: list[mx.array], **arguments: Any) -> list[mx.array]:
        key, value, *rest = inputs
        turned = [mx.contiguous(x.swapaxes(1, 2)).reshape(x.shape) for x in (key, value)]
        return launch(inputs=[*turned, *rest], **arguments)

    return run


def whole_pages_alone() -> Launch:
    """Leaves the last page out where the chunk does not fill it."""
    launch = numpy_writer()

    def run(*, inputs: list[mx.array], grid: tuple[int, int, int], **arguments: Any) -> list[mx.array]:
        key, value, keys, values, pages = inputs
        whole = key.shape[2] // keys.shape[2]
        kept = mx.contiguous(pages.reshape(-1, grid[1])[:, :whole].reshape(-1))
        return launch(inputs=[key, value, keys, values, kept], grid=(grid[0], whole, grid[2]), **arguments)

    return run


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (unwritten, "are not where they belong"),
        (uncompiled, "RuntimeError: Failed to compile kernel"),
        (at_other_strides, "are not where they belong"),
        (whole_pages_alone, "are not where they belong"),
    ],
)
def test_the_check_tells_what_a_broken_kernel_does(
    broken: Callable[[], Launch], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_kernel, "kernel", broken)
    found = fault_in([CASE])
    assert found is not None
    assert fault in found


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_check_finds_no_fault_in_a_right_one(case: ChunkCase) -> None:
    assert fault_in([case]) is None


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("broken", [unwritten, uncompiled, at_other_strides, whole_pages_alone])
def test_with_a_broken_one_the_kernel_variant_is_refused_and_the_built_in_ones_serve(
    tmp_path: Path,
    broken: Callable[[], Launch],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(chunk_kernel, "kernel", broken)
    write_tiny_model(tmp_path, head_dim=64)
    with caplog.at_level(logging.WARNING):
        info = load(tmp_path, attention="auto", warmup_s=0.5).info
    assert "kernel" not in info.notes["attention"]
    assert info.notes["kernel"].startswith("not used: ")
    assert len([record for record in caplog.records if "attention=kernel" in record.getMessage()]) == 1
