"""The seam between deciding and computing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlxd.batching.plan import StepPlan, StepResult
from mlxd.caches.persistence import PageFormat
from mlxd.caches.sizing import MemoryPlan
from mlxd.metrics.stats import RunnerCounters


class PendingStep(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan: ...

    def wait(self) -> StepResult:
        """Block until the step's tokens are there. Called once, in launch order."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a loaded runner says of itself; shown by `mlxd status` and in the hello reply.

    Attributes:
        max_batch: rows it may step together; 1 for a model that failed the ragged self-test.
        notes: facts for people (device, BLAS, attention by row bucket, why a model is not batched).
        fingerprint: tells the weights from any other's.
    """

    model: str
    vocab_size: int
    memory: MemoryPlan
    max_batch: int
    eos_token_ids: frozenset[int]
    device: str
    compiled: bool
    notes: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""


class Runner(Protocol):
    """Executes plans. Made, used and closed on the engine thread alone.

    Between two `launch` calls at most one earlier step is still unwaited.
    """

    @property
    def info(self) -> RunnerInfo: ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step; returns before its tokens exist. Raises only where no row can go on.

        Raises:
            OutOfMemoryError: as any other call, and `PendingStep.wait`, may. No step that was launched may be
                waited for then, and nothing may be launched before `reset`.
        """
        ...

    def reset(self) -> None:
        """Forget all rows, launched steps and pages: as new."""
        ...

    def maintain(self) -> bool:
        """Called while no step is in flight and none is due: one bounded piece of put-off work.

        Returns:
            Whether more is left.
        """
        ...

    @property
    def page_formats(self) -> tuple[PageFormat, ...]:
        """What a page's payload holds, one a group."""
        ...

    def export_pages(self, pages: Sequence[tuple[int, int]]) -> list[bytes]:
        """Payloads of these pages, (group, page id), as launched steps leave them; waits for these."""
        ...

    def counters(self) -> RunnerCounters: ...

    def close(self) -> None:
        """Give up arrays and streams; the engine thread's last call."""
        ...


Progress = Callable[[str, float], None]
"""Called with a stage name and the share of it done, 0 to 1, and at least every few seconds.

It may raise to end the work: whoever calls it gives up what they hold and lets the error pass.
"""


def ignore_progress(stage: str, share: float) -> None:
    """A Progress of those who tell nobody."""
