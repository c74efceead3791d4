"""The built-in model through the daemon: the tokens are those of mlx-lm, whoever else is in the batch."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, daemon_process, process_config
from mlx_lm_oracle import Answer, Job, Parting, oracle
from scraping import Scraped
from wire_daemon import token, wait_until

from mlxd.batching.builtin import pull
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.async_client import AsyncClient
from mlxd.scheduler.config import DecodeConfig
from mlxd.scheduler.errors import RequestFailedError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "smollm2-135m-instruct"
ARRIVALS_S = 4.0
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "Who wrote Hamlet?",
    "Give a synonym of happy.",
    "List the first ten prime numbers.",
    "Translate 'good morning' into Spanish.",
    "What does a compiler do?",
    "Tell me a short story about a fox and a crow.",
)
BEGINNINGS = (
    "The",
    "Once upon a time",
    "def fibonacci(n):\n",
    "1 2 3 4 5 6 7 8",
    "The capital of France is",
    "In the beginning of the twentieth century, physics",
)
STORY = "A fox saw a crow with a piece of cheese in its beak and wanted to have it. "
JOBS = (
    *(Job(question, chat=True, max_tokens=64) for question in QUESTIONS),
    *(Job(beginning, chat=False, max_tokens=48) for beginning in BEGINNINGS),
    *(Job(STORY * times, chat=False, max_tokens=32) for times in (3, 4, 11, 25)),
)


@dataclass(frozen=True)
class Visit:
    """When a job arrives, and how long after that it is cancelled, if it is."""

    job: Job
    arrives_s: float
    cancelled_s: float | None


@dataclass
class Outcome:
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    """None where it was cancelled before its end."""


def visits(rng: random.Random) -> list[Visit]:
    """All jobs in a random order, a third of them to be cancelled at some time."""
    return [
        Visit(job, rng.uniform(0, ARRIVALS_S), rng.uniform(0, ARRIVALS_S) if rng.random() < 0.33 else None)
        for job in rng.sample(JOBS, len(JOBS))
    ]


async def pay(visit: Visit, client: AsyncClient, request_id: str) -> Outcome:
    await asyncio.sleep(visit.arrives_s)
    canceller = asyncio.create_task(cancel_later(visit, client, request_id))
    outcome = Outcome()
    try:
        async with aclosing(stream(visit.job, client, request_id)) as chunks:
            async for chunk in chunks:
                outcome.token_ids += chunk.token_ids
                outcome.prompt_tokens = chunk.usage.prompt_tokens if chunk.usage else None
    except RequestFailedError as error:
        if error.code != "cancelled":
            raise
    finally:
        canceller.cancel()
    return outcome


def stream(job: Job, client: AsyncClient, request_id: str) -> Any:
    sampling = SamplingParams(max_tokens=job.max_tokens, temperature=0)
    if job.chat:
        messages = [{"role": "user", "content": job.text}]
        return client.stream(messages=messages, sampling=sampling, request_id=request_id)
    return client.stream(job.text, sampling, request_id=request_id)


async def cancel_later(visit: Visit, client: AsyncClient, request_id: str) -> None:
    if visit.cancelled_s is not None:
        await asyncio.sleep(visit.cancelled_s)
        await client.cancel(request_id)


async def pay_all(daemon: DaemonProcess, all_visits: Sequence[Visit], name: str) -> list[Outcome]:
    """The visits at their times, by two tenants in turn; `name`: no other ones of this daemon have it."""
    submit = daemon.config.server.submit
    async with (
        AsyncClient(submit, token=token("acme")) as acme,
        AsyncClient(submit, token=token("beta")) as beta,
    ):
        return await asyncio.gather(
            *(pay(visit, (acme, beta)[n % 2], f"{name}-{n}") for n, visit in enumerate(all_visits))
        )


def partings(outcomes: Sequence[Outcome], answers: Sequence[Answer]) -> dict[int, Parting]:
    """Outcome's index -> where it leaves mlx-lm's tokens; lengths are compared where it does not."""
    found = {}
    for index, (outcome, answer) in enumerate(zip(outcomes, answers, strict=True)):
        if parting := answer.parting(outcome.token_ids):
            found[index] = parting
        elif outcome.prompt_tokens is not None:
            assert outcome.token_ids == answer.token_ids
            assert outcome.prompt_tokens == len(answer.prompt)
    return found


def report(outcomes: Sequence[Outcome], found: dict[int, Parting]) -> None:
    finished = [index for index, outcome in enumerate(outcomes) if outcome.prompt_tokens is not None]
    equal = [index for index in finished if index not in found]
    print(f"\n{len(equal)} of {len(finished)} finished equal, {len(outcomes) - len(finished)} cancelled")
    for index, parting in found.items():
        print(f"prompt {index}: {parting}")


@pytest.fixture(scope="module")
def model() -> Path:
    return pull(MODEL, lambda stage, share: None)


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Eight rows at most, attention and compilation chosen by time."""
    folder = tmp_path_factory.mktemp("daemon")
    config = process_config(
        folder,
        model,
        scheduler={"max_rows": 8},
        decode=DecodeConfig(warmup_s=15),
        budget="512MiB",
        max_model_len=1024,
    )
    with daemon_process(folder, config) as running:
        yield running
        running.terminate()
        assert running.wait() == 0
        assert "Traceback" not in running.log


