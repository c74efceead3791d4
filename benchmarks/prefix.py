"""Time to the first token with and without a prefix that is there already, on the whole engine.

    python benchmarks/prefix.py --shared 500 --own 16 --trials 8
    python benchmarks/prefix.py --users 8 --turns 10
    python benchmarks/prefix.py --users 8 --turns 10 --disk /tmp/prefixes

Shared: prompts of a common part and an own one, alone in the engine; each warm trial has a cold one beside it
whose common part is new. Chat: users who talk at once, every turn their whole chat so far and new words,
against an engine that keeps nothing. With `--disk` the engine that keeps prefixes is stopped after half of
the turns, and a new one goes on from what is in that folder. Tokens are random and greedy. Prints JSON lines;
`--out` adds them to a file.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config import (
    CacheConfig,
    Config,
    DecodeConfig,
    DiskConfig,
    ModelConfig,
    SchedulerConfig,
    TenantConfig,
)
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.events import Event, Finished, Rejected, RequestKey, Submission, Tokens

Prompt = tuple[int, ...]


@dataclass(slots=True)
class Answer:
    """A request's tokens, seconds to the first of them, and prompt tokens that were found."""

    prompt: Prompt
    submitted_at: float
    tokens: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    cached_tokens: int = 0


class Served:
    """An engine and what it answers."""

    def __init__(self, model: str, max_rows: int, *, prefix: bool, disk: Path | None = None) -> None:
        stored = None if disk is None else DiskConfig(path=str(disk), max_bytes="8GiB")
        config = Config(
            version=1,
            tenants=(TenantConfig(name="bench", token_sha256="0" * 64),),
            model=ModelConfig(path=model),
            scheduler=SchedulerConfig(max_rows=max_rows),
            cache=CacheConfig(budget="1GiB", prefix=prefix, disk=stored),
            decode=DecodeConfig(warmup_s=20.0),
        )
        self._events: SimpleQueue[tuple[float, Sequence[Event]]] = SimpleQueue()
        self._engine = Engine(config, seed=0)
        self._engine.start(lambda events: self._events.put((time.monotonic(), events)))
        self.info = self._engine.wait_ready()
        self._count = 0

    def ask(self, prompts: Sequence[Prompt], num_tokens: int) -> list[Answer]:
        """All of them at once; returns when all have ended."""
        answers: dict[RequestKey, Answer] = {}
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for prompt in prompts:
            self._count += 1
            key, now = RequestKey("bench", str(self._count)), time.monotonic()
            answers[key] = Answer(prompt, now)
            self._engine.submit(Submission(key, prompt, sampling, now))
        num_open = len(answers)
        while num_open:
            at, events = self._events.get()
            for event in events:
                num_open -= self._take(answers, event, at)
        return list(answers.values())

    def _take(self, answers: dict[RequestKey, Answer], event: Event, at: float) -> bool:
        """Whether the event ends its request."""
        answer = answers[event.key]
        match event:
            case Tokens():
                answer.first_token_s = answer.first_token_s or at - answer.submitted_at
                answer.tokens += event.token_ids
            case Finished():
                answer.cached_tokens = event.usage.cached_tokens
                return True
            case Rejected():
                raise RuntimeError(f"{event.reason}: {event.message}")
        return False

    def close(self) -> None:
        self._engine.stop()


def shared(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Warm and cold trials by turns; a line a side, and the ratio."""
    rng = random.Random(0)
    served = Served(options.model, 8, prefix=True)
    words = served.info.vocab_size

    def some(number: int) -> Prompt:
        return tuple(rng.randrange(words) for _ in range(number))

    common = some(options.shared)
    served.ask([common + some(options.own)], options.output)
    sides: dict[str, list[Answer]] = {"cold": [], "warm": []}
    for _ in range(options.trials):
        sides["cold"] += served.ask([some(options.shared) + some(options.own)], options.output)
        sides["warm"] += served.ask([common + some(options.own)], options.output)
    served.close()
    for side, answers in sides.items():
        yield {"side": side, "shared": options.shared, "own": options.own, **_sum_up(answers)}
    ratios = [
        cold.first_token_s / warm.first_token_s
        for cold, warm in zip(sides["cold"], sides["warm"], strict=True)
    ]
    yield {"cold_over_warm": round(statistics.median(ratios), 2)}


def chat(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The same chats on an engine that keeps prefixes, then on one that does not; a line a turn."""
    for prefix in (True, False):
        rng = random.Random(0)
        disk = options.disk if prefix else None
        served = Served(options.model, options.users, prefix=prefix, disk=disk)
        words = served.info.vocab_size
        chats: list[Prompt] = [()] * options.users
        for turn in range(options.turns):
            if disk is not None and turn == options.turns // 2:
                served.close()
                served = Served(options.model, options.users, prefix=prefix, disk=disk)
            asked = [said + tuple(rng.randrange(words) for _ in range(options.own)) for said in chats]
            answers = served.ask(asked, options.output)
            chats = [answer.prompt + tuple(answer.tokens) for answer in answers]
            yield {"prefix": prefix, "users": options.users, "turn": turn + 1, **_sum_up(answers)}
        served.close()


def _sum_up(answers: Sequence[Answer]) -> dict[str, object]:
    cached_tokens = sum(answer.cached_tokens for answer in answers)
    seconds = [answer.first_token_s for answer in answers]
    return {
        "prompt_tokens_computed": sum(len(answer.prompt) for answer in answers) - cached_tokens,
        "prompt_tokens_cached": cached_tokens,
        "first_token_ms_median": round(1000 * statistics.median(seconds), 1),
        "first_token_ms_max": round(1000 * max(seconds), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--shared", type=int, default=500)
    parser.add_argument("--own", type=int, default=16)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--users", type=int, default=0, help="run chats of so many users instead")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--disk", type=Path, help="restart the chats' engine from this folder half way")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for line in chat(options) if options.users else shared(options):
        text = json.dumps(line)
        print(text, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
