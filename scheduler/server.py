"""The daemon's life: start, serve, drain, stop."""

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from mlxd.batching.runner import Progress, RunnerInfo
from mlxd.batching.text import Tokenizer
from mlxd.metrics.exporter import Exporter, ExporterError
from mlxd.metrics.health import STALL_S, Health, judge
from mlxd.metrics.prometheus import PrometheusRecorder
from mlxd.scheduler.config import Config
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import ConfigError, EngineFailedError, MlxdError, RejectedError
from mlxd.scheduler.exit_codes import EXIT_FAILED, EXIT_HUNG, EXIT_OK
from mlxd.scheduler.frontend import Frontend
from mlxd.scheduler.intake import Served
from mlxd.scheduler.journal import JournalWriter, NoJournal, open_journal
from mlxd.scheduler.model_runner import load_model_tokenizer
from mlxd.scheduler.reload import Reloader
from mlxd.scheduler.watchdog import Watchdog, stacks

logger = logging.getLogger(__name__)

POLL_S = 0.02
SETTLE_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 10.0
FORCED_STOP_TIMEOUT_S = 1.0
WRITE_TIMEOUT_S = 5.0


class Server:
    """One daemon; `serve` may be called once.

    Args:
        path: the configuration's file, for `request_reload`; None where it has none.
        engine: made from the configuration by default.
        recorder: what `/metrics` shows; an engine passed in should have the same one.
        tokenizer: the model folder's own by default.
        on_progress: told about download, load and warm-up; called from other threads.

    Attributes:
        left_engine_behind: `serve` ended and the engine's thread, or the journal's, did not. Where it is
            inside MLX, an ordinary end of the process may abort.
    """

    def __init__(
        self,
        config: Config,
        *,
        path: Path | None = None,
        engine: Engine | None = None,
        recorder: PrometheusRecorder | None = None,
        tokenizer: Tokenizer | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._path = path
        self._recorder = recorder or PrometheusRecorder(
            [tenant.name for tenant in config.tenants], version=version("mlxd")
        )
        self._engine = engine or Engine(config, recorder=self._recorder)
        self._tokenizer = tokenizer
        self._on_progress = on_progress
        self._takes_requests = False
        self._drain_requests = 0
        self._watchdog = self._watch(NoJournal())
        self._reloader: Reloader | None = None
        self._reloads: set[asyncio.Task[None]] = set()
        self.left_engine_behind = False

    def _watch(self, journal: JournalWriter | NoJournal) -> Watchdog:
        return Watchdog(self._engine, journal, self._config.scheduler.step_timeout_s)

    def request_drain(self) -> None:
        """Stop admitting and exit when the open requests are done; asked again, end them now."""
        self._drain_requests += 1
        self._engine.drain()

    def request_reload(self) -> None:
        """Read the file anew, for its tenants; the log says how it went. To be called inside the loop."""
        reload = asyncio.get_running_loop().create_task(self._reload_by_signal())
        self._reloads.add(reload)
        reload.add_done_callback(self._reloads.discard)

    async def _reload_by_signal(self) -> None:
        with suppress(ConfigError):  # it is in the log
            await self._reload()

    async def _reload(self) -> tuple[str, ...]:
        assert self._reloader is not None, "nobody asks before it serves"
        return await self._reloader.reload()

    async def serve(self, *, handle_signals: bool = True) -> int:
        """Run until drained; SIGTERM and SIGINT drain, SIGHUP reloads.

        Returns:
            The exit code: 0 after a drain, 1 where the engine failed, 3 where a thread hung or was dead.
        Raises:
            ConfigError, SettingError: the configuration, an address, a port or the journal's file cannot be
                used; nothing was started.
            ModelError, EngineFailedError: the model cannot be loaded.
        """
        self._config.check()
        with self._metrics() as metrics, self._signals(handle_signals), self._journal() as journal:
            self._watchdog = self._watch(journal)
            frontend = Frontend(
                self._config,
                self._engine,
                self._recorder,
                epoch=secrets.token_hex(8),
                on_drain=self.request_drain,
                journal=journal,
                on_reload=self._reload,
            )
            self._reloader = Reloader(self._config, self._path, self._engine, partial(self._apply, frontend))
            serving = asyncio.create_task(frontend.run())
            try:
                self._engine.start(frontend.post, self._on_progress)
                exit_code = await self._live(frontend, serving, metrics)
            finally:
                await self._stop(frontend, serving, journal)
        exit_code = exit_code or (EXIT_FAILED if self.left_engine_behind else EXIT_OK)
        logger.info("ended exit_code=%d", exit_code)
        return exit_code

    def _apply(self, frontend: Frontend, config: Config) -> None:
        """Take the configuration's tenants."""
        self._recorder.add_tenants([tenant.name for tenant in config.tenants])
        self._engine.set_tenants(config.tenants)
        frontend.update(config)

    async def _live(self, frontend: Frontend, serving: asyncio.Task[None], metrics: str) -> int:
        await self._until(lambda: self._is_over or self._engine.snapshot.state != "starting", serving)
        if not self._drain_requests and not self._watchdog.fault():
            # Its snapshot is seen a moment before it says that it is ready.
            info = self._engine.wait_ready(SETTLE_TIMEOUT_S)
            tokenizer = self._tokenizer
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(load_model_tokenizer, self._config)
            frontend.desk.served = Served(info, tokenizer)
            frontend.desk.restore()
            self._takes_requests = True
            self._tell_ready(info, metrics)
            await self._until(lambda: self._is_over, serving)
        if not self._is_over:
            limit_s = self._config.server.drain_timeout_s
            logger.info("draining open=%d timeout_s=%s", frontend.desk.num_open, limit_s)
            await self._until_idle(frontend)
        if fault := self._watchdog.fault():
            self._give_up(frontend, fault)
            return EXIT_HUNG
        return EXIT_FAILED if self._failed else EXIT_OK

    def _give_up(self, frontend: Frontend, fault: str) -> None:
        """Tell everybody what hangs or is dead, while the process can."""
        logger.critical("watchdog: %s; threads are at\n%s", fault, stacks())
        self._drain_requests = max(2, self._drain_requests)
        self.left_engine_behind = True
        self._engine.give_up(fault)
        frontend.desk.give_up(EngineFailedError(fault))

    def _tell_ready(self, info: RunnerInfo, metrics: str) -> None:
        logger.info(
            "ready model=%s device=%s tenants=%d submit=%s control=%s metrics=%s",
            info.model,
            info.device,
            len(self._config.tenants),
            self._config.server.submit,
            self._config.server.control,
            metrics,
        )
        curve = self._config.server.curve
        if curve is not None:
            logger.info("encrypted submit=%s control=%s", curve.submit, curve.control)

    async def _stop(
        self, frontend: Frontend, serving: asyncio.Task[None], journal: JournalWriter | NoJournal
    ) -> None:
        """End the engine, which is left behind where it hangs, what is open, and the sockets."""
        error: MlxdError = RejectedError("draining", "the daemon stopped", retryable=True)
        if not await self._stop_engine():
            error = EngineFailedError("the engine does not answer")
        elif self._failed:
            error = EngineFailedError("the engine failed")
        # Its last events were posted before its thread ended, so they are delivered by now.
        frontend.desk.give_up(error)
        await self._until_told(journal)
        frontend.desk.tell_unwritten()
        serving.cancel()
        await asyncio.wait([serving])
        await frontend.close()

    async def _stop_engine(self) -> bool:
        asked = time.monotonic()
        while not await asyncio.to_thread(self._engine.stop, POLL_S):
            timeout_s = FORCED_STOP_TIMEOUT_S if self._forced else STOP_TIMEOUT_S
            if time.monotonic() - asked >= timeout_s:
                self.left_engine_behind = True
                logger.error("engine did not stop within %s s", timeout_s)
                return False
        return True

    async def _until_told(self, journal: JournalWriter | NoJournal) -> None:
        """What waits for the journal is told, or it takes too long."""
        deadline = time.monotonic() + (FORCED_STOP_TIMEOUT_S if self._forced else WRITE_TIMEOUT_S)
        while journal.num_untold and journal.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    async def _until(self, condition: Callable[[], bool], serving: asyncio.Task[None]) -> None:
        """Returns early when a drain is asked; raises what ended the frontend."""
        while not condition() and not self._drain_requests:
            if serving.done():
                serving.result()
            await asyncio.sleep(POLL_S)

    async def _until_idle(self, frontend: Frontend) -> None:
        deadline = time.monotonic() + self._config.server.drain_timeout_s
        while frontend.desk.num_open and time.monotonic() < deadline and not (self._is_over or self._forced):
            await asyncio.sleep(POLL_S)

    @property
    def _failed(self) -> bool:
        return self._engine.snapshot.state == "failed"

    @property
    def _is_over(self) -> bool:
        return self._failed or bool(self._watchdog.fault())

    @property
    def _forced(self) -> bool:
        return self._drain_requests > 1

    def _health(self, now: float, stall_s: float) -> Health:
        snapshot = self._engine.snapshot
        if snapshot.state == "running" and not self._takes_requests:
            snapshot = replace(snapshot, state="starting")  # the tokenizer comes after the engine
        return judge(snapshot, now, stall_s, unseen_s=self._engine.unseen_s(now))

    @contextmanager
    def _metrics(self) -> Iterator[str]:
        """Yields where `/metrics` is."""
        stall_s = min(STALL_S, self._config.scheduler.step_timeout_s)
        try:
            exporter = Exporter(
                self._config.server.metrics,
                self._recorder.registry,
                lambda: self._health(time.monotonic(), stall_s),
            )
        except ExporterError as error:
            raise ConfigError(f"server.metrics: {error}") from None
        host = self._config.server.metrics.rpartition(":")[0]
        with exporter:
            yield f"http://{host}:{exporter.port}/metrics"

    @contextmanager
    def _journal(self) -> Iterator[JournalWriter | NoJournal]:
        """Written to its end on the way out."""
        loop = asyncio.get_running_loop()

        def on_loop(call: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the loop is closed when a write that hung comes back
                loop.call_soon_threadsafe(call)

        journal = open_journal(self._config, on_loop, self._recorder)
        try:
            yield journal
        finally:
            if not journal.close():
                logger.error("the journal did not take what was told it last")
                self.left_engine_behind = True

    @contextmanager
    def _signals(self, handle: bool) -> Iterator[None]:
        drain, reload = self.request_drain, self.request_reload
        signals = {signal.SIGTERM: drain, signal.SIGINT: drain, signal.SIGHUP: reload} if handle else {}
        loop = asyncio.get_running_loop()
        for number, call in signals.items():
            loop.add_signal_handler(number, call)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
