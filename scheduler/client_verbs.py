"""What the verbs do that talk to a running daemon."""

import asyncio
import importlib
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live

from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.access import Access
from mlxd.scheduler.async_client import AsyncClient
from mlxd.scheduler.client import Client
from mlxd.scheduler.errors import InvalidPromptError, MlxdError, RejectedError, RequestFailedError
from mlxd.scheduler.frames import MAX_STRING_BYTES
from mlxd.scheduler.priority import PriorityName
from mlxd.scheduler.request_options import new_id
from mlxd.scheduler.results import Completion, TextChunk
from mlxd.scheduler.status_tables import status_tables
from mlxd.scheduler.tables import show

_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Input:
    """A prompt of the command line. `chat`: it is a user's message; a `system` message makes it one, too."""

    text: str
    chat: bool = False
    system: str | None = None
    priority: PriorityName = "normal"
    deadline_ms: int | None = None
    request_id: str = field(default_factory=new_id)

    def arguments(self) -> dict[str, Any]:
        """As the clients' `generate` and `stream` take it."""
        common = {"priority": self.priority, "deadline_ms": self.deadline_ms, "request_id": self.request_id}
        if not self.chat and self.system is None:
            return {"prompt": self.text, **common}
        return {"messages": [*_system(self.system), {"role": "user", "content": self.text}], **common}


def generate(access: Access, inputs: Sequence[Input], sampling: SamplingParams, *, as_json: bool) -> bool:
    """Complete all prompts at once and print them in their order; one alone is printed as it comes.

    Returns whether all went well. Raises what the first prompt met where none did and text was asked for.
    """
    if len(inputs) == 1 and not as_json:
        asked = inputs[0].arguments()
        asyncio.run(_stream(access, lambda client: client.stream(**asked, sampling=sampling)))
        return True
    return asyncio.run(_complete(access, inputs, sampling, as_json=as_json))


def resume(access: Access, request_id: str, seq: int) -> None:
    """Print the answer to an earlier request as it comes, from piece `seq` on."""
    asyncio.run(_stream(access, lambda client: client.resume(request_id, seq)))


def cancel(access: Access, request_id: str) -> None:
    """End the tenant's open request of that id. Raises RequestFailedError "gone" where there is none."""
    with access.client() as client:
        if not client.cancel(request_id):
            raise RequestFailedError("gone", f"no open request has the id {request_id!r}")
    print(f"cancelling {request_id}")


def chat(access: Access, system: str | None, sampling: SamplingParams) -> None:
    """Read lines until an empty one or the end, and answer each with the talk so far in mind."""
    with suppress(ImportError):
        importlib.import_module("readline")  # gives `input` editing and a history, where there is one
    messages = _system(system)
    with access.client() as client:
        while line := _ask():
            messages.append({"role": "user", "content": line})
            answer = _say(client, messages, sampling)
            messages.append({"role": "assistant", "content": answer})


def status(access: Access, *, watch: bool) -> None:
    """Print the daemon's state once, or keep it on the screen until Ctrl-C."""
    with access.client() as client:
        if not watch:
            show(status_tables(client.status()))
            return
        before = None
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                now = client.status()
                live.update(status_tables(now, before, details=False), refresh=True)
                before = now
                time.sleep(_REFRESH_S)


def drain(access: Access) -> None:
    with access.client() as client:
        client.drain()
    print("draining: open requests finish, new ones are turned away")


def reload(access: Access) -> None:
    with access.client() as client:
        changes = client.reload()
    print("\n".join(changes) or "nothing changed")


@contextmanager
def _line() -> Iterator[Callable[[str], None]]:
    """Prints a line piece by piece; it also ends where an error cuts it off."""
    has_begun = False

    def put(text: str) -> None:
        nonlocal has_begun
        has_begun = has_begun or bool(text)
        print(text, end="", flush=True)

    try:
        yield put
    except BaseException:
        if has_begun:
            print(flush=True)
        raise
    print()


