"""Whether the daemon is fit to be sent requests, judged from the engine's latest snapshot."""

from dataclasses import asdict, dataclass

from mlxd.metrics.stats import EngineSnapshot

STALL_S = 30.0
"""Without a step for so long, while there is work, the engine is stuck; a first trace takes seconds."""


@dataclass(frozen=True, slots=True)
class Health:
    """What `/healthz` answers.

    Attributes:
        reason: why it is not ok; "" where it is.
        seconds_since_last_step: None before the first one.
    """

    ok: bool
    state: str
    reason: str
    seconds_since_last_step: float | None
    waiting: int
    running: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def judge(snapshot: EngineSnapshot, now: float, stall_s: float = STALL_S, *, unseen_s: float = 0.0) -> Health:
    """Ok while the engine takes requests and steps when it has work.

    Args:
        now: the engine's clock, seconds.
        unseen_s: for how long a request has waited of which no snapshot tells yet.
    """
    reason = _fault(snapshot, now, stall_s, unseen_s)
    return Health(
        ok=not reason,
        state=snapshot.state,
        reason=reason,
        seconds_since_last_step=round(now - snapshot.last_step_at, 3) if snapshot.last_step_at else None,
        waiting=snapshot.waiting,
        running=snapshot.running,
    )


def stalled_s(snapshot: EngineSnapshot, now: float) -> float:
    """Seconds without a step while there is work; 0 where there is none. `now`: the engine's clock."""
    if not snapshot.waiting + snapshot.running:
        return 0.0
    return now - max(snapshot.last_step_at, snapshot.busy_since or snapshot.now)


def unseen_fault(unseen_s: float, limit_s: float) -> str:
    """Of an engine that does not come to what it was sent."""
    return f"no request was looked at for {unseen_s:.1f} s (limit {limit_s:g} s)"


def _fault(snapshot: EngineSnapshot, now: float, stall_s: float, unseen_s: float) -> str:
    if snapshot.state == "failed":
        return f"engine failed: {snapshot.error or 'no reason given'}"
    still_s = stalled_s(snapshot, now)
    if still_s > stall_s:
        return (
            f"no step for {still_s:.1f} s (limit {stall_s:g} s)"
            f" with {snapshot.waiting} waiting and {snapshot.running} running"
        )
    if unseen_s > stall_s:
        return unseen_fault(unseen_s, stall_s)
    match snapshot.state:
        case "running":
            return ""
        case "starting":
            return "the model is loading"
        case "draining":
            return "draining: takes no new requests"
        case state:
            return f"engine is {state}"
