"""Chats that grow, through the whole daemon: what is computed, what is found, when the first token comes.

    python benchmarks/chat.py --users 8 --turns 10 --stop-after 5 --kill-after 7
    python benchmarks/chat.py --document 1500 --turns 2 --stop-after 1

Two daemons (`mlxd serve`, a process each) get the same turns one after the other; which is first changes from
turn to turn. The warm one keeps prefixes in memory and on disk, the cold one none (`cache.prefix: false`). In
a turn all users ask at once, greedily and in the model's chat template: their chat so far, with the warm
daemon's answers, and a new question. After the turns named the warm daemon is stopped (SIGTERM) or killed
(SIGKILL) as soon as its last answer is there, and started anew on the same folder. With `--document` each
chat begins with a text of its own, of so many words. Prints a JSON line for each daemon and turn, then a
table in markdown; `--out` adds the lines to a file.
"""

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import entry
from daemon import PAGE_SIZE, Daemon, make_config
from figures import Line, first_tokens, record
from options import Parser, add_out, number_from, served

from mlxd.scheduler import AsyncClient, SamplingParams
from mlxd.scheduler.config import CacheConfig, DiskConfig
from mlxd.scheduler.events import Usage

TOPICS = ("bees", "the sea", "bread", "trains", "the moon", "chess", "rivers", "music", "snow", "glass")
QUESTIONS = (
    "I would like to learn about {}. Where should I begin, in one sentence?",
    "What do most people get wrong about {}?",
    "How would you explain {} to a child of six?",
    "Is there a famous story or a poem about {}?",
    "What did people think of {} three hundred years ago?",
    "Which profession has most to do with {}, and why?",
    "What should I read next if I want to know more about {}?",
    "Name one thing about {} that surprised you.",
    "How may {} change within the next fifty years?",
    "Sum up in one sentence what we said about {}.",
)
_QUIET_S = 0.5
"""For the pages that the other daemon still writes."""

Chat = list[dict[str, str]]


@dataclass(slots=True)
class Answer:
    """`first_token_s`: from the question to the first token, as the client sees it."""

    first_token_s: float = 0.0
    text: str = ""
    usage: Usage = field(default_factory=lambda: Usage(0, 0))


def beginning(user: int, num_words: int) -> Chat:
    """A chat before its first question; with a text of random words, or with nothing."""
    words = " ".join(QUESTIONS).split()
    text = " ".join(random.Random(user).choices(words, k=num_words))
    return [{"role": "system", "content": text}] if text else []


async def ask(client: AsyncClient, chat: Chat, num_tokens: int) -> Answer:
    answer = Answer()
    begun = time.monotonic()
    async for chunk in client.stream(
        messages=chat, sampling=SamplingParams(temperature=0, max_tokens=num_tokens)
    ):
        answer.first_token_s = answer.first_token_s or time.monotonic() - begun
        answer.text += chunk.text
        answer.usage = chunk.usage or answer.usage
    return answer


def disk_counts(daemon: Daemon) -> Counter[str]:
    """Since the daemon's start: pages loaded, time of it, prompts cut short as the disk was busy or slow."""
    metrics = daemon.metrics()
    counts: Counter[str] = Counter()
    for name, series, factor in (
        ("disk_pages_loaded", 'mlxd_disk_pages_total{op="loaded"}', 1),
        ("disk_load_ms", 'mlxd_disk_seconds_total{op="load"}', 1000),
        ("disk_prompts_cut_short", 'mlxd_disk_misses_total{reason="busy"}', 1),
        ("disk_prompts_cut_short", 'mlxd_disk_misses_total{reason="slow"}', 1),
    ):
        counts[name] += round(factor * metrics.get(series, 0))
    return counts


@dataclass(frozen=True, slots=True)
class Side:
    """A daemon that is asked all turns."""

    name: str
    daemon: Daemon

    async def ask_all(self, chats: Sequence[Chat], num_tokens: int) -> tuple[list[Answer], Line]:
        """The answers, and figures of them all."""
        await asyncio.sleep(_QUIET_S)
        before = disk_counts(self.daemon)
        answers = await asyncio.gather(*(ask(self.daemon.client, chat, num_tokens) for chat in chats))
        disk = disk_counts(self.daemon)
        disk.subtract(before)
        usages = [answer.usage for answer in answers]
        figures = first_tokens(
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.cached_tokens for usage in usages),
            [answer.first_token_s for answer in answers],
        )
        return answers, {"side": self.name, **figures, **disk}


