"""The disk tier on MLX and in the whole engine: warm from disk is cold, bit for bit, also after kill -9."""

import logging
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import mlx.core as mx
import pytest
from daemon_process import daemon_process, process_config
from msgspec.structs import replace
from scheduling import VOCAB, Tape, World, make_config, make_tenant, serve, submission
from tiny_models import CHUNK, PAGE, Rig, make_rig, prompt_of
from wire_daemon import wait_until

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.batching.fingerprint import fingerprint
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.disk_store import DiskStore
from mlxd.caches.disk_tier import DiskTier
from mlxd.caches.persistence import PageCodec
from mlxd.caches.quantization import Quantization
from mlxd.metrics.stats import DiskStats, EngineSnapshot
from mlxd.scheduler.config import CacheConfig, Config, DiskConfig
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.events import Event, Finished
from mlxd.scheduler.journal_room import JournalUsage
from mlxd.scheduler.reports import status_reply
from mlxd.scheduler.status import DiskStatus

WAIT_S = 20.0


def disk_config(folder: Path, config: Config | None = None) -> Config:
    cache = CacheConfig(budget="64MiB", disk=DiskConfig(path=str(folder), max_bytes="64MiB"))
    return replace(config or make_config(), cache=cache)


def start(rig: Rig, folder: Path) -> tuple[World, DiskTier]:
    """As after a restart: empty pools, and what is on disk."""
    rig.runner.reset()
    store = DiskStore(folder, 10**8)
    codec = PageCodec(rig.runner.page_formats, store.secret)
    tier = DiskTier(store, codec, clock=lambda: 0.0, step_s=1.0)
    return World(make_config(), rig.runner, disk=tier, secret=store.secret), tier


