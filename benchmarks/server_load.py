"""One load for any server: requests, when they are sent, and what their clients saw."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from figures import Line, quantile
from servers import Server


class WrongCountError(Exception):
    """A server counted other tokens than were asked for: what it did is not the load."""


@dataclass(frozen=True, slots=True)
class Ask:
    """`at_s`: seconds after the start."""

    at_s: float
    prompt: str
    prompt_tokens: int
    num_tokens: int


@dataclass(slots=True)
class Answer:
    """Times in seconds after the load's start.

    Attributes:
        asked_s: when it was sent.
        pieces_s: when its pieces of text came.
    """

    ask: Ask
    asked_s: float
    pieces_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    text: str = ""


async def ask(server: Server, what: Ask, begun: float) -> Answer:
    """Raises WrongCountError."""
    answer = Answer(what, time.monotonic() - begun)
    counted = 0, 0
    async for piece in server.stream(what.prompt, what.num_tokens):
        if piece.text:
            answer.pieces_s.append(time.monotonic() - begun)
            answer.text += piece.text
        if piece.output_tokens:
            counted = piece.prompt_tokens, piece.output_tokens
    answer.ended_s = time.monotonic() - begun
    if counted != (what.prompt_tokens, what.num_tokens):
        wanted = f"{what.prompt_tokens} + {what.num_tokens}"
        raise WrongCountError(
            f"{server.name} counted {counted[0]} + {counted[1]} tokens where {wanted} were due"
        )
    return answer


async def closed_loop(server: Server, asks: Sequence[Ask], num_clients: int) -> list[Answer]:
    """Answers in the order of `asks`."""
    answers: list[Answer | None] = [None] * len(asks)
    todo = iter(enumerate(asks))
    begun = time.monotonic()

    async def client() -> None:
        for index, what in todo:
            answers[index] = await ask(server, what, begun)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return [answer for answer in answers if answer is not None]


async def open_loop(server: Server, asks: Sequence[Ask]) -> list[Answer]:
    """Answers in the order of `asks`; first tokens count from when a request was due."""
    begun = time.monotonic()

    async def send(what: Ask) -> Answer:
        await asyncio.sleep(begun + what.at_s - time.monotonic())
        answer = await ask(server, what, begun)
        answer.asked_s = what.at_s
        return answer

    return await asyncio.gather(*map(send, asks))


def figures(answers: Sequence[Answer]) -> Line:
    first = [answer.pieces_s[0] - answer.asked_s for answer in answers]
    gaps = [after - before for each in answers for before, after in itertools.pairwise(each.pieces_s)]
    seconds = max(answer.ended_s for answer in answers) - min(answer.asked_s for answer in answers)
    found = {
        "tokens_per_s": sum(answer.ask.num_tokens for answer in answers) / seconds,
        "seconds": seconds,
        "ttft_p50_s": statistics.median(first),
        "ttft_p99_s": quantile(first, 0.99),
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * quantile(gaps, 0.99),
    }
    return {"requests": len(answers)} | {name: round(value, 3) for name, value in found.items()}


def same(one: Sequence[Answer], other: Sequence[Answer]) -> Line:
    """How many answers are equal, and how much of an answer is before its first difference.

    Spaces that an answer begins with do not count: mlx_lm.server drops them.
    """
    pairs = [(a.text.lstrip(), b.text.lstrip()) for a, b in zip(one, other, strict=True)]
    shares = [1.0 if a == b else _same_characters(a, b) / max(len(a), len(b)) for a, b in pairs]
    return {"same_answers": sum(a == b for a, b in pairs), "same_until": round(statistics.mean(shares), 3)}


def _same_characters(one: str, other: str) -> int:
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