async def turn(
    number: int, warm: Side, cold: Side, chats: Sequence[Chat], num_tokens: int, ending: signal.Signals | None
) -> list[Line]:
    """Lines of both; the chats get a question and an answer, the warm daemon the signal, and a new start."""
    for user, chat in enumerate(chats):
        question = QUESTIONS[(number - 1) % len(QUESTIONS)].format(TOPICS[user % len(TOPICS)])
        chat.append({"role": "user", "content": question})
    answers, lines = {}, []
    for side in (warm, cold) if number % 2 else (cold, warm):
        answers[side.name], line = await side.ask_all(chats, num_tokens)
        lines.append({"turn": number} | line)
        if side is warm and ending is not None:
            await warm.daemon.end(ending)
            await warm.daemon.start()
    same = sum(a.text == b.text for a, b in zip(answers[warm.name], answers[cold.name], strict=True))
    for chat, answer in zip(chats, answers[warm.name], strict=True):
        chat.append({"role": "assistant", "content": answer.text})
    return [line | {"same_answers": same} for line in lines]


def print_table(lines: Sequence[Line], endings: dict[int, signal.Signals]) -> None:
    """A row a turn, in markdown."""
    print(
        "\n| turn | computed / found (of it from disk) | computed cold | first token, median | cold | ratio |"
        "\n|---|---|---|---|---|---|"
    )
    by_turn: dict[int, dict[str, Line]] = {}
    for line in lines:
        by_turn.setdefault(line["turn"], {})[line["side"]] = line
    for number, sides in by_turn.items():
        warm, cold = sides["warm"], sides["cold"]
        after = endings.get(number - 1)
        warm_ms, cold_ms = warm["first_token_ms_median"], cold["first_token_ms_median"]
        print(
            f"| {number}{f', after {after.name}' if after else ''} "
            f"| {warm['prompt_tokens_computed']:,} / {warm['prompt_tokens_cached']:,} "
            f"({PAGE_SIZE * warm['disk_pages_loaded']:,}) | {cold['prompt_tokens_computed']:,} "
            f"| {warm_ms / 1000:.1f} s | {cold_ms / 1000:.1f} s | {cold_ms / warm_ms:.1f} |"
        )


@asynccontextmanager
async def serving(folder: Path, options: argparse.Namespace, cache: CacheConfig) -> AsyncIterator[Daemon]:
    folder.mkdir()
    daemon = Daemon(folder, make_config(folder, options.model, options.users, cache))
    try:
        await daemon.start()
        yield daemon
    finally:
        await daemon.end()


async def run(folder: Path, options: argparse.Namespace) -> None:
    disk = DiskConfig(path=str(folder / "disk"), max_bytes="4GiB")
    endings = {options.stop_after: signal.SIGTERM, options.kill_after: signal.SIGKILL}
    chats = [beginning(user, options.document) for user in range(options.users)]
    lines: list[Line] = []
    async with (
        serving(folder / "warm", options, CacheConfig(budget="1GiB", disk=disk)) as warm,
        serving(folder / "cold", options, CacheConfig(budget="1GiB", prefix=False)) as cold,
    ):
        sides = Side("warm", warm), Side("cold", cold)
        for number in range(1, options.turns + 1):
            for line in await turn(number, *sides, chats, options.output, endings.get(number)):
                record(line, options.out)
                lines.append(line)
    print_table(lines, endings)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--model", type=served, default="smollm2-135m-instruct")
    parser.add_argument("--users", type=number_from(1), default=8)
    parser.add_argument("--turns", type=number_from(1), default=10)
    parser.add_argument("--output", type=number_from(1), default=16, help="most tokens of an answer")
    parser.add_argument("--document", type=number_from(0), default=0, help="words that each chat begins with")
    parser.add_argument(
        "--stop-after", type=number_from(1), default=5, help="turn after which the warm daemon is stopped"
    )
    parser.add_argument("--kill-after", type=number_from(1), default=7, help="turn after which it is killed")
    add_out(parser, "chat")
    options = parser.options()
    with tempfile.TemporaryDirectory(prefix="mlxd-chat-") as folder:
        asyncio.run(run(Path(folder), options))


if __name__ == "__main__":
    entry.run(main)
