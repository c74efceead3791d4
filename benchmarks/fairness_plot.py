"""What tenants met under each policy: first tokens, and answers over time."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from open_loop import Outcome

WATCHED = ("victim", "steady")
"""First tokens are drawn of tenants whose names begin so: those that the others may harm."""

Run = tuple[str, list[Outcome]]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Writes `path` with .png and .svg. A run without sharing, "alone", has no panel of answers."""
    mpl.rcParams["svg.hashsalt"] = "mlxd"  # the same figures give the same file
    shared = [run for run in runs if run[0] != "alone"]
    figure = Figure(figsize=(4.5 * (1 + len(shared)), 4), layout="constrained")
    first, *panels = figure.subplots(1, 1 + len(shared))
    for run in runs:
        _draw_first_tokens(first, *run)
    first.set(xscale="log", xlabel="first token after, s", ylabel="part of their requests", ylim=(0, 1.02))
    first.legend()
    first.grid(alpha=0.3)
    for axes, run in zip(panels, shared, strict=True):
        _draw_answers(axes, *run)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def _draw_first_tokens(axes: Axes, policy: str, outcomes: Sequence[Outcome]) -> None:
    served = [outcome for outcome in outcomes if outcome.token_times_s]
    waits = np.sort([each.first_token_s for each in served if each.due.tenant.startswith(WATCHED)])
    axes.step(waits, np.arange(1, len(waits) + 1) / len(waits), where="post", label=policy)


def _draw_answers(axes: Axes, policy: str, outcomes: Sequence[Outcome]) -> None:
    for tenant in sorted({outcome.due.tenant for outcome in outcomes}):
        times = sorted(at for each in outcomes if each.due.tenant == tenant for at in each.token_times_s)
        axes.step(times, np.arange(1, len(times) + 1), where="post", label=tenant)
    axes.set(title=policy, xlabel="time, s", ylabel="tokens of answers")
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)
