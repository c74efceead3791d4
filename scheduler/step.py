"""A step from its planning to its tokens."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial

from mlxd.batching.plan import DecodeEntry, PrefillChunk, RestoredPage, StepPlan, StepResult
from mlxd.metrics.stats import StepStats
from mlxd.scheduler.request import Request

Counts = defaultdict[str, int]
"""By tenant. No Counter, as several are made for each step."""


@dataclass(slots=True, eq=False)
class Step:
    """A plan being made; kept until its result is read, since rows may leave in between.

    Attributes:
        decoding, prefilling: the requests of `decode` and `chunks`, in the same order.
        prompt_tokens: prompt positions that it computes for the first time, by tenant.
        recomputed_tokens: positions that it computes again for rows that were preempted, by tenant.
        cached_tokens: prompt positions found in the prefix cache and not computed before, by tenant.
        prefix_query_tokens, prefix_hit_tokens: known tokens of rows that entered, and those found, by tenant.
        num_joined: rows that entered while it was planned.
        preempted: why rows gave up their pages while it was planned, one each.
        hopeless: requests that were next and could not meet their deadline any more; queued no longer.
    """

    step_id: int
    planned_at: float = 0.0
    decode: list[DecodeEntry] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    prefilling: list[Request] = field(default_factory=list)
    num_prefill_tokens: int = 0
    prompt_tokens: Counts = field(default_factory=partial(defaultdict, int))
    recomputed_tokens: Counts = field(default_factory=partial(defaultdict, int))
    cached_tokens: Counts = field(default_factory=partial(defaultdict, int))
    prefix_query_tokens: Counts = field(default_factory=partial(defaultdict, int))
    prefix_hit_tokens: Counts = field(default_factory=partial(defaultdict, int))
    num_joined: int = 0
    preempted: list[str] = field(default_factory=list)
    hopeless: list[Request] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.chunks

    def inherit(self, lost: "Step") -> None:
        """Count what was planned in a step that nobody will read: it is told with this one."""
        for own, others in (
            (self.prompt_tokens, lost.prompt_tokens),
            (self.recomputed_tokens, lost.recomputed_tokens),
            (self.cached_tokens, lost.cached_tokens),
            (self.prefix_query_tokens, lost.prefix_query_tokens),
            (self.prefix_hit_tokens, lost.prefix_hit_tokens),
        ):
            for name, count in others.items():
                own[name] += count
        self.num_joined += lost.num_joined
        self.preempted += lost.preempted

    def add_reused(self, request: Request) -> int:
        """Counts what a row that just entered found in the prefix cache.

        Returns:
            Prompt positions among them that were never computed or found before.
        """
        assert request.row is not None
        fresh = request.charge_prompt()
        request.num_cached += fresh
        if request.chain is not None:
            self.prefix_query_tokens[request.tenant] += request.num_known
        if request.row.num_reused:
            self.prefix_hit_tokens[request.tenant] += request.row.num_reused
            self.cached_tokens[request.tenant] += fresh
        return fresh

    def add_decode(self, request: Request) -> int:
        """Advances the request by one position and one token in flight. Its row has room.

        Returns:
            1 where the position is its prompt's last and was never computed before, else 0.
        """
        row, position, output = request.row, request.num_computed, request.output
        assert row is not None
        is_first = position == request.prefill_end
        token = (output or request.prompt)[-1] if is_first else None
        self.decode.append(DecodeEntry(row, position, len(output) + request.num_inflight, token))
        self.decoding.append(request)
        request.num_computed = position + 1
        request.num_inflight += 1
        return self._count_prompt(request, 1) if is_first and not output else 0

    def add_chunk(self, request: Request, end: int) -> int:
        """Advances the request to position `end`. Its row has room.

        Returns:
            Prompt positions among them that were never computed before.
        """
        assert request.row is not None
        start = request.num_computed
        self.chunks.append(PrefillChunk(request.row, start, end, request.tokens(start, end)))
        self.prefilling.append(request)
        self.num_prefill_tokens += end - start
        request.num_computed = end
        return self._count_prompt(request, end - start)

    def _count_prompt(self, request: Request, num_positions: int) -> int:
        """The last `num_positions` that the request advanced by are of its prompt, or computed again."""
        fresh = request.charge_prompt()
        if fresh:
            self.prompt_tokens[request.tenant] += fresh
        if fresh < num_positions:
            self.recomputed_tokens[request.tenant] += num_positions - fresh
        return fresh

    def plan(
        self,
        scrub: tuple[tuple[int, ...], ...],
        left: tuple[int, ...],
        restored: tuple[RestoredPage, ...],
        copies: tuple[tuple[tuple[int, int], ...], ...],
    ) -> StepPlan:
        return StepPlan(self.step_id, tuple(self.decode), tuple(self.chunks), scrub, left, restored, copies)


@dataclass(slots=True)
class Tally:
    """Counts since the last step that was read. `left`: rows whose request ended."""

    generated: Counts = field(default_factory=partial(defaultdict, int))
    gaps_s: list[float] = field(default_factory=list)
    left: int = 0

    def stats(self, step: Step, result: StepResult, now: float) -> StepStats:
        return StepStats(
            decode_rows=len(step.decode),
            prefill_rows=len(step.chunks),
            prompt_tokens=dict(step.prompt_tokens),
            recomputed_tokens=dict(step.recomputed_tokens),
            cached_tokens=dict(step.cached_tokens),
            prefix_query_tokens=dict(step.prefix_query_tokens),
            prefix_hit_tokens=dict(step.prefix_hit_tokens),
            generated_tokens=dict(self.generated),
            step_s=now - step.planned_at,
            decode_s=result.decode_s,
            prefill_s=result.prefill_s,
            join_s=0.0,
            leave_s=0.0,
            joined=step.num_joined,
            left=self.left,
            token_gaps_s=tuple(self.gaps_s),
            preemptions=dict(Counter(step.preempted)) if step.preempted else {},
            compiled=result.compiled,
        )
