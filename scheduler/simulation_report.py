"""What `mlxd simulate` prints and draws."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import RenderableType

from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.fairness import jain_index
from mlxd.scheduler.simulation import Record, TenantRecord
from mlxd.scheduler.tables import facts, page, show_counts, table

_PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def simulation_tables(record: Record) -> RenderableType:
    """A simulation's facts, and a row a tenant."""
    received = record.samples[-1][1]
    shown = facts(
        ("simulated", f"{record.end_s:.1f} s, {record.num_steps} steps"),
        ("tokens", f"{sum(tenant.generated for tenant in record.tenants.values())} generated"),
        ("Jain index", f"{jain_index(list(received.values())):.3f} over all of it"),
        (
            "service gap",
            f"{record.largest_gap:.0f} at most between competing tenants; the bound is {record.bound:.0f}",
        ),
        ("preempted", show_counts(record.preemptions)),
    )
    columns = (
        "tenant",
        "service",
        "ended",
        "rejected",
        "first token p50",
        "p99",
        "gap p50",
        "p99",
        "longest",
    )
    tenants = table(
        "Tenants, times in seconds",
        columns,
        (_row(name, tenant, received[name]) for name, tenant in sorted(record.tenants.items())),
    )
    return page(shown, tenants)


def _row(name: str, tenant: TenantRecord, received: float) -> Sequence[str]:
    firsts, gaps = sorted(tenant.first_tokens_s), sorted(tenant.gaps_s)
    return (
        name,
        f"{received:.0f}",
        show_counts(tenant.outcomes),
        show_counts(tenant.rejected),
        *(_seconds(firsts, share) for share in (0.5, 0.99)),
        *(_seconds(gaps, share) for share in (0.5, 0.99, 1.0)),
    )


def _seconds(ordered: Sequence[float], share: float) -> str:
    """The value that `share` of them do not exceed."""
    return f"{ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]:.2f}" if ordered else "-"


def check_plot(path: Path) -> None:
    """Raises ConfigError where no plot can be drawn at `path`: to be asked before a long simulation."""
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise ConfigError(f"--plot is '{path}'; its name must end in {', '.join(_PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")


def plot_service(records: Mapping[str, Record], path: Path) -> None:
    """Draw service over time, a line a tenant and a panel a policy. Raises ConfigError if it cannot write."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(records), 4), layout="constrained")
    panels = figure.subplots(1, len(records), sharey=True, squeeze=False)[0]
    for panel, (policy, record) in zip(panels, records.items(), strict=True):
        times = [at for at, _ in record.samples]
        for name in record.tenants:
            panel.plot(times, [received[name] for _, received in record.samples], label=name)
        panel.set(title=policy, xlabel="seconds", ylabel="service (weighted tokens / weight)")
        panel.legend(fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
