"""Host cost of scheduling: plan + postprocess per step, the runner excluded.

    python benchmarks/scheduling.py [--rows 64] [--tenants 50] [--waiting 10000] [--steps 2000] [--plain]
        [--out FILE]

Prints one JSON line; `--out` appends it to a file. Rows end and queued requests enter all the time; a third
of the tenants have caps, requests are of all classes and half of them have a deadline, unless `--plain`. The
clock is this thread's CPU time, so that what else runs on the machine does not count.
"""

import gc
import statistics
import time
from random import Random

import entry
from figures import record
from options import Parser, add_out, number_from

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config import Config, SchedulerConfig, TenantConfig
from mlxd.scheduler.events import Event, RequestKey, Submission
from mlxd.scheduler.priority import Priority
from mlxd.scheduler.scheduler import Scheduler

CAPS = {"tokens_per_minute": 10_000_000, "max_prefilling": 1}


def make_scheduler(
    rows: int, tenants: int, waiting: int, policy: str, *, plain: bool
) -> tuple[Scheduler, FakeRunner]:
    memory = fake_memory(max_rows=rows, max_model_len=2048, chunk=128, page_size=64, window=512)
    runner = FakeRunner(memory, checks=False, prefill_s_per_token=1e-4)
    configs = tuple(
        TenantConfig(
            name=f"t{i}",
            token_sha256="0" * 64,
            weight=1 + i % 4,
            max_running=rows,
            max_waiting=waiting,
            max_priority="interactive",
            **({} if plain or i % 3 else CAPS | {"kv_reserve": min(0.01, 1 / tenants)}),
        )
        for i in range(tenants)
    )
    settings = SchedulerConfig(policy=policy, max_rows=rows, max_waiting=2 * waiting)  # type: ignore[arg-type]
    config = Config(version=1, tenants=configs, scheduler=settings)
    return Scheduler(config, runner.info), runner


class Arrivals:
    """Keeps the queues at a length: what left is replaced."""

    def __init__(self, scheduler: Scheduler, tenants: int, target: int, *, plain: bool) -> None:
        self._scheduler = scheduler
        self._tenants = tenants
        self._target = target
        self._plain = plain
        self._random = Random(1)
        self._count = 0

    def top_up(self, now: float) -> None:
        while self._scheduler.num_waiting < self._target:
            self._count += 1
            key = RequestKey(f"t{self._count % self._tenants}", str(self._count))
            prompt = tuple(self._random.choices(range(1000), k=self._random.randrange(1, 400)))
            sampling = SamplingParams(max_tokens=self._random.randrange(50, 300))
            priority, deadline = Priority.NORMAL, None
            if not self._plain:
                priority = Priority(self._random.choices((0, 1, 2), (1, 8, 2))[0])
                deadline = now + self._random.choice((1e4, 1e5)) if self._count % 2 else None
            self._scheduler.submit(Submission(key, prompt, sampling, now, priority, deadline))


def measure(
    rows: int, tenants: int, waiting: int, steps: int, policy: str, *, plain: bool = False
) -> dict[str, object]:
    """Milliseconds of schedule + postprocess, one pipelined step at a time."""
    scheduler, runner = make_scheduler(rows, tenants, waiting, policy, plain=plain)
    arrivals = Arrivals(scheduler, tenants, waiting, plain=plain)
    arrivals.top_up(0.0)
    costs_ms: list[float] = []
    sizes: list[int] = []
    before = None
    gc.collect()
    gc.freeze()
    for step in range(steps + rows):
        now = 0.01 * step
        begun = time.thread_time()
        plan = scheduler.schedule(now, [])
        cost = time.thread_time() - begun
        pending = None if plan is None else runner.launch(plan)
        if before is not None:
            result = before.wait()
            events: list[Event] = []
            begun = time.thread_time()
            scheduler.postprocess(before.plan, result, now, events)
            cost += time.thread_time() - begun
        before = pending
        if step >= rows and plan is not None:
            costs_ms.append(1000 * cost)
            sizes.append(len(plan.decode))
        arrivals.top_up(now)
    return {
        "benchmark": "scheduling",
        "policy": policy,
        "plain": plain,
        "rows": rows,
        "tenants": tenants,
        "waiting": waiting,
        "steps": steps,
        "mean_decode_rows": round(statistics.mean(sizes), 1),
        "median_ms": round(statistics.median(costs_ms), 4),
        "mean_ms": round(statistics.mean(costs_ms), 4),
        "p99_ms": round(statistics.quantiles(costs_ms, n=100)[98], 4),
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rows", type=number_from(1), default=64)
    parser.add_argument("--tenants", type=number_from(1), default=50)
    parser.add_argument("--waiting", type=number_from(1), default=10_000)
    parser.add_argument("--steps", type=number_from(2), default=2_000)
    parser.add_argument("--policy", choices=("fair", "fcfs"), default="fair")
    parser.add_argument("--plain", action="store_true", help="one class, no caps, no deadlines")
    add_out(parser, "scheduling")
    args = parser.options()
    figures = measure(args.rows, args.tenants, args.waiting, args.steps, args.policy, plain=args.plain)
    record(figures, args.out)


if __name__ == "__main__":
    entry.run(main)
