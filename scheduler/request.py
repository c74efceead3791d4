"""A waiting or running job, and the states it may go through."""

from dataclasses import dataclass, field
from enum import Enum, auto

from mlxd.batching.row import Row
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.chain import PageChain
from mlxd.caches.ledger import Reservation
from mlxd.scheduler.errors import InvalidTransitionError
from mlxd.scheduler.events import RequestKey, Usage
from mlxd.scheduler.priority import Priority

_MASK = 2**64 - 1


class RequestState(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    """Lost its pages and keeps its tokens; runs again by recomputing them."""
    PAUSED = auto()
    """The same, but not queued: its client is behind in reading what it drew."""
    FINISHED = auto()


_ALLOWED = {
    RequestState.WAITING: {RequestState.RUNNING, RequestState.PAUSED, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.PREEMPTED, RequestState.PAUSED, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.RUNNING, RequestState.PAUSED, RequestState.FINISHED},
    RequestState.PAUSED: {RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request. Whether it prefills or decodes is derived from its counts, never stored.

    Its known tokens are prompt + output; the last one is fed by a decode step, those before it by chunks:

        [0, row.num_reused)            pages of other rows
        [row.num_reused, prefill_end)  chunks, since it last entered the batch
        [prefill_end, num_computed)    decode steps

    Attributes:
        number: order of arrival, unique.
        seed: the client's, or derived from the engine's seed and `number`.
        stop_ids: tokens that end it: its own stop ids, and the model's unless ignore_eos.
        worst_case: pages it may hold at most.
        output: tokens drawn and read.
        most_positions: that it may ever have; the token drawn last gets none.
        num_computed: positions whose keys and values are scheduled or there.
        num_inflight: tokens being drawn by launched steps that were not read yet.
        num_charged: prompt positions its tenant was charged for; a recomputation is not charged again.
        num_cached: prompt positions among them that came out of the prefix cache.
        chain: its tokens' pages as the prefix cache knows them; None until looked up, or where there is none.
        stops: positions, in order, at which a chunk of its row ends besides the multiples of the chunk size.
        pays_again: its client made it lose its row, so what is computed again is charged again.
        priority: its class. `level`: the one it is served in, which ageing raises.
        deadline: when it ends as expired, on the engine's clock; None: never.
        blocked_since: when it was first picked and found no pages.
        entered_step: when it last entered the batch. `entered_output`: tokens drawn before that.
        entered_at: the same in seconds, but for returns from a pause.
    """

    number: int
    key: RequestKey
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    worst_case: Reservation
    arrived_at: float
    state: RequestState = RequestState.WAITING
    row: Row | None = None
    output: list[int] = field(default_factory=list)
    most_positions: int = field(init=False)
    prefill_end: int = 0
    num_computed: int = 0
    num_inflight: int = 0
    num_charged: int = 0
    num_cached: int = 0
    chain: PageChain | None = None
    stops: tuple[int, ...] = ()
    num_preemptions: int = 0
    pays_again: bool = False
    priority: Priority = Priority.NORMAL
    level: int = Priority.NORMAL
    deadline: float | None = None
    blocked_since: float | None = None
    entered_at: float | None = None
    entered_step: int = 0
    entered_output: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.most_positions = len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def tenant(self) -> str:
        return self.key.tenant

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def prefill_left(self) -> int:
        """Positions that chunks still have to compute; while it is queued, those it will need."""
        if self.row is None:
            return self.num_known - 1
        return max(0, self.prefill_end - self.num_computed)

    @property
    def can_decode(self) -> bool:
        """Whether its row's next step draws a token: its chunks are scheduled, max_tokens are not drawn."""
        return self.prefill_end <= self.num_computed < self.most_positions

    @property
    def num_drawn(self) -> int:
        """Tokens since it last entered the batch, those in flight among them."""
        return len(self.output) + self.num_inflight - self.entered_output

    @property
    def most_left(self) -> int:
        """Tokens it may still draw."""
        return self.sampling.max_tokens - len(self.output) - self.num_inflight

    @property
    def fewest_left(self) -> int:
        """Tokens it draws at least before it ends."""
        can_stop = self.stop_ids or self.sampling.stop
        return min(1, self.most_left) if can_stop else self.most_left

    @property
    def quota(self) -> int:
        """Tokens of its tenant's minute it may still use: the rest of its prompt, and all it may draw."""
        return len(self.prompt) - self.num_charged + self.sampling.max_tokens - len(self.output)

    def steps_left(self, chunk: int) -> int:
        """Steps until it ended at the latest, if its chunks wait for no other's."""
        return -(-self.prefill_left // chunk) + self.most_left

    @property
    def num_settled(self) -> int:
        """Positions whose keys and values are final for every later step: launched steps wrote them.

        The last known position is not among them. Pipelined steps may write it and the one after it still,
        whose token nobody may ever read.
        """
        return min(self.num_computed, self.num_known - 1)

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), len(self.output), self.num_cached)

    def chunk_end(self, chunk: int) -> int:
        """Where its next chunk ends: the next multiple of `chunk`, or a stop; whoever shares the batch."""
        start = self.num_computed if self.row is not None else 0
        end = min((start // chunk + 1) * chunk, start + self.prefill_left)
        return min((stop for stop in self.stops if start < stop < end), default=end)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens [start, end)."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        return self.prompt[start:split] + tuple(self.output[max(0, start - split) : end - split])

    def charge_prompt(self) -> int:
        """Prompt positions that were scheduled, or found, for the first time since the last call."""
        end = min(self.num_computed, len(self.prompt))
        fresh = max(0, end - self.num_charged)
        self.num_charged += fresh
        return fresh

    def transition(self, to: RequestState) -> None:
        """Raises InvalidTransitionError: a bug of ours, never the client's."""
        if to not in _ALLOWED[self.state]:
            raise InvalidTransitionError(f"{self.key}: {self.state.name} -> {to.name}")
        self.state = to


def derive_seed(engine_seed: int, number: int) -> int:
    """A request's 64-bit seed where it gave none: SplitMix64 of the engine's seed and its arrival number."""
    z = (engine_seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
