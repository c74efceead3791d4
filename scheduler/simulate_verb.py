"""What `mlxd simulate` does."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.sections import PolicyName
from mlxd.scheduler.simulation import Record, Simulation
from mlxd.scheduler.simulation_report import check_plot, plot_service, simulation_tables
from mlxd.scheduler.tables import show
from mlxd.scheduler.trace import Trace


def simulate(path: Path, policies: Sequence[str], plot: Path | None) -> None:
    """Run a trace under each policy, or the one it names, and print what came of it. Raises ConfigError."""
    if plot is not None:
        check_plot(plot)
    trace = Trace.load_file(path)
    records: dict[str, Record] = {}
    for name in policies:
        if name not in get_args(PolicyName):
            raise ConfigError(f"--policy is {name!r}; it must be fair or fcfs")
    for name in policies or [trace.scheduler.policy]:
        scheduler = replace(trace.scheduler, policy=name)
        records[name] = Simulation(replace(trace, scheduler=scheduler), trace.arrivals(path.parent)).run()
        print(f"policy {name}")
        show(simulation_tables(records[name]))
    if plot is not None:
        plot_service(records, plot)
