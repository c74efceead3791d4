"""Traces: who sends which requests when, to what machine. YAML in, arrivals out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config_rules import limit_problems
from mlxd.scheduler.cost_model import CostModel
from mlxd.scheduler.document import Keys, parse_document, read_text
from mlxd.scheduler.events import RequestKey, Submission
from mlxd.scheduler.messages import DeadlineMs
from mlxd.scheduler.priority import Priority, PriorityName
from mlxd.scheduler.replay import MAX_LENGTH, MAX_TOKENS, Replay
from mlxd.scheduler.sections import Name, SchedulerConfig, Seconds, TenantLimits

STOP_TOKEN = 1
MAX_ARRIVALS = 1_000_000
Length = Annotated[int, Meta(ge=1, le=MAX_LENGTH)]


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What rows live in. `kv_tokens`: positions of all rows together."""

    kv_tokens: Length = 65_536
    page_size: Literal[16, 32, 64, 128, 256] = 64
    chunk: Length = 64
    max_model_len: Length = 8_192


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of one tenant, at random times.

    `burst`: so many come at a time, as rarely. Lengths are drawn evenly between two bounds, both included.
    `max_tokens`: what requests ask for; None: exactly what they generate. `cancelled`: part of them that is
    cancelled, up to `patience_s` after their arrival.
    """

    tenant: Name
    per_s: Annotated[float, Meta(gt=0, le=1e5)]
    until_s: Seconds
    from_s: Seconds = 0.0
    burst: Annotated[int, Meta(ge=1, le=MAX_ARRIVALS)] = 1
    prompt_tokens: tuple[Length, Length]
    output_tokens: tuple[Length, Length]
    max_tokens: Length | None = None
    priority: PriorityName = "normal"
    deadline_ms: DeadlineMs | None = None
    cancelled: Annotated[float, Meta(ge=0, le=1)] = 0.0
    patience_s: Seconds = 10.0


class Act(IntEnum):
    """What a client does to its open request."""

    CANCEL = auto()
    PAUSE = auto()
    UNPAUSE = auto()


@dataclass(frozen=True, slots=True)
class Arrival:
    """`cancel_at`: when its client gives up; None: never. `pauses`: from when to when it reads nothing."""

    submission: Submission
    cancel_at: float | None = None
    pauses: tuple[tuple[float, float], ...] = ()

    def acts(self) -> Iterator[tuple[float, Act]]:
        """What its client does later, and when."""
        if self.cancel_at is not None:
            yield self.cancel_at, Act.CANCEL
        for start, end in self.pauses:
            yield start, Act.PAUSE
            yield end, Act.UNPAUSE


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tenants, what they send, and the machine that serves them. `seed`: of all that is drawn."""

    version: Literal[1]
    tenants: Annotated[tuple[TenantLimits, ...], Meta(min_length=1, max_length=10_000)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    scheduler: SchedulerConfig = SchedulerConfig()
    machine: Machine = Machine()
    cost: CostModel = CostModel()
    load: tuple[Load, ...] = ()
    replay: Replay | None = None

    @classmethod
    def load_file(cls, path: str | Path) -> "Trace":
        """Raises ConfigError, one line, for the first thing that is wrong with it."""
        document = parse_document(read_text(path), str(path))
        trace = document.convert(cls)
        for keys, sentence in _problems(trace):
            raise document.error(keys, sentence)
        return trace

    def arrivals(self, folder: Path) -> list[Arrival]:
        """All requests in order of arrival; `folder`: where relative paths begin. Raises ConfigError."""
        random = Random(self.seed)
        made = [arrival for load in self.load for arrival in _arrivals_of(load, random)]
        if self.replay is not None:
            names = [tenant.name for tenant in self.tenants]
            made += [
                _arrival(name, at, num_prompt, num_output)
                for name, at, num_prompt, num_output in self.replay.requests(folder, names, random)
            ]
        made.sort(key=lambda arrival: arrival.submission.arrived_at)
        return [_numbered(arrival, number) for number, arrival in enumerate(made)]


def _problems(trace: Trace) -> Iterator[tuple[Keys, str]]:
    yield from limit_problems(trace.tenants)
    names = {tenant.name for tenant in trace.tenants}
    num_arrivals = num_tokens = 0.0
    for index, load in enumerate(trace.load):
        if load.tenant not in names:
            yield ("load", index, "tenant"), f"is {load.tenant!r}; tenants has no such name"
        if load.until_s <= load.from_s:
            yield ("load", index, "until_s"), f"is {load.until_s:g}; it must be above from_s, {load.from_s:g}"
        for name, (low, high) in (
            ("prompt_tokens", load.prompt_tokens),
            ("output_tokens", load.output_tokens),
        ):
            if low > high:
                yield ("load", index, name), f"is [{low}, {high}]; the first must not be above the second"
        if load.max_tokens is not None and load.max_tokens < load.output_tokens[1]:
            yield (
                ("load", index, "max_tokens"),
                f"is {load.max_tokens}; output_tokens go to {load.output_tokens[1]}",
            )
        num_requests = max(load.per_s * (load.until_s - load.from_s), load.burst)
        num_arrivals += num_requests
        num_tokens += num_requests * (sum(load.prompt_tokens) + sum(load.output_tokens)) / 2
        for name, made, limit in (
            ("requests", num_arrivals, MAX_ARRIVALS),
            ("tokens", num_tokens, MAX_TOKENS),
        ):
            if made > limit:
                yield ("load", index, "per_s"), f"makes about {made:.0f} {name}; the limit is {limit}"
    for index, name in enumerate(trace.replay.bursty if trace.replay is not None else ()):
        if name not in names:
            yield ("replay", "bursty", index), f"is {name!r}; tenants has no such name"
    if not trace.load and trace.replay is None:
        yield ("load",), "is empty and there is no replay; one of them must send requests"


def _arrivals_of(load: Load, random: Random) -> Iterator[Arrival]:
    at = load.from_s
    while (at := at + random.expovariate(load.per_s / load.burst)) < load.until_s:
        for _ in range(load.burst):
            num_output = random.randint(*load.output_tokens)
            arrival = _arrival(load.tenant, at, random.randint(*load.prompt_tokens), num_output, load)
            is_cancelled = random.random() < load.cancelled
            yield (
                Arrival(arrival.submission, at + random.uniform(0, load.patience_s))
                if is_cancelled
                else arrival
            )


def _arrival(tenant: str, at: float, num_prompt: int, num_output: int, load: Load | None = None) -> Arrival:
    """The request's seed says how much it generates: see `CostModel.run`."""
    max_tokens = num_output if load is None or load.max_tokens is None else load.max_tokens
    deadline_ms = None if load is None else load.deadline_ms
    return Arrival(
        Submission(
            key=RequestKey(tenant, ""),
            prompt=_prompt(num_prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=num_output, stop_token_ids=(STOP_TOKEN,)),
            arrived_at=at,
            priority=Priority.of("normal" if load is None else load.priority),
            deadline=None if deadline_ms is None else at + deadline_ms / 1000,
        )
    )


@lru_cache(maxsize=65536)
def _prompt(num_tokens: int) -> tuple[int, ...]:
    """Shared, as a trace may have tens of millions of tokens."""
    return (0,) * num_tokens


def _numbered(arrival: Arrival, number: int) -> Arrival:
    key = arrival.submission.key._replace(request_id=str(number))
    return replace(arrival, submission=replace(arrival.submission, key=key))