def test_the_self_test_passes(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        notes = client.status().notes
    assert "batching" not in notes
    assert "self-test failed" not in daemon.log


@pytest.fixture(scope="module")
def answers(model: Path) -> dict[Job, Answer]:
    return dict(zip(JOBS, oracle(model, JOBS), strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_are_those_of_mlx_lm_alone(
    daemon: DaemonProcess, answers: dict[Job, Answer], seed: int
) -> None:
    all_visits = visits(random.Random(seed))
    before = daemon.scrape()
    outcomes = asyncio.run(pay_all(daemon, all_visits, f"seed-{seed}"))
    wait_until(lambda: daemon.scrape().by("state", "mlxd_kv_bytes")["used"] == 0)
    found = partings(outcomes, [answers[visit.job] for visit in all_visits])
    report(outcomes, found)
    assert all(parting.is_near_tie for parting in found.values())
    assert any(outcome.prompt_tokens is None for outcome in outcomes)
    assert mean_batch(before, daemon.scrape()) > 3


def mean_batch(before: Scraped, after: Scraped) -> float:
    """Rows a decode step had on average between two scrapes."""
    rows, steps = (
        after.total(name) - before.total(name) for name in ("mlxd_step_rows_total", "mlxd_decode_steps_total")
    )
    return rows / steps


def test_preempted_rows_go_on_as_if_nothing_had_happened(model: Path, tmp_path: Path) -> None:
    """Six pages for three rows that need four each in the end."""
    jobs = [
        Job(f"Tell me a very long story about a {animal}.", True, 160) for animal in ("fox", "crow", "cat")
    ]
    config = process_config(tmp_path, model, scheduler={"overcommit": 2.0}, budget="18MiB", max_model_len=256)
    with daemon_process(tmp_path, config) as daemon:
        outcomes = asyncio.run(pay_all(daemon, [Visit(job, 0.0, None) for job in jobs], "preempted"))
        num_preemptions = daemon.scrape().total("mlxd_preemptions_total")
    found = partings(outcomes, oracle(model, jobs))
    report(outcomes, found)
    assert all(parting.is_near_tie for parting in found.values())
    assert num_preemptions > 0


def cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "mlxd.scheduler", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def chat_prompt(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_the_command_line_answers(daemon: DaemonProcess) -> None:
    access = ("--endpoint", daemon.config.server.submit, "--token", token("acme"))
    options = (*access, "--temperature", "0", "--max-tokens", "32", "--json")
    france, italy = map(chat_prompt, ("What is the capital of France?", "What is the capital of Italy?"))
    one = cli("generate", *options, france)
    both = cli("generate", *options, italy, france)
    assert (one.returncode, both.returncode) == (0, 0)
    answer = json.loads(one.stdout)
    assert answer["text"] == "The capital of France is Paris."
    assert (answer["finish_reason"], answer["usage"]["completion_tokens"]) == (
        "stop",
        len(answer["token_ids"]),
    )
    again = json.loads(both.stdout.splitlines()[1])
    assert again == {**answer, "index": 1, "id": again["id"]}
    assert "Rome" in json.loads(both.stdout.splitlines()[0])["text"]


def test_the_command_line_says_what_went_wrong(daemon: DaemonProcess, tmp_path: Path) -> None:
    at = ("--endpoint", daemon.config.server.submit)
    nobody = ("--endpoint", f"ipc://{tmp_path}/none", "--timeout", "0.5")
    mine = ("--token", token("acme"))
    results = [
        cli("generate", *at, *mine, "--max-tokens", "2000", "hello"),
        cli("generate", *at, *mine, "--temperature", "-1", "hello"),
        cli("generate", *at, "--token", "wrong", "hello"),
        cli("generate", *nobody, *mine, "hello"),
    ]
    assert [result.returncode for result in results] == [1, 2, 1, 1]
    for result in results:
        assert result.stdout == ""
        assert result.stderr.startswith("mlxd: ")
        assert result.stderr.count("\n") == 1
