"""Tenants that share a daemon on the built-in model, under `fair` and under `fcfs`.

    python benchmarks/fairness.py flood --minutes 5 --plot docs/fairness-flood
    python benchmarks/fairness.py trace --minutes 10 --plot docs/fairness-trace \\
        --csv examples/traces/AzureLLMInferenceTrace_conv.csv

`flood`: a victim asks now and then, a flooder offers a hundred times as much; first the victim alone, then
both, under each policy. `trace`: recorded arrivals, split over ten tenants of whom two send a minute's
requests at once; see `azure.py`. Policies run one after the other, each in a daemon of its own. Prints a JSON
line for each policy and tenant, then a table in markdown; `--out` adds the lines to a file, `--plot` draws
NAME.png and NAME.svg (needs matplotlib).
"""

import argparse
import asyncio
import hashlib
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import azure
import entry
import msgspec
import numpy as np
from daemon import Daemon, make_config
from figures import Line, record
from open_loop import Due, Outcome, connect, replay
from options import Parser, add_out, add_plot, amount, input_file, number_from, served, some_of

from mlxd.scheduler.config import CacheConfig, Config, SchedulerConfig, TenantConfig

VICTIM, FLOODER = "victim", "flooder"
RATIO = 100
MAX_ROWS = 8
MAX_WAITING = 32
DEFAULTS = SchedulerConfig()

Run = tuple[str, list[Outcome]]


def config_of(folder: Path, options: argparse.Namespace, tenants: Sequence[str], policy: str) -> Config:
    """Equal tenants, and the benchmark's own that only looks."""
    cache = CacheConfig(budget="1GiB", prefix=False)
    config = make_config(folder, options.model, MAX_ROWS, cache)
    named = (
        TenantConfig(
            name=name, token_sha256=hashlib.sha256(name.encode()).hexdigest(), max_waiting=MAX_WAITING
        )
        for name in tenants
    )
    return msgspec.structs.replace(
        config,
        tenants=(*config.tenants, *named),
        scheduler=msgspec.structs.replace(config.scheduler, policy=policy),
    )


@asynccontextmanager
async def serving(options: argparse.Namespace, tenants: Sequence[str], policy: str) -> AsyncIterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="mlxd-fairness-") as folder:
        daemon = Daemon(Path(folder), config_of(Path(folder), options, tenants, policy))
        try:
            await daemon.start()
            yield daemon
        finally:
            await daemon.end()


async def run(
    daemon: Daemon, tenants: Sequence[str], requests: Sequence[Due], awaited: Sequence[str]
) -> list[Outcome]:
    clients = connect(daemon.config.server.submit, tenants)
    try:
        return await replay(clients, requests, awaited)
    finally:
        for client in clients.values():
            await client.close()


def poisson(tenant: str, per_s: float, options: argparse.Namespace) -> list[Due]:
    rng, at_s, requests = random.Random(tenant), 0.0, []
    while (at_s := at_s + rng.expovariate(per_s)) < 60 * options.minutes:
        requests.append(Due(tenant, at_s, options.prompt, options.output))
    return requests


async def flood(options: argparse.Namespace) -> list[Run]:
    tenants = (VICTIM, FLOODER)
    few = poisson(VICTIM, options.rate, options)
    many = sorted(few + poisson(FLOODER, RATIO * options.rate, options), key=lambda due: due.at_s)
    runs: list[Run] = []
    for policy in options.policies:
        async with serving(options, tenants, policy) as daemon:
            if not runs:
                runs.append(("alone", await run(daemon, tenants, few, [VICTIM])))
            runs.append((policy, await run(daemon, tenants, many, [VICTIM])))
    return runs


async def trace(options: argparse.Namespace) -> list[Run]:
    requests = azure.read(options.csv, 60 * options.minutes, options.time_scale, options.length_scale)
    runs: list[Run] = []
    for policy in options.policies:
        async with serving(options, azure.TENANTS, policy) as daemon:
            runs.append((policy, await run(daemon, azure.TENANTS, requests, azure.TENANTS)))
    return runs


