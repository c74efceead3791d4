"""A machine with a disk tier whose daemon is started again and again, without a model."""

from collections.abc import Callable, Sequence
from pathlib import Path

from scheduling import VOCAB, World, make_config, submission

from mlxd.batching.fake_runner import FakeRunner, fake_completion, fake_memory
from mlxd.batching.plan import DecodeEntry
from mlxd.caches.disk_store import DiskStore
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.persistence import PageCodec
from mlxd.scheduler.config import Config
from mlxd.scheduler.events import Finished, Tokens

PAGE, CHUNK = 8, 16


PROMPT = tuple(range(100, 140))


NEVER_S = 1e9


KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "full and sliding": {"window": 20, "num_window_pages": 50},
    "full and state": {"has_state": True, "num_states": 24},
    "state": {"has_full": False, "has_state": True, "num_states": 24},
    "all": {"window": 12, "has_state": True, "boundary": 32},
}
"""Groups of a model."""


class Machine:
    """A folder, and a world that is started anew on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(
        self,
        config: Config | None = None,
        *,
        max_bytes: int = 10**6,
        step_s: float = NEVER_S,
        clock: Callable[[], float] = lambda: 0.0,
        queue_bytes: int = 10**6,
        num_pages: int | None = None,
        decode_fault: Callable[[DecodeEntry], str | None] | None = None,
        prefill_s_per_token: float = 0.0,
        kind: str = "full",
    ) -> World:
        sizes: dict[str, object] = {"chunk": CHUNK, "page_size": PAGE, "num_pages": num_pages}
        memory = fake_memory(max_rows=8, max_model_len=256, **(sizes | KINDS[kind]))  # type: ignore[arg-type]
        runner = FakeRunner(
            memory, vocab_size=VOCAB, decode_fault=decode_fault, prefill_s_per_token=prefill_s_per_token
        )
        store = DiskStore(self.folder, max_bytes)
        codec = PageCodec(runner.page_formats, store.secret)
        self.tier = DiskTier(store, codec, clock=clock, step_s=step_s, queue_bytes=queue_bytes)
        return World(config or make_config(), runner, disk=self.tier, secret=store.secret)

    def stop(self) -> None:
        """Once more is harmless."""
        self.tier.close()

    def restart(self, config: Config | None = None, **settings: object) -> World:
        self.stop()
        return self.start(config, **settings)  # type: ignore[arg-type]

    @property
    def files(self) -> list[Path]:
        """Oldest first; not one that is being written."""
        return sorted((self.folder / "pages").glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def serve(world: World, request_id: str, prompt: Sequence[int] = PROMPT, **fields: object) -> int:
    """Run it alone to its end, check its tokens; tokens of the prompt that were found."""
    world.submit(submission(request_id, prompt, **fields))  # type: ignore[arg-type]
    world.run()
    ends = {e.key.request_id: e for e in world.events if isinstance(e, Finished)}
    tokens = tokens_of(world, request_id)
    assert tokens == fake_completion(prompt, 7, len(tokens), VOCAB)
    return ends[request_id].usage.cached_tokens


def tokens_of(world: World, request_id: str) -> list[int]:
    events = (e for e in world.events if isinstance(e, Tokens) and e.key.request_id == request_id)
    return [token for event in events for token in event.token_ids]


def misses(machine: Machine) -> dict[str, int]:
    return {reason: number for reason, number in machine.tier.stats.misses.items() if number}
