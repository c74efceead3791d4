"""What mlx-lm itself generates, greedily, one prompt at a time: `mlx_lm_oracle.py FOLDER < JOBS > ANSWERS`.

A process of its own, as OpenBLAS helps only where it is loaded before MLX. The model is loaded as the daemon
loads it; prompts become token ids by mlx-lm's tokenizer, and tokens come from its `generate_step`.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

NEAR_TIE = 1e-4
_NUM_LIKELIEST = 5


class Job(msgspec.Struct, frozen=True):
    """`chat`: the text is a user's turn, not a prompt to be continued."""

    text: str
    chat: bool
    max_tokens: int


class Answer(msgspec.Struct, frozen=True):
    """`likeliest`: for each token, the log-probabilities of the likeliest ids at its place."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    likeliest: tuple[dict[int, float], ...]

    def parting(self, ours: Sequence[int]) -> "Parting | None":
        """Where `ours` first leaves these tokens."""
        for position, (expected, token) in enumerate(zip(self.token_ids, ours, strict=False)):
            if token != expected:
                seen = self.likeliest[position]
                return Parting(position, expected, seen[expected], token, seen.get(token, float("-inf")))
        return None


class Parting(msgspec.Struct, frozen=True):
    """The first token that is not mlx-lm's; both with mlx-lm's log-probability, so logits less a constant."""

    position: int
    expected: int
    expected_logprob: float
    token: int
    token_logprob: float

    @property
    def is_near_tie(self) -> bool:
        return self.expected_logprob - self.token_logprob < NEAR_TIE


def oracle(folder: Path, jobs: Sequence[Job]) -> list[Answer]:
    """Run this file."""
    run = subprocess.run(
        [sys.executable, __file__, str(folder)],
        input=msgspec.json.encode(jobs),
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(run.stdout, type=list[Answer])


def main(folder: Path) -> None:
    from mlxd.batching.blas import ensure_blas

    ensure_blas()
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_tokenizer

    from mlxd.batching.model import load_model

    loaded = load_model(folder, lambda stage, share: None)
    tokenizer = load_tokenizer(folder)

    def answer(job: Job) -> Answer:
        if job.chat:
            messages = [{"role": "user", "content": job.text}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        else:
            prompt = tokenizer.encode(job.text)
        token_ids, likeliest = [], []
        for token, logprobs in generate_step(mx.array(prompt), loaded.model, max_tokens=job.max_tokens):
            top = mx.argpartition(-logprobs, _NUM_LIKELIEST)[:_NUM_LIKELIEST]
            token_ids.append(int(token))
            likeliest.append(dict(zip(top.tolist(), logprobs[top].tolist(), strict=True)))
            if token in loaded.eos_token_ids:
                break
        return Answer(tuple(prompt), tuple(token_ids), tuple(likeliest))

    jobs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Job])
    sys.stdout.buffer.write(msgspec.json.encode([answer(job) for job in jobs]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
