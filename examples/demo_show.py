"""What `make demo` asks, and how it shows the answers."""

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxd.scheduler.results import TextChunk

COLOURS = {"acme": "cyan", "beta": "magenta"}
QUESTIONS = {
    "acme": (
        "What is the capital of France?",
        "List five fruits.",
        "Write one sentence about honey.",
        "List five countries in Asia.",
        "Write one sentence about a cat.",
        "List five programming languages.",
        "List the four directions.",
        "Write one sentence about bees.",
        "What is the largest ocean on Earth?",
        "List three primary colours.",
        "Write one sentence about snow.",
        "Write one sentence about trees.",
    ),
    "beta": (
        "List five countries in Europe.",
        "Write one sentence about the moon.",
        "List five colors.",
        "Write one sentence about a dog.",
        "List the five senses.",
        "List five countries in South America.",
    ),
}
QUESTION_WIDTH = 38


@dataclass
class Stream:
    """One request as it grows. Times of the monotonic clock, in seconds."""

    tenant: str
    question: str
    text: str = ""
    num_tokens: int = 0
    finish_reason: str = ""
    asked_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def line(self) -> str:
        return " ".join(self.text.split())

    def add(self, chunk: TextChunk) -> None:
        if chunk.token_ids and not self.num_tokens:
            self.first_token_at = time.monotonic()
        self.text += chunk.text
        self.num_tokens += len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason or ""


@dataclass
class Show:
    """The streams on the screen: a live table on a terminal, a line at each end elsewhere.

    Attributes:
        shares: tokens of each tenant up to when the first of them had no more question waiting.
        kv_peaks: most KV bytes that each tenant's rows had reserved.
    """

    console: Console
    streams: list[Stream] = field(default_factory=list)
    shares: dict[str, int] = field(default_factory=dict)
    kv_peaks: Counter[str] = field(default_factory=Counter)

    def __rich__(self) -> Table:
        table = Table(expand=True, show_edge=False)
        table.add_column("tenant", width=6)
        table.add_column("question", width=QUESTION_WIDTH, no_wrap=True)
        table.add_column("answer", ratio=1, no_wrap=True)
        table.add_column("tokens", width=6)
        for stream in self.streams:
            tokens = f"{stream.num_tokens}{'' if stream.finish_reason else ' ...'}"
            style = COLOURS[stream.tenant]
            table.add_row(stream.tenant, stream.question, Text(stream.line), tokens, style=style)
        return table

    def of(self, tenant: str) -> list[Stream]:
        return [stream for stream in self.streams if stream.tenant == tenant]

    def advanced(self, stream: Stream) -> None:
        if not self.shares and all(other.num_tokens for other in self.of(stream.tenant)):
            self.shares = {tenant: self.num_tokens(tenant) for tenant in QUESTIONS}

    def ended(self, stream: Stream) -> None:
        if not self.console.is_terminal:
            question = f"{stream.tenant:<6}{stream.question:<{QUESTION_WIDTH}}"
            print(f"{question} -> {stream.line} [{stream.num_tokens} tokens]", flush=True)

    def num_tokens(self, tenant: str) -> int:
        return sum(stream.num_tokens for stream in self.of(tenant))

    def summary(self, weights: dict[str, float]) -> Table:
        """What each tenant got, and what it should have."""
        table = Table(
            box=box.SIMPLE_HEAD,
            caption="tokens: while both had questions waiting; first token: mean",
            caption_justify="left",
        )
        for title in ("tenant", "weight", "tokens", "share", "by weight", "first token", "KV peak"):
            table.add_column(title, justify="left" if title == "tenant" else "right")
        for tenant, weight in weights.items():
            waits = [stream.first_token_at - stream.asked_at for stream in self.of(tenant)]
            share = self.shares[tenant] / sum(self.shares.values())
            fair = weight / sum(weights.values())
            table.add_row(
                tenant,
                f"{weight:g}",
                str(self.shares[tenant]),
                f"{share:.0%}",
                f"{fair:.0%}",
                f"{statistics.mean(waits):.1f} s",
                f"{self.kv_peaks[tenant] / 2**20:.0f} MiB",
            )
        return table
