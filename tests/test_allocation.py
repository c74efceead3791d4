"""What MLX says where memory runs out, and what only looks like it."""

import subprocess
import sys

import mlx.core as mx
import pytest

from mlxd.batching import allocation, load
from mlxd.batching.allocation import allocating, is_allocation_failure
from mlxd.batching.errors import ModelError, OutOfMemoryError
from mlxd.batching.runner import ignore_progress
from mlxd.scheduler.config import Config, ModelConfig
from mlxd.scheduler.model_runner import load_model_runner

FAILURES = [
    RuntimeError("[malloc] Unable to allocate 1073741824 bytes."),
    RuntimeError("[malloc_async] Unable to allocate 17179869184 bytes."),
    RuntimeError(
        "[metal::malloc] Attempting to allocate 96905199616 bytes which is greater than the maximum allowed "
        "buffer size of 17179869184 bytes."
    ),
    RuntimeError("[metal::malloc] Resource limit (499000) exceeded."),
    RuntimeError(
        "[METAL] Command buffer execution failed: Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
    ),
    RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
    RuntimeError("cudaGraphInstantiate(&graph_exec, graph, 0) failed: out of memory"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
    MemoryError("std::bad_alloc"),
]
OTHERS = [
    RuntimeError("[METAL] Command buffer execution failed: Caused GPU Hang Error"),
    RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity"),
    RuntimeError("cudaGraphLaunch(graph, stream) failed: an illegal memory access was encountered"),
    RuntimeError("[eval] Attempting to eval an array without a primitive."),
    RuntimeError("the tokenizer is out of memory cards"),
    ValueError("[malloc] Unable to allocate 1 bytes."),
    IndexError("position 3 is outside the pages held"),
]


@pytest.mark.parametrize("error", FAILURES, ids=str)
def test_a_failure_to_allocate_is_one_error_that_keeps_the_words(error: Exception) -> None:
    assert is_allocation_failure(error)
    with pytest.raises(OutOfMemoryError) as raised, allocating():
        raise error
    assert str(raised.value) == (str(error) or "no memory for a host object")
    assert (raised.value.code, raised.value.__cause__) == ("out_of_memory", error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_whatever_else_goes_wrong_passes_as_it_is(error: Exception) -> None:
    assert not is_allocation_failure(error)
    with pytest.raises(type(error)) as raised, allocating():
        raise error
    assert raised.value is error


@pytest.mark.parametrize("kept", [FAILURES[0], OTHERS[0]], ids=str)
def test_the_device_is_waited_for_and_what_its_stream_kept_is_the_same_failure_or_passes(
    monkeypatch: pytest.MonkeyPatch, kept: RuntimeError
) -> None:
    def synchronize() -> None:
        raise kept

    monkeypatch.setattr(allocation.mx, "synchronize", synchronize)
    expected = OutOfMemoryError if is_allocation_failure(kept) else RuntimeError
    with pytest.raises(expected, match=r"Unable|Hang"), allocating():
        raise FAILURES[0]


def test_work_that_finds_memory_is_left_alone() -> None:
    with allocating():
        assert mx.ones((3,)).sum().item() == 3


def test_no_memory_for_the_model_itself_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(**settings: object) -> None:
        raise FAILURES[0]

    monkeypatch.setattr(load, "load_runner", no_memory)
    config = Config(version=1, tenants=(), model=ModelConfig(path="builtin"))
    with pytest.raises(ModelError, match=r"^builtin: memory ran out .*budget 0\.6: \[malloc\] Unable"):
        load_model_runner(config, ignore_progress)


ASKS_TOO_MUCH = """
import resource
import mlx.core as mx
mx.set_default_device(mx.cpu)
mx.eval(mx.ones((8,)))
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**27,) * 2)
try:
    mx.eval(mx.ones((2**28,)))
except (RuntimeError, MemoryError) as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system holds a process to RLIMIT_AS")
def test_on_a_cpu_mlx_ends_the_process_and_leaves_nothing_to_catch() -> None:
    """The page on reliability says so. Where this fails, MLX tells it now, and the page has to."""
    process = subprocess.run((sys.executable, "-c", ASKS_TOO_MUCH), capture_output=True, text=True)
    assert (process.returncode < 0, process.stdout) == (True, "")
