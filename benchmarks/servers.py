"""What a load needs of a server, and mlxd's daemon as one."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple, Protocol

from daemon import Daemon, make_config
from msgspec.structs import replace

from mlxd.scheduler import SamplingParams
from mlxd.scheduler.config import CacheConfig, DecodeConfig, SchedulerConfig

_QUEUE = 10_000
_PEAK = 'mlxd_device_memory_bytes{kind="peak"}'


class Piece(NamedTuple):
    """Of an answer, as it comes; the last one knows how many tokens prompt and answer had."""

    text: str
    prompt_tokens: int = 0
    output_tokens: int = 0


class Server(Protocol):
    """A process that answers."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    async def start(self) -> None: ...

    def stream(self, prompt: str, num_tokens: int) -> AsyncIterator[Piece]:
        """An answer of so many tokens, greedily."""
        ...

    async def end(self) -> int:
        """The most memory that MLX held while it served, in bytes."""
        ...


class MlxdServer:
    """`mlxd serve`, one tenant."""

    name = "mlxd"

    def __init__(
        self,
        folder: Path,
        model: Path,
        max_rows: int,
        *,
        max_model_len: int,
        budget: str,
        decode: DecodeConfig,
    ) -> None:
        """`folder`: for its sockets and its YAML. `budget`, `decode`: as in the configuration."""
        config = make_config(folder, str(model), max_rows, CacheConfig(budget=budget))
        (tenant,) = config.tenants
        self._daemon = Daemon(
            folder,
            replace(
                config,
                tenants=(replace(tenant, max_running=max_rows, max_waiting=_QUEUE),),
                model=replace(config.model, max_model_len=max_model_len),
                scheduler=SchedulerConfig(max_rows=max_rows, max_waiting=_QUEUE),
                decode=decode,
            ),
        )

    @property
    def pid(self) -> int:
        return self._daemon.pid

    async def start(self) -> None:
        await self._daemon.start()

    async def stream(self, prompt: str, num_tokens: int) -> AsyncIterator[Piece]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        async for chunk in self._daemon.client.stream(prompt, sampling):
            usage = chunk.usage
            yield Piece(chunk.text, *((usage.prompt_tokens, usage.completion_tokens) if usage else ()))

    async def end(self) -> int:
        try:
            return int(self._daemon.metrics()[_PEAK])
        except OSError:
            return 0  # it did not get so far as to serve
        finally:
            await self._daemon.end()
