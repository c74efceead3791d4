"""What packed keys and values give and cost: rows in a budget, greedy tokens that stay, milliseconds a step.

    python benchmarks/kv_bits.py --tokens 200

Twenty prompts run as one batch of the built-in model at full precision, at 8 and at 4 bits. Tokens are
compared with those of full precision: how many are equal before the first that differs, and how many at the
same place.
Prints a table and, with `--out`, adds a JSON line for each precision to a file.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import entry
from figures import record
from options import Parser, add_out, number_from

from mlxd.batching.blas import ensure_blas

blas = ensure_blas()  # before anything imports mlx

from mlx_lm.utils import load_tokenizer  # noqa: E402
from models import SMOLLM2, BenchModel, load, make_runner  # noqa: E402

from mlxd.batching.driver import Driver  # noqa: E402
from mlxd.batching.model import resolve  # noqa: E402
from mlxd.batching.runner import ignore_progress  # noqa: E402
from mlxd.caches.quantization import Quantization  # noqa: E402

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours and say how to mix them.",
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "List ten animals that live in the sea.",
    "What does a compiler do?",
    "Describe the water cycle to a child.",
    "Who was Ada Lovelace?",
    "Give a recipe for pancakes.",
    "How do vaccines work?",
    "Write a poem about autumn.",
    "What is the difference between a lake and a river?",
    "Explain what a prime number is, with examples.",
    "How is glass made?",
    "Summarise the plot of Romeo and Juliet.",
    "Why do leaves change colour?",
    "What are the rules of chess?",
    "Describe a day in the life of a farmer.",
    "How does a refrigerator work?",
)
PRECISIONS = {
    "full": None,
    "8 bits": Quantization(bits=8, group_size=64),
    "4 bits, groups of 64": Quantization(bits=4, group_size=64),
    "4 bits, groups of 32": Quantization(bits=4, group_size=32),
}
_BUDGET_BYTES = 2**30
_ROW_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Outcome:
    """`rows`: of 2,048 tokens in 1 GiB. `same_until`, `same`: shares of full precision's tokens."""

    precision: str
    bytes_per_token: int
    rows: int
    step_ms: float
    same_until: float
    same: float


def run(
    bench: BenchModel, prompts: Sequence[Sequence[int]], num_tokens: int, quantization: Quantization | None
) -> tuple[list[list[int]], int, float]:
    """Greedy tokens of each prompt, bytes a token, and milliseconds a step."""
    longest = max(map(len, prompts)) + num_tokens
    runner = make_runner(
        bench,
        max_rows=len(prompts),
        max_model_len=longest,
        page_size=64,
        chunk=64,
        attention="in_place",
        compile="off",
        quantization=quantization,
    )
    driver = Driver(runner, runner.info.memory)
    rows = [driver.join(prompt) for prompt in prompts]
    driver.prefill()
    begun = time.perf_counter()
    for _ in range(num_tokens):
        driver.decode()
    step_ms = 1e3 * (time.perf_counter() - begun) / num_tokens
    return (
        [row.output for row in rows],
        sum(g.spec.bytes_per_token for g in runner.info.memory.groups),
        step_ms,
    )


def shares_equal(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Shares of tokens before each row's first difference, and of those equal at their place."""
    until = same = total = 0
    for ours, theirs in zip(found, expected, strict=True):
        equal = [a == b for a, b in zip(ours, theirs, strict=True)]
        until += equal.index(False) if False in equal else len(equal)
        same += sum(equal)
        total += len(equal)
    return until / total, same / total


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--tokens", type=number_from(1), default=200)
    add_out(parser, "kv_bits")
    options = parser.options()
    bench = load("smollm2")
    tokenizer = load_tokenizer(resolve(SMOLLM2, ignore_progress))
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in QUESTIONS
    ]
    print(f"{'precision':>22} {'bytes/token':>12} {'rows':>6} {'step ms':>8} {'same until':>11} {'same':>6}")
    expected: list[list[int]] = []
    for name, quantization in PRECISIONS.items():
        tokens, size, step_ms = run(bench, prompts, options.tokens, quantization)
        expected = expected or tokens
        outcome = Outcome(
            name, size, _BUDGET_BYTES // (_ROW_TOKENS * size), step_ms, *shares_equal(expected, tokens)
        )
        print(
            f"{name:>22} {size:>12,} {outcome.rows:>6} {step_ms:>8.1f} "
            f"{outcome.same_until:>11.1%} {outcome.same:>6.1%}",
            flush=True,
        )
        record(asdict(outcome), options.out, quiet=True)


if __name__ == "__main__":
    entry.run(main)
