"""Traces for the scheduler's properties, each from a seed."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from msgspec import structs

from mlxd.scheduler.config import SchedulerConfig, TenantLimits
from mlxd.scheduler.priority import PriorityName
from mlxd.scheduler.trace import Arrival, Load, Machine, Trace

CLASSES: tuple[PriorityName, ...] = ("interactive", "normal", "batch")
KV_TOKENS = 1024


def random_trace(
    seed: int,
    *,
    caps: bool = True,
    classes: bool = True,
    cancels: bool = True,
    deadlines: bool = False,
    policy: str = "fair",
    lasting: float = 1.0,
) -> Trace:
    """Two to fifty tenants on a small machine; some send much, or in bursts; `lasting` times some seconds."""
    random = Random(seed)
    deadlines_ms = [None, 2_000, 20_000] if deadlines else [None]
    names = [f"t{index}" for index in range(random.choice([2, 2, 3, 5, 10, random.randrange(2, 51)]))]
    return Trace(
        version=1,
        seed=seed,
        tenants=tuple(_tenant(random, name, len(names), caps=caps) for name in names),
        scheduler=SchedulerConfig(
            policy=policy,  # type: ignore[arg-type]
            max_rows=random.choice([1, 2, 4, 8]),
            max_waiting=10_000,
            prefill_ms=random.choice([1, 100, 400]),
            output_weight=1.0,
            ageing_s=random.choice([2.0, 20.0]),
            slice_tokens=random.choice([None, 4, 16]),
            max_preemptions=random.choice([0, 1, 3]),
            backfill_s=random.choice([0.0, 1.0, 10.0]),
        ),
        machine=Machine(kv_tokens=KV_TOKENS, page_size=16, chunk=random.choice([16, 64]), max_model_len=512),
        load=tuple(
            structs.replace(
                _load(random, name, len(names), classes=classes, cancels=cancels, lasting=lasting),
                deadline_ms=deadlines_ms[index % len(deadlines_ms)],
            )
            for index, name in enumerate(names)
        ),
    )


def with_pauses(arrivals: Iterable[Arrival], seed: int) -> list[Arrival]:
    """Half of the clients stop reading up to three times, for up to five seconds each."""
    random = Random(seed)
    return [replace(each, pauses=_pauses(random, each.submission.arrived_at)) for each in arrivals]


def _pauses(random: Random, at: float) -> tuple[tuple[float, float], ...]:
    made = []
    for _ in range(random.choice([0, 0, 1, 3])):
        start = at + random.uniform(0, 3)
        at = start + random.uniform(0, 5)
        made.append((start, at))
    return tuple(made)


def _tenant(random: Random, name: str, num_tenants: int, *, caps: bool) -> TenantLimits:
    weight = random.choice([0.5, 1.0, 1.0, 4.0])
    if not caps or random.random() < 0.4:
        max_prefilling = 2 if caps else 1024
        return TenantLimits(
            name=name,
            weight=weight,
            max_waiting=10_000,
            max_priority="interactive",
            max_prefilling=max_prefilling,
        )
    return TenantLimits(
        name=name,
        weight=weight,
        max_running=random.choice([1, 2, 32]),
        max_waiting=random.choice([5, 10_000]),
        kv_share=random.choice([0.3, 1.0]),
        kv_reserve=random.choice([0.0, 0.0, 0.5 / num_tenants]),
        tokens_per_minute=random.choice([None, None, 400, 2000]),
        max_prefilling=random.choice([1, 2, 4]),
        max_priority=random.choice(CLASSES),
    )


def _load(
    random: Random, name: str, num_tenants: int, *, classes: bool, cancels: bool, lasting: float
) -> Load:
    until_s = random.choice([1.0, 4.0])
    longest = random.choice([4, 60, 200])
    return Load(
        tenant=name,
        per_s=random.choice([1.0, 1.0, 8.0]) * 4 / num_tenants,
        from_s=random.choice([0.0, 0.0, 3.0]),
        until_s=lasting * (until_s + 3.0),
        burst=random.choice([1, 1, 10]),
        prompt_tokens=(1, longest),
        output_tokens=(1, random.choice([2, 30, 80])),
        max_tokens=random.choice([None, 80]),
        priority=random.choice(CLASSES) if classes else "normal",
        cancelled=random.choice([0.0, 0.3]) if cancels else 0.0,
        patience_s=5.0,
    )
