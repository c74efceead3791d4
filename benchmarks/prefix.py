"""Time to the first token with and without a prefix that is there already, on the whole engine.

    python benchmarks/prefix.py --shared 500 --own 16 --trials 8
    python benchmarks/prefix.py --together 8 --trials 3

Shared: prompts of a common part and an own one, alone in the engine; each warm trial has a cold one beside it
whose common part is new. Together: such prompts at one instant, their common part new, so that each of them
computes it; and by turns with that, all but the first sent when the first has its first token. Tokens are
random and greedy. Prints JSON lines; `--out` adds them to a file.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from queue import SimpleQueue

import entry
from figures import Line, first_tokens, record
from options import Parser, add_out, number_from, served

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config import (
    CacheConfig,
    Config,
    DecodeConfig,
    ModelConfig,
    SchedulerConfig,
    TenantConfig,
)
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.events import Event, Finished, Rejected, RequestKey, Submission, Tokens

Prompt = tuple[int, ...]
_MAX_ROWS = 8


@dataclass(slots=True)
class Answer:
    """A request's tokens, seconds to the first of them, and prompt tokens that were found."""

    prompt: Prompt
    asked_at: float
    tokens: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    cached_tokens: int = 0


class Served:
    """An engine and what it answers."""

    def __init__(self, model: str, max_rows: int) -> None:
        config = Config(
            version=1,
            tenants=(TenantConfig(name="bench", token_sha256="0" * 64),),
            model=ModelConfig(path=model),
            scheduler=SchedulerConfig(max_rows=max_rows),
            cache=CacheConfig(budget="1GiB"),
            decode=DecodeConfig(warmup_s=20.0),
        )
        self._events: SimpleQueue[tuple[float, Sequence[Event]]] = SimpleQueue()
        self._engine = Engine(config, seed=0)
        self._engine.start(lambda events: self._events.put((time.monotonic(), events)))
        self._count = 0

    @property
    def vocab_size(self) -> int:
        """Returns when it is ready."""
        return self._engine.wait_ready().vocab_size

    def ask(self, prompts: Sequence[Prompt], num_tokens: int, *, first_alone: bool = False) -> list[Answer]:
        """Returns when all have ended. Times count from when the first one was sent.

        Args:
            first_alone: the others are sent when the first one has its first token.
        """
        answers: dict[RequestKey, Answer] = {}
        begun, num_open = time.monotonic(), len(prompts)
        self._send(answers, prompts[:1] if first_alone else prompts, num_tokens, begun)
        while num_open:
            at, events = self._events.get()
            for event in events:
                num_open -= self._take(answers, event, at)
            if len(answers) < len(prompts) and any(answer.tokens for answer in answers.values()):
                self._send(answers, prompts[1:], num_tokens, begun)
        return list(answers.values())

    def _send(
        self, answers: dict[RequestKey, Answer], prompts: Sequence[Prompt], num_tokens: int, begun: float
    ) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for prompt in prompts:
            self._count += 1
            key = RequestKey("bench", str(self._count))
            answers[key] = Answer(prompt, begun)
            self._engine.submit(Submission(key, prompt, sampling, time.monotonic()))

    def _take(self, answers: dict[RequestKey, Answer], event: Event, at: float) -> bool:
        """Whether the event ends its request."""
        answer = answers[event.key]
        match event:
            case Tokens():
                answer.first_token_s = answer.first_token_s or at - answer.asked_at
                answer.tokens += event.token_ids
            case Finished():
                answer.cached_tokens = event.usage.cached_tokens
                return True
            case Rejected():
                raise entry.BenchmarkError(f"{event.reason}: {event.message}")
        return False

    def close(self) -> None:
        self._engine.stop()


def shared(served: Served, options: argparse.Namespace) -> Iterator[Line]:
    """Warm and cold trials by turns; a line a side, and the ratio."""
    rng = random.Random(0)
    words = served.vocab_size

    def prompt(common: Prompt) -> Prompt:
        return common + some(rng, words, options.own)

    common = some(rng, words, options.shared)
    served.ask([prompt(common)], options.output)
    sides: dict[str, list[Answer]] = {"cold": [], "warm": []}
    for _ in range(options.trials):
        sides["cold"] += served.ask([prompt(some(rng, words, options.shared))], options.output)
        sides["warm"] += served.ask([prompt(common)], options.output)
    for side, answers in sides.items():
        yield {"side": side, "shared": options.shared, "own": options.own, **_sum_up(answers)}
    ratios = [
        cold.first_token_s / warm.first_token_s
        for cold, warm in zip(sides["cold"], sides["warm"], strict=True)
    ]
    yield {"cold_over_warm": round(statistics.median(ratios), 2)}


def together(served: Served, options: argparse.Namespace) -> Iterator[Line]:
    """Prompts whose common part is new: all at one instant, and all but the first when that has a token.

    Either way has a new common part in each trial; times count from when the first prompt was sent.
    """
    rng = random.Random(0)
    words = served.vocab_size

    def prompts() -> list[Prompt]:
        common = some(rng, words, options.shared)
        return [common + some(rng, words, options.own) for _ in range(options.together)]

    ways: dict[str, list[Answer]] = {"at_once": [], "after_the_first": []}
    for _ in range(options.trials):
        ways["at_once"] += served.ask(prompts(), options.output)
        ways["after_the_first"] += served.ask(prompts(), options.output, first_alone=True)
    for way, answers in ways.items():
        yield {"way": way, "prompts": options.together, "shared": options.shared, **_sum_up(answers)}


def _sum_up(answers: Sequence[Answer]) -> Line:
    return first_tokens(
        sum(len(answer.prompt) for answer in answers),
        sum(answer.cached_tokens for answer in answers),
        [answer.first_token_s for answer in answers],
    )


def some(rng: random.Random, words: int, number: int) -> Prompt:
    return tuple(rng.randrange(words) for _ in range(number))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=served, default="smollm2-135m-instruct")
    parser.add_argument("--shared", type=number_from(1), default=500)
    parser.add_argument("--own", type=number_from(1), default=16)
    parser.add_argument("--output", type=number_from(1), default=16)
    parser.add_argument("--trials", type=number_from(1), default=8)
    parser.add_argument(
        "--together", type=number_from(0), default=0, help="so many prompts at one instant instead"
    )
    add_out(parser, "prefix")
    options = parser.options()
    measure = together if options.together else shared
    with closing(Served(options.model, options.together or _MAX_ROWS)) as engine:
        for line in measure(engine, options):
            record(line, options.out)


if __name__ == "__main__":
    entry.run(main)
