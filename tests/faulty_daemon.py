"""A daemon that is as always, but its engine breaks: `python faulty_daemon.py raise|hang CONFIG`."""

import asyncio
import sys
import threading
from collections.abc import Sequence

from mlxd.batching.plan import StepPlan
from mlxd.batching.runner import PendingStep, Progress, Runner, RunnerInfo
from mlxd.caches.persistence import PageFormat
from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.metrics.stats import RunnerCounters
from mlxd.scheduler import server
from mlxd.scheduler.config import Config
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.logs import configure_logging
from mlxd.scheduler.model_runner import load_model_runner

FAULTY_STEP = 40


class FaultyRunner:
    """The real runner of the real model, up to `FAULTY_STEP`."""

    def __init__(self, runner: Runner, fault: str) -> None:
        self._runner = runner
        self._fault = fault

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.step_id == FAULTY_STEP:
            if self._fault == "raise":
                raise RuntimeError("the device is gone")
            threading.Event().wait()
        return self._runner.launch(plan)

    def reset(self) -> None:
        self._runner.reset()

    def maintain(self) -> bool:
        return self._runner.maintain()

    @property
    def page_formats(self) -> tuple[PageFormat, ...]:
        return self._runner.page_formats

    def export_pages(self, pages: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._runner.export_pages(pages)

    def counters(self) -> RunnerCounters:
        return self._runner.counters()

    def close(self) -> None:
        self._runner.close()


def main(fault: str, path: str) -> int:
    configure_logging("info")
    config = Config.load(path)
    recorder = PrometheusRecorder([tenant.name for tenant in config.tenants], version="test")

    def make_runner(config: Config, progress: Progress) -> Runner:
        return FaultyRunner(load_model_runner(config, progress), fault)

    engine = Engine(config, runner_factory=make_runner, recorder=recorder)
    return asyncio.run(server.Server(config, engine=engine, recorder=recorder).serve())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
