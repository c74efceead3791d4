"""The CUDA kernel's host side: when it serves, how rows are divided, what a broken one is replaced by.

The kernel itself runs in benchmarks/kernel.py, on a machine with CUDA; here numpy computes what it would.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cpu_kernel import numpy_kernel, use_numpy_kernels
from daemon_process import write_tiny_model
from loading import load
from tiny_models import Rig, make_rig, oracle, prompt_of

from mlxd.batching import attention_kernel
from mlxd.batching.attention import Kernel
from mlxd.batching.attention_kernel import KernelCase, is_supported
from mlxd.batching.cuda_kernel import Launch
from mlxd.batching.errors import SettingError
from mlxd.batching.kernel_check import fault_in, is_written, random_step, relative_errors
from mlxd.batching.preview import preview_plan
from mlxd.batching.rotation import Rotary
from mlxd.batching.runner import RunnerInfo, ignore_progress
from mlxd.caches.paged import PagedStandIn
from mlxd.caches.paged_view import PagedView
from mlxd.caches.quantization import Quantization

CASE = KernelCase(2, 2, 64, 64, mx.float32, 16, None, 0.125)
CASES = (
    CASE,
    replace(CASE, rotary=Rotary(64, neighbours=False)),
    replace(CASE, key_dim=96, rotary=Rotary(64, neighbours=True)),
    replace(CASE, group=9, key_dim=96, value_dim=32),
    replace(CASE, window=50),
    replace(CASE, window=1, page_size=64),
    replace(CASE, sinks=mx.float32),
    replace(
        CASE,
        dtype=mx.float16,
        quantization=Quantization(bits=8),
        rotary=Rotary(64, neighbours=False),
    ),
    replace(CASE, dtype=mx.float16, value_dim=128, quantization=Quantization(bits=4, group_size=32)),
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_kernels(monkeypatch)


@pytest.mark.parametrize(
    ("rows", "columns", "parts", "warps"),
    [
        (1, 100, 1, 8),
        (1, 512, 1, 8),
        (1, 1024, 2, 8),
        (1, 16384, 32, 8),
        (8, 16384, 4, 8),
        (32, 4096, 1, 8),
        (32, 16384, 4, 8),
        (64, 512, 1, 4),
        (128, 512, 1, 2),
        (128, 65536, 16, 2),
        (500, 512, 1, 2),
    ],
)
def test_rows_are_divided_until_warps_fill_the_device_and_no_part_is_long(
    rows: int, columns: int, parts: int, warps: int
) -> None:
    case = replace(CASE, kv_heads=8)
    assert case.divide(rows, columns) == (parts, warps)
    assert replace(case, window=512).divide(rows, columns) == (1, warps)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "quantization", "warps"),
    [
        (64, 64, None, 2),
        (96, 64, None, 4),
        (64, 128, None, 4),
        (192, 128, None, 8),
        (64, 64, Quantization(bits=8), 4),
    ],
)
def test_blocks_of_wide_or_packed_heads_keep_more_warps(
    key_dim: int, value_dim: int, quantization: Quantization | None, warps: int
) -> None:
    case = replace(CASE, key_dim=key_dim, value_dim=value_dim, quantization=quantization)
    assert case.divide(1000, 512).warps == warps


@pytest.mark.parametrize(("group", "blocks"), [(1, 2), (8, 2), (9, 4), (16, 4), (24, 6)])
def test_a_block_serves_eight_query_heads_of_a_kv_head(group: int, blocks: int) -> None:
    assert replace(CASE, group=group).blocks_of_row == blocks


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype", "page_size", "served"),
    [
        (64, 64, mx.bfloat16, 64, True),
        (96, 96, mx.float16, 16, True),
        (192, 128, mx.bfloat16, 128, True),
        (256, 256, mx.float32, 256, True),
        (80, 80, mx.bfloat16, 64, False),
        (64, 0, mx.bfloat16, 64, False),
        (576, 512, mx.bfloat16, 64, False),
        (64, 64, mx.int8, 64, False),
        (64, 64, mx.bfloat16, 4, False),
    ],
)
def test_heads_of_whole_chunks_are_served_in_pages_of_whole_tiles(
    key_dim: int, value_dim: int, dtype: mx.Dtype, page_size: int, served: bool
) -> None:
    assert is_supported(key_dim, value_dim, dtype, page_size) == served


@pytest.mark.parametrize(
    ("dim", "dtype", "served"),
    [(64, mx.bfloat16, True), (128, mx.float16, True), (96, mx.bfloat16, False), (64, mx.float32, False)],
)
def test_packed_heads_are_served_in_half_precision(dim: int, dtype: mx.Dtype, served: bool) -> None:
    assert is_supported(dim, dim, dtype, 64, Quantization(bits=4, group_size=32)) == served


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("lengths", [[1, 15, 16, 17], [700, 1300, 33]])
def test_rows_whole_and_divided_are_attended_to_in_place(case: KernelCase, lengths: list[int]) -> None:
    mx.random.seed(len(lengths))
    step = random_step(case, lengths, -(-max(lengths) // case.page_size) + 1)
    expected, written = step.expected(), step.written()
    mx.eval(expected, written)
    limit = 1e-5 if case.dtype == mx.float32 else 2e-3
    assert max(relative_errors(step.run(), expected)) < limit
    assert is_written(step, written)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("family", ["llama/64", "mistral/64", "gemma3_text/64", "gpt_oss/64"])
def test_a_model_draws_by_the_kernel_what_mlx_lm_draws(family: str) -> None:
    prompt, num_tokens = prompt_of(45), 24
    rig = make_rig(family, "kernel", page_size=16)
    row = rig.generate(prompt, num_tokens)
    assert tuple(row.output) == oracle(family, prompt, num_tokens).tokens
    assert isinstance(rig.runner.attention, Kernel)
    assert rig.runner.attention.cases
    assert all(case.rotary is not None for case in rig.runner.attention.cases)


def addresses(rig: Rig) -> list[int]:
    """Where each pool lies."""
    return [np.array(pool, copy=False).ctypes.data for cache in rig.runner._caches for pool in cache.planes]


@pytest.mark.usefixtures("kernel")
def test_pools_stay_the_arrays_they_are() -> None:
    rig = make_rig("llama/64", "kernel", page_size=16)
    driver = rig.driver()
    driver.join(prompt_of(20))
    driver.prefill()
    address = [
        np.array(pool, copy=False).ctypes.data for cache in rig.runner._caches for pool in cache.planes
    ]
    driver.decode()
    now = [np.array(pool, copy=False).ctypes.data for cache in rig.runner._caches for pool in cache.planes]
    assert now == address


@pytest.mark.usefixtures("kernel")
def test_layers_with_heads_it_does_not_serve_are_read_in_place() -> None:
    prompt = prompt_of(21)
    kernel, in_place = (make_rig("llama", name, page_size=16) for name in ("kernel", "in_place"))
    assert kernel.generate(prompt, 8).output == in_place.generate(prompt, 8).output
    assert isinstance(kernel.runner.attention, Kernel)
    assert not kernel.runner.attention.cases


@pytest.mark.usefixtures("kernel")
def test_keys_that_a_model_changes_before_it_attends_are_refused() -> None:
    step = random_step(CASE, [5], 1)
    view = PagedView(step.view.spec, step.table, mx.zeros((1,), mx.int32), step.positions, Kernel())
    stand_in = PagedStandIn(step.pools[0], step.pools[1], view)
    keys, values = stand_in.update_and_fetch(*step.new)
    with pytest.raises(ValueError, match="changes its keys or values"):
        Kernel().attend(step.queries, 2 * keys, values, stand_in, 1.0, None)


def zeros(role: str, **options: bool) -> Launch:
    """Kernels that leave zeros."""

    def launch(**arguments: Any) -> list[mx.array]:
        return [mx.zeros(shape) for shape in arguments["output_shapes"]]

    return launch


def uncompiled(role: str, **options: bool) -> Launch:
    raise RuntimeError("Failed to compile kernel: expected a ';'.")


def altered(**constants: int) -> Any:
    """Kernels that take other constants than they are given."""

    def kernel(role: str, **options: bool) -> Launch:
        launch = numpy_kernel(role, **options)

        def run(*, template: list[tuple[str, Any]], **arguments: Any) -> list[mx.array]:
            return launch(template=[*template, *constants.items()], **arguments)

        return run

    return kernel


def unwritten(role: str, **options: bool) -> Launch:
    """Kernels that put the new position into copies of the pools."""
    launch = numpy_kernel(role, **options)

    def run(*, inputs: list[mx.array], **arguments: Any) -> list[mx.array]:
        return launch(inputs=[array + 0 for array in inputs], **arguments)

    return run


def joined_wrongly(role: str, **options: bool) -> Launch:
    """Right but where rows are divided."""
    return zeros(role) if role == "join" else numpy_kernel(role, **options)


def wrong_in_small_blocks(role: str, **options: bool) -> Launch:
    """Right but where a block has two warps."""
    launch = numpy_kernel(role, **options)

    def run(*, template: list[tuple[str, Any]], **arguments: Any) -> list[mx.array]:
        outputs = launch(template=template, **arguments)
        return [2 * output for output in outputs] if dict(template)["WARPS"] == 2 else outputs

    return run


BROKEN = [
    (zeros, "row 0 of 3 is off by 1 of its norm"),
    (uncompiled, "RuntimeError: Failed to compile kernel"),
    (altered(WINDOW=40), "row 2 of 3 is off"),
    (altered(SCALE=0x3F000000), "is off"),
    (unwritten, "the new keys or values are not where they belong"),
    (joined_wrongly, "row 0 of 3 is off by 1 of its norm"),
    (wrong_in_small_blocks, "row 0 of 3 is off by 1 of its norm"),
]


@pytest.mark.parametrize(("broken", "fault"), BROKEN)
def test_the_check_tells_what_a_broken_kernel_does(
    broken: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernel, "kernel", broken)
    found = fault_in([CASE])
    assert found is not None
    assert fault in found


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_check_finds_no_fault_in_a_right_one(case: KernelCase) -> None:
    assert fault_in([case]) is None


def loaded(folder: Path, attention: Any = "auto", head_dim: int = 64) -> RunnerInfo:
    write_tiny_model(folder, head_dim=head_dim)
    return load(folder, attention=attention, warmup_s=0.5).info


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("kernel", "cuda")
@pytest.mark.parametrize("asked", ["auto", "kernel"])
def test_a_right_kernel_is_timed_beside_the_others_or_serves_where_it_is_asked_for(
    tmp_path: Path, asked: Any
) -> None:
    note = loaded(tmp_path, asked).notes["attention"]
    if asked == "kernel":
        assert note == "kernel"
    else:
        assert all(f"{name} " in note for name in ("kernel", "in_place", "gathered"))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("asked", ["auto", "kernel"])
@pytest.mark.parametrize("broken", [zeros, uncompiled, joined_wrongly])
def test_a_broken_kernel_is_one_warning_and_the_built_in_variants_serve(
    tmp_path: Path, asked: Any, broken: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention_kernel, "kernel", broken)
    with caplog.at_level(logging.WARNING):
        info = loaded(tmp_path, asked)
    assert info.max_batch == 4
    assert "kernel" not in info.notes["attention"]
    assert info.notes["kernel"].startswith("not used: ")
    (warning,) = [record for record in caplog.records if "attention=kernel" in record.getMessage()]
    assert "self-test failed" in warning.getMessage()


@pytest.mark.usefixtures("kernel", "cuda")
def test_a_model_with_other_heads_does_not_try_the_kernel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        info = loaded(tmp_path, head_dim=8)
    assert "kernel" not in info.notes["attention"]
    assert not [record for record in caplog.records if "self-test" in record.getMessage()]


def test_the_kernel_is_refused_where_there_is_no_cuda(tmp_path: Path) -> None:
    needs = r"^decode.attention is 'kernel', which needs MLX's CUDA device; this machine has its cpu device"
    with ThreadPoolExecutor(1) as engine, pytest.raises(SettingError, match=needs):
        engine.submit(lambda: loaded(tmp_path, "kernel")).result()  # it clears its thread's streams
    with pytest.raises(SettingError, match=needs):
        preview_plan(
            model_path=str(tmp_path / "no model is opened"),
            max_model_len=None,
            max_rows=1,
            prefill_chunk="auto",
            budget="8MiB",
            page_size="auto",
            checkpoints=0.0,
            quantization=None,
            attention="kernel",
            progress=ignore_progress,
        )


def test_the_name_of_a_kernel_changes_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **arguments: seen.append(arguments))
    make = attention_kernel.kernel.__wrapped__
    for options in ({}, {"with_sinks": True}, {"packed": True}, {"rotates": True}):
        make("whole", **options)
    make("part"), make("join")
    monkeypatch.setattr(attention_kernel, "source", lambda: "// nothing")
    make("whole")
    names = [arguments["name"] for arguments in seen]
    assert len(set(names)) == len(names) == 7
    assert all(argument["header"] + argument["source"] for argument in seen)
    assert seen[1]["input_names"][-1] == "sinks"
