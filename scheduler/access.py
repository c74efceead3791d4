"""How a verb reaches the daemon: the options that all such verbs have, and what they come to."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from mlxd.scheduler import options as opt
from mlxd.scheduler.async_client import AsyncClient
from mlxd.scheduler.client import Client
from mlxd.scheduler.identity import identify
from mlxd.scheduler.login import Login
from mlxd.scheduler.transport import Transport, ZmqTransport

_Own = ParamSpec("_Own")


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the daemon, and as whom.

    Attributes:
        timeout_s: longest silence to bear.
        wait_s: how long to wait for a daemon that is not there yet, or loads.
        resume_s: how long to try to go on after a lost connection.
    """

    endpoint: str
    login: Login
    timeout_s: float
    wait_s: float = 0.0
    resume_s: float = 0.0

    def client(self) -> Client:
        return Client(self.endpoint, connect=self._connect, **self._times)

    def async_client(self) -> AsyncClient:
        return AsyncClient(self.endpoint, connect=self._connect, **self._times)

    @property
    def _times(self) -> dict[str, Any]:
        return {"timeout_s": self.timeout_s, "wait_s": self.wait_s, "resume_s": self.resume_s}

    async def _connect(self) -> Transport:
        return await ZmqTransport.connect(
            self.endpoint, self.login, timeout_s=self.timeout_s, wait_s=self.wait_s
        )


def reaches_daemon(
    *, timeout_s: float, waits: bool = True, resumes: bool = False
) -> Callable[[Callable[Concatenate[Access, _Own], None]], Callable[..., None]]:
    """Give a verb, in place of its first parameter, the options that say where the daemon is and who asks.

    Args:
        timeout_s: what --timeout is by default.
        waits, resumes: whether it has --wait, and --resume.
    """
    shared = _options(timeout_s, waits=waits, resumes=resumes)

    def decorate(verb: Callable[Concatenate[Access, _Own], None]) -> Callable[..., None]:
        own = list(inspect.signature(verb).parameters.values())[1:]
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared)]

        @wraps(verb)
        def run(**values: Any) -> None:
            access = _access(**{option.name: values.pop(option.name) for option in shared})
            verb(access, **values)  # type: ignore[call-arg]

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _options(timeout_s: float, *, waits: bool, resumes: bool) -> list[inspect.Parameter]:
    declared: list[tuple[str, Any, object]] = [
        ("endpoint", opt.Endpoint, opt.DEFAULT_ENDPOINT),
        ("token", opt.Token, None),
        ("tenant_key", opt.TenantKey, None),
        ("key", opt.KeyFile, None),
        ("server_key", opt.ServerKeyFile, None),
        ("timeout_s", opt.TimeoutS, timeout_s),
        *([("wait_s", opt.WaitS, 0.0)] if waits else []),
        *([("resume_s", opt.ResumeS, 0.0)] if resumes else []),
    ]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, kind, default in declared
    ]


def _access(
    *,
    endpoint: str,
    token: str | None,
    tenant_key: Path | None,
    key: Path | None,
    server_key: Path | None,
    timeout_s: float,
    wait_s: float = 0.0,
    resume_s: float = 0.0,
) -> Access:
    """Raises ConfigError where there is no credential, there are two, or a file is no good."""
    login = identify(token, tenant_key, key, server_key, os.environ)
    return Access(endpoint, login, timeout_s, wait_s, resume_s)
