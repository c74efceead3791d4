"""Requests sent when they are due, whatever became of those before, by tenants with a connection each."""

import asyncio
import itertools
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mlxd.scheduler import AsyncClient, SamplingParams
from mlxd.scheduler.errors import RejectedError

MIN_TOKEN_ID, MAX_TOKEN_ID = 1_000, 40_000
"""Ordinary tokens of the built-in model's vocabulary."""
_SILENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Due:
    """A request. `at_s`: seconds after the start."""

    tenant: str
    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What its client saw.

    Attributes:
        token_times_s: when each piece of the answer came, seconds after the start.
        num_tokens: that came.
        refused: why it was rejected; empty where it was not.
    """

    due: Due
    token_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    refused: str = ""

    @property
    def first_token_s(self) -> float:
        """From when it was due; some token has come."""
        return self.token_times_s[0] - self.due.at_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]


async def replay(
    clients: dict[str, AsyncClient], requests: Sequence[Due], awaited: Collection[str]
) -> list[Outcome]:
    """Outcomes of what was answered or refused until all of the `awaited` tenants' requests had ended.

    What is still open or due then is cancelled.
    """
    begun = time.monotonic()
    outcomes = [Outcome(due) for due in requests]
    sending = {
        asyncio.create_task(_send(clients[outcome.due.tenant], outcome, begun, seed)): outcome.due.tenant
        for seed, outcome in enumerate(outcomes)
    }
    try:
        await asyncio.gather(*(task for task, tenant in sending.items() if tenant in awaited))
    finally:
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    return [outcome for outcome in outcomes if outcome.token_times_s or outcome.refused]


async def _send(client: AsyncClient, outcome: Outcome, begun: float, seed: int) -> None:
    due, rng = outcome.due, random.Random(seed)
    await asyncio.sleep(begun + due.at_s - time.monotonic())
    prompt = [rng.randint(MIN_TOKEN_ID, MAX_TOKEN_ID) for _ in range(due.prompt_tokens)]
    sampling = SamplingParams(max_tokens=due.output_tokens, temperature=0, ignore_eos=True)
    try:
        async for chunk in client.stream(token_ids=prompt, sampling=sampling):
            if chunk.token_ids:
                outcome.token_times_s.append(time.monotonic() - begun)
                outcome.num_tokens += len(chunk.token_ids)
    except RejectedError as error:
        outcome.refused = error.reason


def connect(endpoint: str, tenants: Collection[str]) -> dict[str, AsyncClient]:
    """Each tenant's token is its name."""
    return {name: AsyncClient(endpoint, token=name, timeout_s=_SILENCE_S) for name in tenants}
