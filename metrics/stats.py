"""Plain facts a step or a request leaves behind; what they become is the recorder's business."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class QuotaGauges:
    """A minute's tokens: `level` of `per_minute` there at `at`, in seconds, of which rows hold `held`."""

    per_minute: int
    level: float
    at: float
    held: int


@dataclass(frozen=True, slots=True)
class TenantGauges:
    """One tenant's live state.

    Attributes:
        service: weighted tokens over its weight, lifted when it comes back.
        work: weighted tokens since the start.
        quota: None where its tokens are not limited.
    """

    waiting: int = 0
    running: int = 0
    kv_reserved_bytes: int = 0
    service: float = 0.0
    paused: int = 0
    work: float = 0.0
    quota: QuotaGauges | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """Left by every step, after its tokens were read.

    Attributes:
        decode_rows: rows that drew a token.
        prefill_rows: rows that computed a chunk of their prompt.
        prompt_tokens: prompt positions computed for the first time, by tenant; the last one of a prompt is in
            the step that draws its first token.
        recomputed_tokens: positions computed again for rows that were preempted, by tenant.
        cached_tokens: prompt positions found in the prefix cache and never computed before, by tenant.
        prefix_query_tokens, prefix_hit_tokens: known tokens of rows that entered, and those of them that were
            found in the prefix cache, by tenant; a row that enters again counts again.
        generated_tokens: tokens drawn and kept, by tenant.
        step_s: from launch to tokens read; decode_s and prefill_s are its device parts.
        joined, left: rows that entered, and rows whose request ended; preempted ones are not among these.
        join_s, leave_s: host time spent on them; 0 where there are none.
        token_gaps_s: time since each row's previous token.
        preemptions: rows preempted while this step was planned, by reason.
    """

    decode_rows: int
    prefill_rows: int
    prompt_tokens: dict[str, int]
    recomputed_tokens: dict[str, int]
    generated_tokens: dict[str, int]
    step_s: float
    decode_s: float
    prefill_s: float
    join_s: float
    leave_s: float
    joined: int
    left: int
    token_gaps_s: tuple[float, ...]
    preemptions: dict[str, int]
    compiled: bool
    cached_tokens: dict[str, int] = field(default_factory=dict)
    prefix_query_tokens: dict[str, int] = field(default_factory=dict)
    prefix_hit_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Left by every accepted request at its end.

    Attributes:
        outcome: "stop", "length", "cancelled", "client_gone", "slow_client", "expired", "hopeless",
            "revoked", "failed" or "draining".
        queue_s: arrival to the latest start of its prefill; None where it never started.
        first_token_s: arrival to first token; None where it gave none.
        cached_tokens: prompt tokens that were found in the prefix cache.
    """

    tenant: str
    outcome: str
    prompt_tokens: int
    generated_tokens: int
    queue_s: float | None
    first_token_s: float | None
    duration_s: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DiskStats:
    """The disk tier of the prefix cache: bytes now, the rest since the start.

    Attributes:
        pages: "saved", "loaded", "dropped" (not written in time) and "evicted".
        misses: by reason: "absent", "truncated", "corrupt", "foreign", "slow" (computing is faster), "busy"
            (the step's time for loading is over).
        load_s, save_s: time spent on reading and verifying, and on writing.
        num_stored: pages that are there now.
        is_off: it failed, and nothing more is stored or found.
    """

    used_bytes: int
    capacity_bytes: int
    pages: dict[str, int]
    misses: dict[str, int]
    load_s: float
    save_s: float
    num_stored: int = 0
    is_off: bool = False


@dataclass(frozen=True, slots=True)
class FairnessStats:
    """How tenants are served beside each other; sampled once a second, the counts are of now.

    Attributes:
        service_gap: between the highest and the lowest counter of tenants that wait.
        jain_index: of the service that those tenants got lately who waited all the time; 1 is equal.
        waits: waiting requests, by what their tenant's next one lacks.
        preemptions: rows that made way since the start, by reason.
        missed: requests that ended by their deadline since the start: "expired", "hopeless".
    """

    service_gap: float = 0.0
    jain_index: float = 1.0
    waits: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerCounters:
    """Graphs and steps since the start, and the memory that the runner's library reports, in bytes."""

    graph_compiles: int = 0
    graph_retraces: int = 0
    graph_failures: int = 0
    compiled_steps: int = 0
    eager_steps: int = 0
    buckets: tuple[str, ...] = ()
    memory_active_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's state after a step, replaced whole; readers on other threads keep the old one.

    Times are of the engine's monotonic clock. `last_step_at` 0.0 means no step yet.

    Attributes:
        state: "starting", "running", "draining", "stopped" or "failed".
        busy_since: when `waiting + running` last rose from 0; 0.0 where the engine does not tell.
    """

    state: str = "starting"
    now: float = 0.0
    last_step_at: float = 0.0
    busy_since: float = 0.0
    steps: int = 0
    waiting: int = 0
    running: int = 0
    paused: int = 0
    """Neither waiting nor running: until their clients read more."""
    prefilling: int = 0
    prefill_tokens_left: int = 0
    tenants: dict[str, TenantGauges] = field(default_factory=dict)
    kv_used_bytes: int = 0
    kv_reserved_bytes: int = 0
    kv_capacity_bytes: int = 0
    pages: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Group name -> (held by rows, total)."""
    cached_pages: dict[str, int] = field(default_factory=dict)
    """Group name -> pages that no row holds, kept by the prefix cache."""
    prefix_evictions: int = 0
    """Cached pages of all groups given up for others, since the start."""
    disk: DiskStats | None = None
    """None: there is no disk tier."""
    fairness: FairnessStats = FairnessStats()
    runner: RunnerCounters = RunnerCounters()
    memory_planned_bytes: int = 0
    """Weights and all pages; what is active beyond it is what steps compute with."""
    out_of_memory: int = 0
    """Times that a step, or what belongs to one, found no memory."""
    notes: dict[str, str] = field(default_factory=dict)
    error: str = ""