async def _stream(access: Access, ask: Callable[[AsyncClient], AsyncGenerator[TextChunk, None]]) -> None:
    with _line() as put:
        async with access.async_client() as client, aclosing(ask(client)) as chunks:
            async for chunk in chunks:
                put(chunk.text)


def _say(client: Client, messages: Sequence[dict[str, str]], sampling: SamplingParams) -> str:
    """Print the answer as it comes, until its end or a Ctrl-C. Returns what there is of it."""
    answer = ""
    try:
        with _line() as put, closing(client.stream(messages=messages, sampling=sampling)) as chunks:
            for chunk in chunks:
                put(chunk.text)
                answer += chunk.text
    except KeyboardInterrupt:
        print("[stopped]")
    return answer


async def _complete(
    access: Access, inputs: Sequence[Input], sampling: SamplingParams, *, as_json: bool
) -> bool:
    failures = 0
    async with access.async_client() as client:
        tasks = [asyncio.create_task(_answer(client, asked, sampling)) for asked in inputs]
        try:
            for index, (asked, task) in enumerate(zip(inputs, tasks, strict=True)):
                answer = await task
                failures += isinstance(answer, MlxdError)
                _tell(index, asked, answer, as_json=as_json)
        finally:  # after a Ctrl-C requests are cancelled while there is a connection
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return not failures


def _tell(index: int, asked: Input, answer: Completion | MlxdError, *, as_json: bool) -> None:
    if isinstance(answer, MlxdError):
        print(f"mlxd: prompt {index + 1}: {answer}", file=sys.stderr)
    if as_json:
        print(_as_json(index, asked, answer), flush=True)
    elif isinstance(answer, Completion):
        print(f"[{index + 1}] {asked.text}\n{answer.text}\n", flush=True)


async def _answer(client: AsyncClient, asked: Input, sampling: SamplingParams) -> Completion | MlxdError:
    try:
        return await client.generate(**asked.arguments(), sampling=sampling)
    except MlxdError as error:
        return error


def _as_json(index: int, asked: Input, answer: Completion | MlxdError) -> str:
    fields: dict[str, Any] = {"index": index, "id": asked.request_id, "prompt": asked.text}
    if isinstance(answer, MlxdError):
        reason = {"reason": answer.reason} if isinstance(answer, RejectedError) else {}
        fields["error"] = {"code": answer.code, **reason, "message": str(answer)}
    else:
        fields |= {
            "text": answer.text,
            "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "usage": asdict(answer.usage),
        }
        if answer.logprobs:
            fields["logprobs"] = [_logprobs_as_json(each) for each in answer.logprobs]
    return json.dumps(fields)


def _logprobs_as_json(logprobs: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": value} for token, value in logprobs.top]
    return {"logprob": logprobs.logprob, "top": top}


def _system(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def read_prompt() -> str:
    """Standard input to its end. Raises InvalidPromptError where it is too long or is no text."""
    return _bounded(sys.stdin.read)


def _bounded(read: Callable[[int], str]) -> str:
    """What `read` gives of standard input when asked for more than a prompt may have."""
    try:
        text = read(MAX_STRING_BYTES + 1)
    except UnicodeDecodeError:
        raise InvalidPromptError(f"standard input is not {sys.stdin.encoding.upper()} text") from None
    if len(text) > MAX_STRING_BYTES:
        raise InvalidPromptError(f"standard input has more than {MAX_STRING_BYTES} characters, the limit")
    return text


def _ask() -> str:
    """The user's next line; empty at the end of input. The prompt shows on a terminal only."""
    is_terminal = sys.stdin.isatty()
    try:
        return _bounded(lambda limit: input("> ") if is_terminal else sys.stdin.readline(limit)).strip()
    except EOFError:
        print()
        return ""
    except KeyboardInterrupt:
        print()
        raise
