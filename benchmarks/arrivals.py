"""Requests that arrive at random times, and what serving them was like."""

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sides import Side


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. `at_s`: seconds after the start."""

    at_s: float
    prompt: tuple[int, ...]
    num_tokens: int


def poisson(
    number: int, rate_per_s: float, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: int
) -> list[Arrival]:
    """Poisson arrivals whose prompts and outputs are half to one and a half times the given lengths."""
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(number):
        now += rng.expovariate(rate_per_s)
        length = rng.randint(max(2, prompt_tokens // 2), prompt_tokens * 3 // 2)
        prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
        arrivals.append(Arrival(now, prompt, rng.randint(max(1, output_tokens // 2), output_tokens * 3 // 2)))
    return arrivals


def serve(side: Side, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Run them all to their end, in real time.

    Returns:
        Tokens a second from the first arrival to the last token; median and 95th percentile of the time to
        the first token, seconds; median and 99th percentile of the gap between two tokens, milliseconds.
    """
    tokens_at: dict[int, list[float]] = {request: [] for request in range(len(arrivals))}
    left = sum(arrival.num_tokens for arrival in arrivals)
    submitted = 0
    begun = time.perf_counter()
    while left:
        now = time.perf_counter() - begun
        while submitted < len(arrivals) and arrivals[submitted].at_s <= now:
            side.add(submitted, arrivals[submitted].prompt, arrivals[submitted].num_tokens)
            submitted += 1
        got = side.step()
        now = time.perf_counter() - begun
        for request in got:
            tokens_at[request].append(now)
        left -= len(got)
        idle = submitted == sum(
            len(t) == a.num_tokens for t, a in zip(tokens_at.values(), arrivals, strict=True)
        )
        if idle and submitted < len(arrivals):
            time.sleep(max(0.0, arrivals[submitted].at_s - now))
    first = [tokens_at[i][0] - arrival.at_s for i, arrival in enumerate(arrivals)]
    gaps = [b - a for times in tokens_at.values() for a, b in itertools.pairwise(times)]
    total = sum(arrival.num_tokens for arrival in arrivals)
    return {
        "tokens_per_s": total / (max(t[-1] for t in tokens_at.values()) - arrivals[0].at_s),
        "ttft_p50_s": statistics.median(first),
        "ttft_p95_s": percentile(first, 0.95),
        "gap_p50_ms": statistics.median(gaps) * 1e3,
        "gap_p99_ms": percentile(gaps, 0.99) * 1e3,
    }


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