def figures_of(outcomes: Sequence[Outcome]) -> Line:
    """Of one tenant. Service: weighted tokens of prompts that were answered and of answers."""
    served = [outcome for outcome in outcomes if outcome.token_times_s]
    first = [outcome.first_token_s for outcome in served]
    gaps = [gap for outcome in served for gap in outcome.gaps_s]
    spans = [outcome.token_times_s[-1] - outcome.token_times_s[0] for outcome in served]
    return {
        "requests": len(outcomes),
        "rejected": sum(bool(outcome.refused) for outcome in outcomes),
        "service": round(
            sum(
                DEFAULTS.prompt_weight * outcome.due.prompt_tokens
                + DEFAULTS.output_weight * outcome.num_tokens
                for outcome in served
            )
        ),
        "first_token_s_p50": quantile(first, 0.5),
        "first_token_s_p99": quantile(first, 0.99),
        "gap_ms_p50": quantile(gaps, 0.5, 1000),
        "gap_ms_p99": quantile(gaps, 0.99, 1000),
        "answer_s_p50": quantile(spans, 0.5),
    }


def quantile(values: Sequence[float], share: float, factor: float = 1) -> float | None:
    return round(factor * float(np.quantile(values, share)), 3) if values else None


def lines_of(runs: Sequence[Run]) -> list[Line]:
    lines = []
    for policy, outcomes in runs:
        for tenant in dict.fromkeys(sorted(outcome.due.tenant for outcome in outcomes)):
            own = [outcome for outcome in outcomes if outcome.due.tenant == tenant]
            lines.append({"policy": policy, "tenant": tenant, **figures_of(own)})
    return lines


def print_table(lines: Sequence[Line]) -> None:
    print(
        "\n| policy | tenant | requests | rejected | service | first token p50 / p99, s | gap p50 / p99, ms |"
        "\n|---|---|---|---|---|---|---|"
    )
    for line in lines:
        counts = " | ".join(f"{line[name]:,}" for name in ("requests", "rejected", "service"))
        first = f"{shown(line['first_token_s_p50'], 2)} / {shown(line['first_token_s_p99'], 2)}"
        gaps = f"{shown(line['gap_ms_p50'], 0)} / {shown(line['gap_ms_p99'], 0)}"
        print(f"| {line['policy']} | {line['tenant']} | {counts} | {first} | {gaps} |")


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def print_verdict(lines: Sequence[Line]) -> None:
    """The victim's p99 beside twice what it is alone and a flooder's row: its prompt and its answer."""
    by = {(line["policy"], line["tenant"]): line for line in lines}
    alone = by["alone", VICTIM]
    for (policy, tenant), line in by.items():
        if tenant == FLOODER:
            row_s = alone["first_token_s_p50"] + line["answer_s_p50"]
            bound_s = 2 * alone["first_token_s_p99"] + row_s
            got_s = by[policy, VICTIM]["first_token_s_p99"]
            print(f"{policy}: victim's first token, p99 {got_s:.2f} s; aim {bound_s:.2f} s")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("what", choices=("flood", "trace"))
    parser.add_argument("--minutes", type=amount, default=5.0, help="of arrivals, for each run")
    parser.add_argument("--model", type=served, default="smollm2-135m-instruct")
    parser.add_argument("--policies", type=some_of("fair", "fcfs"), default=["fair", "fcfs"])
    parser.add_argument("--rate", type=amount, default=0.4, help="flood: the victim's requests a second")
    parser.add_argument("--prompt", type=number_from(1), default=48, help="flood: tokens of a prompt")
    parser.add_argument("--output", type=number_from(1), default=16, help="flood: tokens of an answer")
    parser.add_argument("--csv", type=input_file, help="trace: the recording")
    parser.add_argument("--time-scale", type=amount, default=2.5)
    parser.add_argument("--length-scale", type=amount, default=1 / 16)
    add_plot(parser)
    add_out(parser, "fairness")
    options = parser.options()
    if options.what == "trace" and options.csv is None:
        parser.error("trace needs --csv")
    runs = asyncio.run({"flood": flood, "trace": trace}[options.what](options))
    lines = lines_of(runs)
    for line in lines:
        record(line, options.out)
    print_table(lines)
    if options.what == "flood":
        print_verdict(lines)
    if options.plot is not None:
        from fairness_plot import draw

        draw(runs, options.plot)


if __name__ == "__main__":
    entry.run(main)