def check_warm_is_cold(rig: Rig, folder: Path) -> None:
    document = prompt_of(3 * CHUNK, seed=5)
    prompts = [document[:n] + prompt_of(5, seed=n) for n in (PAGE, CHUNK - 1, CHUNK, CHUNK + PAGE, 47)]
    world, tier = start(rig, folder)
    serve(world, "document", document)
    tier.close()
    for prompt, found in zip(prompts, (PAGE, CHUNK - PAGE, CHUNK, CHUNK + PAGE, 44), strict=True):
        world, tier = start(rig, folder)
        warm = serve(world, "warm", prompt)
        tier.close()
        assert tier.stats.pages["loaded"] == found // PAGE
        rig.runner.reset()
        assert serve(World(make_config(), rig.runner), "cold", prompt) == warm


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("attention", ["gathered", "in_place"])
def test_warm_from_disk_equals_cold_bit_for_bit(family: str, attention: str, tmp_path: Path) -> None:
    check_warm_is_cold(make_rig(family, attention), tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_pages_from_disk_are_the_same_bits(bits: Literal[4, 8], tmp_path: Path) -> None:
    rig = make_rig("llama/64", "in_place", quantization=Quantization(bits=bits, group_size=32))
    check_warm_is_cold(rig, tmp_path)


def test_every_dtype_of_a_pool_survives_export_and_import() -> None:
    rig = make_rig("llama")
    [arrays] = rig.runner._page_arrays
    for cache in arrays.storages:
        cache.planes = [plane.astype(mx.bfloat16) for plane in cache.planes]  # type: ignore[attr-defined]
    for cache in arrays.storages:
        for plane in cache.state():
            plane[mx.array([3, 1])] = mx.random.normal((2, *plane.shape[1:])).astype(plane.dtype)
    pages = [(0, 3), (0, 1)]
    payloads = rig.runner.export_pages(pages)
    assert {len(payload) for payload in payloads} == {rig.runner.page_formats[0].page_bytes}
    arrays.write([5, 6], payloads)
    assert rig.runner.export_pages([(0, 5), (0, 6)]) == payloads
    arrays.copy([5, 6, 5], [6, 5, 7])
    assert rig.runner.export_pages([(0, 6), (0, 5), (0, 7)]) == [*payloads, payloads[0]]
    assert rig.runner.export_pages(pages) == payloads
    assert set(rig.runner.export_pages([(0, 4)])[0]) == {0}


class Served:
    """An engine and its ends; stopped when the block ends."""

    def __init__(self, config: Config) -> None:
        runner = FakeRunner(fake_memory(max_rows=8, max_model_len=256), vocab_size=VOCAB)
        self.tape = Tape()
        self._batches: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self._engine = Engine(config, runner_factory=lambda *_: runner, recorder=self.tape, seed=0)

    def __enter__(self) -> "Served":
        self._engine.start(self._batches.put)
        self._engine.wait_ready(WAIT_S)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._engine.stop(WAIT_S)

    def cached_tokens(self, request_id: str, prompt: Sequence[int]) -> int:
        self._engine.submit(submission(request_id, prompt))
        while True:
            for event in self._batches.get(timeout=WAIT_S):
                if isinstance(event, Finished) and event.key.request_id == request_id:
                    return event.usage.cached_tokens

    @property
    def disk(self) -> DiskStats:
        assert self.tape.last.disk is not None
        return self.tape.last.disk


def test_the_engine_keeps_prefixes_over_a_restart_and_tells_of_it(tmp_path: Path) -> None:
    config = disk_config(tmp_path / "disk")
    with Served(config) as served:
        assert served.cached_tokens("cold", range(240)) == 0
    with Served(config) as served:
        assert served.disk.used_bytes > 6 * 16 * 8
        assert served.disk.capacity_bytes == 64 * 2**20
        assert served.cached_tokens("warm", range(240)) == 224
        assert served.disk.pages["loaded"] == 14
        assert served.disk.load_s > 0


def test_a_tenant_that_was_gone_at_a_start_finds_nothing_again(tmp_path: Path) -> None:
    acme, beta = make_tenant("acme"), make_tenant("beta")
    found = []
    for tenants in ([acme, beta], [acme, beta], [beta], [acme, beta], [acme, beta]):
        with Served(disk_config(tmp_path / "disk", make_config(*tenants))) as served:
            if acme in tenants:
                found.append(served.cached_tokens("x", range(240)))
    assert found == [0, 224, 0, 224]


def test_without_a_disk_there_is_nothing_to_tell(tmp_path: Path) -> None:
    with Served(make_config()) as served:
        served.cached_tokens("x", range(100))
        assert served.tape.last.disk is None


@pytest.mark.parametrize(("operator", "is_off"), [(True, False), (True, True), (False, False)])
def test_the_status_tells_operators_alone_of_the_disk(operator: bool, is_off: bool, tmp_path: Path) -> None:
    asker = make_tenant("acme", operator=operator)
    config = disk_config(tmp_path / "disk", make_config(asker))
    stats = DiskStats(1536, 64 * 2**20, {}, {}, 0.0, 0.0, num_stored=3, is_off=is_off)
    status = status_reply(
        "r",
        asker,
        config=config,
        state="running",
        epoch="e",
        info=None,
        at=EngineSnapshot(disk=stats),
        now=1.0,
        started_at=0.0,
        generated_tokens={},
        journal=JournalUsage({}, 0),
    )
    folder = str(tmp_path / "disk")
    told = DiskStatus(folder=folder, pages=3, used_bytes=1536, max_bytes=64 * 2**20, is_off=is_off)
    assert status.disk == (told if operator else None)


def test_the_log_tells_what_the_disk_holds_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mlxd.scheduler.disk"), Served(disk_config(tmp_path / "disk")):
        pass
    [record] = [record for record in caplog.records if record.module == "disk"]
    assert (
        record.getMessage() == f"disk tier folder={tmp_path}/disk pages=0 used_bytes=0 max_bytes={64 * 2**20}"
    )


@pytest.mark.parametrize("trouble", ["a file for its pages", "in use"])
def test_a_folder_that_will_not_do_is_one_warning_and_serving_goes_on(
    trouble: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, store = tmp_path / "disk", None
    if trouble == "in use":
        store = DiskStore(folder, 10**6)
    else:
        folder.mkdir()
        (folder / "pages").write_bytes(b"")
    with caplog.at_level(logging.WARNING), Served(disk_config(folder)) as served:
        served.cached_tokens("x", range(100))
        assert served.tape.last.disk is None
    [record] = caplog.records
    assert record.getMessage().startswith("the disk tier is off: ")
    if store is not None:
        store.close()


def test_a_daemon_that_was_killed_finds_its_prefixes_again(model: Path, tmp_path: Path) -> None:
    config = disk_config(tmp_path / "disk", process_config(tmp_path, model))
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompt = tuple(range(10, 210))
    answers, loaded = [], []
    for _ in range(2):
        with daemon_process(tmp_path, config) as daemon:
            with daemon.client() as client:
                answers.append(client.generate(token_ids=prompt, sampling=sampling).token_ids)
            wait_until(lambda: len(list((tmp_path / "disk/pages").glob("*.safetensors"))) == 3)
            loaded.append(daemon.scrape().get("mlxd_disk_pages_total", op="loaded"))
            daemon.kill()
    assert answers[0] == answers[1]
    assert loaded == [0, 3]


def test_a_fingerprint_follows_the_weights_and_the_configuration(model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    assert fingerprint(tmp_path) == fingerprint(model)
    for name in ("config.json", "model.safetensors"):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert fingerprint(tmp_path) != fingerprint(model)
        (tmp_path / name).write_bytes(before)
    assert fingerprint(tmp_path) == fingerprint(model)
