"""Continuous batching of `transformers`: a random Llama on the GPU, and requests that come all at once."""

import dataclasses
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from figures import Line
from traffic import Arrival, Served

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager

_NO_END_OF_TEXT = -1
_POLL_S = 1.0
_FAILURES = (
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a GPU that is too small, a setting that does not fit or another version of the library raises."""


class TransformersError(Exception):
    """What failed in torch or transformers, in one line."""


class Output(Protocol):
    """A request that has ended. `timestamps`: when its tokens were there, by time.perf_counter."""

    request_id: str
    generated_tokens: list[int]
    timestamps: list[float] | None
    error: str | None


class Manager(Protocol):
    """What is used here of transformers' ContinuousBatchingManager."""

    def add_requests(
        self, inputs: list[list[int]], *, max_new_tokens: int, record_timestamps: bool
    ) -> list[str]: ...

    def get_result(self, *, timeout: float) -> Output | None: ...

    def is_running(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one length, all at once."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int


@contextmanager
def in_one_line() -> Iterator[None]:
    """Raises TransformersError in place of what torch and transformers raise, with where that was."""
    try:
        yield
    except _FAILURES as error:
        raised = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(raised.filename).name}:{raised.lineno}"
        raise TransformersError(f"{type(error).__name__}: {_first_line(error)} ({place})") from error


@contextmanager
def continuous_batching(
    shape: Line, workload: Workload, attention: str | None, settings: dict[str, Any]
) -> Iterator["ContinuousBatchingManager"]:
    """A manager that runs a model of random bfloat16 weights: greedy, and no token ends the text.

    It is what `generate_batch` makes for such requests, and stays up between them.

    Args:
        shape: as in a `config.json`.
        attention: `attn_implementation`, as "paged|sdpa"; None leaves it to transformers.
        settings: of ContinuousBatchingConfig; transformers chooses the others.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    if not torch.cuda.is_available():
        raise TransformersError("torch finds no CUDA device")
    torch.manual_seed(0)
    chosen = {} if attention is None else {"attn_implementation": attention}
    with torch.device("cuda"):
        config = AutoConfig.for_model(**shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **chosen)
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(
            do_sample=False, eos_token_id=_NO_END_OF_TEXT, max_new_tokens=workload.output_tokens
        ),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        workload_hints=WorkloadHints(
            max_prompt_length=workload.prompt_tokens,
            max_generated_length=workload.output_tokens,
            num_requests=workload.num_requests,
        ),
    ) as manager:
        yield manager


def keep_logs(*, quiet: bool) -> None:
    """Show what the library tells while it runs, or nothing, tracebacks of its thread included."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL if quiet else logging.INFO)


def machine() -> Line:
    import torch
    import transformers

    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    return {"kind": "machine", "device": torch.cuda.get_device_name()} | versions


def choices(manager: "ContinuousBatchingManager") -> Line:
    """The attention, and each setting that is not None, as the manager resolved them."""
    settings = dataclasses.asdict(manager.continuous_batching_config)
    return {
        "kind": "choices",
        "attention": manager.model.config._attn_implementation,
        "settings": {name: value for name, value in settings.items() if value is not None},
    }


def serve_wave(manager: Manager, arrivals: Sequence[Arrival]) -> Served:
    """Send arrivals of one length all at once; times count from before the first is sent.

    Raises:
        TransformersError: one failed, or has not the tokens that were asked for.
    """
    num_tokens = arrivals[0].num_tokens
    begun, cpu_begun = time.perf_counter(), time.process_time()
    requests = manager.add_requests(
        [list(each.prompt) for each in arrivals], max_new_tokens=num_tokens, record_timestamps=True
    )
    outputs = _ended(manager, len(requests))
    served = Served(cpu_s=time.process_time() - cpu_begun)
    for request in requests:
        output = outputs[request]
        times = [at - begun for at in output.timestamps or ()]
        for count, what in ((len(output.generated_tokens), "tokens"), (len(times), "times of tokens")):
            if count != num_tokens:
                raise TransformersError(f"request {request} has {count} {what}, {num_tokens} are due")
        served.tokens_at.append(times)
    return served


def _ended(manager: Manager, number: int) -> dict[str, Output]:
    """Waits until so many requests have ended; what became of them, by request."""
    outputs: dict[str, Output] = {}
    while len(outputs) < number:
        output = manager.get_result(timeout=_POLL_S)
        if output is not None:
            if output.error is not None:
                raise TransformersError(f"request {output.request_id}: {_first_line(output.error)}")
            outputs[output.request_id] = output
        elif not manager.is_running():
            raise TransformersError(f"its thread ended with {len(outputs)} of {number} requests answered")
    return outputs


def _first_line(message: object) -> str:
    return (str(message).strip() or "nothing is said of it").splitlines()[0]
