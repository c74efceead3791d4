"""What the verbs do that talk to a running daemon."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.live import Live

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.async_client import AsyncClient
from mlxd.scheduler.client import Client
from mlxd.scheduler.errors import MlxdError
from mlxd.scheduler.results import Completion
from mlxd.scheduler.tables import status_tables

_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the daemon, and as whom. `timeout_s`: longest silence to bear."""

    endpoint: str
    token: str
    timeout_s: float

    def client(self) -> Client:
        return Client(self.endpoint, token=self.token, timeout_s=self.timeout_s)

    def async_client(self) -> AsyncClient:
        return AsyncClient(self.endpoint, token=self.token, timeout_s=self.timeout_s)


def generate(access: Access, prompts: Sequence[str], sampling: SamplingParams, *, as_json: bool) -> bool:
    """Complete all prompts at once and print them in their order; one alone is printed as it comes.

    Returns whether all went well. Raises what the first prompt met where none did and text was asked for.
    """
    if len(prompts) == 1 and not as_json:
        asyncio.run(_stream(access, prompts[0], sampling))
        return True
    return asyncio.run(_complete(access, prompts, sampling, as_json=as_json))


def chat(access: Access, system: str | None, sampling: SamplingParams) -> None:
    """Read lines until an empty one or the end, and answer each with the talk so far in mind."""
    messages = [{"role": "system", "content": system}] if system else []
    with access.client() as client:
        while line := _ask():
            messages.append({"role": "user", "content": line})
            answer = ""
            for chunk in client.stream(messages=messages, sampling=sampling):
                print(chunk.text, end="", flush=True)
                answer += chunk.text
            print()
            messages.append({"role": "assistant", "content": answer})


def status(access: Access, *, watch: bool) -> None:
    """Print the daemon's state once, or keep it on the screen until Ctrl-C."""
    console = Console()
    with access.client() as client:
        if not watch:
            console.print(status_tables(client.status()))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(status_tables(client.status()), refresh=True)
                time.sleep(_REFRESH_S)


def drain(access: Access) -> None:
    with access.client() as client:
        client.drain()
    print("draining: open requests finish, new ones are turned away")


async def _stream(access: Access, prompt: str, sampling: SamplingParams) -> None:
    async with access.async_client() as client, aclosing(client.stream(prompt, sampling)) as chunks:
        async for chunk in chunks:
            print(chunk.text, end="", flush=True)
    print()


async def _complete(
    access: Access, prompts: Sequence[str], sampling: SamplingParams, *, as_json: bool
) -> bool:
    failures: list[MlxdError] = []
    async with access.async_client() as client:
        tasks = [asyncio.create_task(_answer(client, prompt, sampling)) for prompt in prompts]
        for number, (prompt, task) in enumerate(zip(prompts, tasks, strict=True), start=1):
            answer = await task
            if isinstance(answer, MlxdError):
                failures.append(answer)
                print(f"mlxd: prompt {number}: {answer}", file=sys.stderr)
            if as_json:
                print(_as_json(answer), flush=True)
            elif isinstance(answer, Completion):
                print(f"[{number}] {prompt}\n{answer.text}\n", flush=True)
    return not failures


async def _answer(client: AsyncClient, prompt: str, sampling: SamplingParams) -> Completion | MlxdError:
    try:
        return await client.generate(prompt, sampling)
    except MlxdError as error:
        return error


def _as_json(answer: Completion | MlxdError) -> str:
    if isinstance(answer, MlxdError):
        return json.dumps({"error": {"code": answer.code, "message": str(answer)}})
    fields = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": asdict(answer.usage),
    }
    return json.dumps(fields, ensure_ascii=False)


def _ask() -> str:
    """The user's next line; empty at the end of input. The prompt shows on a terminal only."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
