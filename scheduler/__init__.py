"""Requests, policies, the engine, the wire and the command line."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxd.batching.sampling_params import SamplingParams
    from mlxd.scheduler import errors
    from mlxd.scheduler.async_client import AsyncClient
    from mlxd.scheduler.client import Client
    from mlxd.scheduler.config import Config
    from mlxd.scheduler.engine import Engine
    from mlxd.scheduler.server import Server

__all__ = ["AsyncClient", "Client", "Config", "Engine", "SamplingParams", "Server", "errors"]

_HOMES = {
    "AsyncClient": "mlxd.scheduler.async_client",
    "Client": "mlxd.scheduler.client",
    "Config": "mlxd.scheduler.config",
    "Engine": "mlxd.scheduler.engine",
    "SamplingParams": "mlxd.batching.sampling_params",
    "Server": "mlxd.scheduler.server",
}


def __getattr__(name: str) -> object:
    """Imports what is asked for, so that a client does not import the engine."""
    if name == "errors":
        return import_module("mlxd.scheduler.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
