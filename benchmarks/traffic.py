"""Requests that arrive at given times, and what serving them was like."""

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from figures import quantile

if TYPE_CHECKING:
    from sides import Side


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. `at_s`: seconds after the start."""

    at_s: float
    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True)
class Served:
    """What became of arrivals.

    Attributes:
        tokens_at: per arrival, when its tokens came, seconds after the start.
        cpu_s: processor time of this process, all threads: on the CPU device what it really took.
        full_s: seconds while at least as many requests were open as there are rows.
        full_tokens: tokens that came in them.
    """

    tokens_at: list[list[float]] = field(default_factory=list)
    cpu_s: float = 0.0
    full_s: float = 0.0
    full_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """From the start to the last token."""
        return sum(map(len, self.tokens_at)) / max(times[-1] for times in self.tokens_at)

    def figures(self, arrivals: Sequence[Arrival]) -> dict[str, float]:
        """Throughput in all and while the batch was full, first tokens (s) and gaps between tokens (ms)."""
        first = [times[0] - each.at_s for times, each in zip(self.tokens_at, arrivals, strict=True)]
        gaps = [after - before for times in self.tokens_at for before, after in itertools.pairwise(times)]
        found = {
            "tokens_per_s": self.tokens_per_s,
            "cpu_s": self.cpu_s,
            "tokens_per_cpu_s": sum(map(len, self.tokens_at)) / self.cpu_s,
            "full_s": self.full_s,
            "full_tokens_per_s": self.full_tokens / self.full_s if self.full_s else 0.0,
            "ttft_p50_s": statistics.median(first),
            "ttft_p99_s": quantile(first, 0.99),
            "gap_p50_ms": statistics.median(gaps) * 1e3,
            "gap_p99_ms": quantile(gaps, 0.99) * 1e3,
            "gap_max_ms": max(gaps) * 1e3,
        }
        return {name: round(value, 3) for name, value in found.items()}


def poisson(
    number: int, rate_per_s: float, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: int
) -> list[Arrival]:
    """Poisson arrivals whose prompts and outputs are half to one and a half times the given lengths.

    Both lengths are 2 at least, and so is what becomes of them.
    """
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(number):
        now += rng.expovariate(rate_per_s)
        length = rng.randint(max(2, prompt_tokens // 2), prompt_tokens * 3 // 2)
        prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
        arrivals.append(Arrival(now, prompt, rng.randint(max(2, output_tokens // 2), output_tokens * 3 // 2)))
    return arrivals


def wave(number: int, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: int) -> list[Arrival]:
    """Requests of one length that are all there at the start: rows join together and leave together."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(vocab_size) for _ in range(prompt_tokens)) for _ in range(number)]
    return [Arrival(0.0, prompt, output_tokens) for prompt in prompts]


def serve(side: "Side", arrivals: Sequence[Arrival], max_rows: int) -> Served:
    """Run them all to their end, in real time."""
    served = Served([[] for _ in arrivals])
    left = [arrival.num_tokens for arrival in arrivals]
    num_submitted = num_ended = 0
    begun, cpu_begun = time.perf_counter(), time.process_time()
    before = 0.0
    while num_ended < len(arrivals):
        while num_submitted < len(arrivals) and arrivals[num_submitted].at_s <= before:
            side.add(num_submitted, arrivals[num_submitted].prompt, arrivals[num_submitted].num_tokens)
            num_submitted += 1
        was_full = num_submitted - num_ended >= max_rows
        if num_submitted == num_ended:
            time.sleep(max(0.0, arrivals[num_submitted].at_s - before))
        got = side.step()
        now = time.perf_counter() - begun
        for request in got:
            served.tokens_at[request].append(now)
            left[request] -= 1
            num_ended += not left[request]
        if was_full:
            served.full_s += now - before
            served.full_tokens += len(got)
        before = now
    side.drain()
    served.cpu_s = time.process_time() - cpu_begun
    return served
