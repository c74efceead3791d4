"""The engine: one thread that owns the model, and the calls that any thread may make."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from mlxd.batching.runner import Progress, Runner, RunnerInfo, ignore_progress
from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.disk_tier import DiskTier
from mlxd.metrics.recorder import NullRecorder, Recorder
from mlxd.metrics.stats import EngineSnapshot
from mlxd.scheduler.config import Config, TenantConfig
from mlxd.scheduler.disk import open_disk
from mlxd.scheduler.errors import (
    ClientTimeoutError,
    EngineFailedError,
    MlxdError,
    ModelError,
    RejectedError,
    RevokedError,
)
from mlxd.scheduler.events import Event, RequestKey, Submission
from mlxd.scheduler.fit import check_fit
from mlxd.scheduler.inbox import Cancel, Drain, Inbox, Pause, Ping, SetTenants, Stop, Unpause
from mlxd.scheduler.local import LocalClient
from mlxd.scheduler.loop import EngineLoop
from mlxd.scheduler.model_runner import load_model_runner
from mlxd.scheduler.results import Completion
from mlxd.scheduler.scheduler import Scheduler
from mlxd.scheduler.snapshot import after_failure

logger = logging.getLogger(__name__)

RETRY_MS = 1_000

RunnerFactory = Callable[[Config, Progress], Runner]


class _LoadStoppedError(Exception):
    """Ends a load from inside: raised where the runner factory tells its progress."""


class Engine:
    """Serves one model. Every method may be called from any thread; events come on the engine's own.

    An error in a step ends every open request with "engine_failed" and the engine with it: there is no
    restart. Where memory runs out, the request whose row entered last ends, and the others are computed anew.

    Args:
        runner_factory: makes the runner, on the engine thread; None loads the configured model.
        clock: monotonic seconds; `Submission.arrived_at` and snapshots are on it.
        seed: of requests that give none; None draws one.
    """

    def __init__(
        self,
        config: Config,
        *,
        runner_factory: RunnerFactory | None = None,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._config = config
        self._factory = runner_factory or load_model_runner
        self._recorder = recorder or NullRecorder()
        self._clock = clock
        self._seed = secrets.randbits(64) if seed is None else seed
        self._inbox = Inbox(config.scheduler.max_waiting)
        self._tenants = frozenset(tenant.name for tenant in config.tenants)
        self._thread: threading.Thread | None = None
        self._on_events: Callable[[Sequence[Event]], None] = lambda events: None
        self._on_progress: Progress = ignore_progress
        self._is_settled = threading.Event()
        self._info: RunnerInfo | None = None
        self._failure: MlxdError | None = None
        self._is_draining = False
        self._is_stopping = False
        self._is_given_up = False
        self._snapshot = EngineSnapshot(now=clock())
        self._local: LocalClient | None = None

    def start(
        self, on_events: Callable[[Sequence[Event]], None], on_progress: Progress | None = None
    ) -> None:
        """Begin to load; returns at once. May be called once.

        Args:
            on_events: gets events in order, on the engine thread; it must not block, and an error in it ends
                the engine.
            on_progress: told of loading, on the engine thread.
        """
        assert self._thread is None, "the engine was started already"
        self._on_events = on_events
        self._on_progress = on_progress or ignore_progress
        self._thread = threading.Thread(target=self._main, name="mlxd-engine", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float | None = None) -> RunnerInfo:
        """Block until requests are taken.

        Raises:
            ModelError: the model cannot be served.
            EngineFailedError: the engine failed otherwise.
            ClientTimeoutError: it is still loading.
        """
        if not self._is_settled.wait(timeout_s):
            raise ClientTimeoutError(f"the model is still loading after {timeout_s} s")
        if self._failure is not None:
            raise self._failure
        return self.info

    @property
    def info(self) -> RunnerInfo:
        """What is served; only after `wait_ready` returned."""
        assert self._info is not None, "the model is not loaded yet"
        return self._info

    @property
    def snapshot(self) -> EngineSnapshot:
        """The state after the last step; never changed, replaced whole."""
        return self._snapshot

    @property
    def is_alive(self) -> bool:
        """False: its thread has ended, whatever the snapshot says."""
        return self._thread is None or self._thread.is_alive()

    def unseen_s(self, now: float) -> float:
        """For how long a request has waited for its thread, of which no snapshot tells yet; 0: for none."""
        return self._inbox.unseen_s(now)

    def give_up(self, error: str) -> None:
        """Declare it failed while its thread hangs, or is dead; what that thread still tells is not heard."""
        self._is_given_up = True
        self._failure = EngineFailedError(error)
        self._inbox.close()
        self._snapshot = after_failure(self._snapshot, error, self._clock())
        self._is_settled.set()

    @property
    def clock(self) -> Callable[[], float]:
        return self._clock

    def submit(self, submission: Submission) -> None:
        """Hand a request in; Accepted or Rejected comes as an event.

        Raises:
            InvalidParamError, InvalidPromptError: the request can never be computed.
            RejectedError: "loading", "draining" or "queue_full".
            RevokedError: its tenant is none any more.
            EngineFailedError: the engine is gone.
        """
        if self._failure is not None:
            raise EngineFailedError(str(self._failure))
        if self._info is None:
            raise RejectedError("loading", "the model is loading", retryable=True, retry_after_ms=RETRY_MS)
        if self._is_draining:
            raise RejectedError("draining", "the daemon is draining", retryable=True)
        if submission.key.tenant not in self._tenants:
            raise RevokedError
        submission.check(self._info.vocab_size)
        if not self._inbox.submit(submission, self._clock()):
            message = f"{self._config.scheduler.max_waiting} requests wait to be looked at already"
            raise RejectedError("queue_full", message, retryable=True, retry_after_ms=RETRY_MS)

    def cancel(self, key: RequestKey, outcome: str = "cancelled") -> None:
        """End a request as "cancelled", "client_gone", "slow_client", "revoked", "stop" or "failed"."""
        self._inbox.send(Cancel(key, outcome))

    def pause(self, key: RequestKey) -> None:
        """Let an open request give up its row until `unpause`; tokens in flight still come."""
        self._inbox.send(Pause(key))

    def unpause(self, key: RequestKey) -> None:
        self._inbox.send(Unpause(key))

    def ping(self, callback: Callable[[], None]) -> None:
        """Call back from the engine thread between two steps; never, where it hangs or is gone."""
        self._inbox.send(Ping(callback))

    def set_tenants(self, tenants: tuple[TenantConfig, ...]) -> None:
        """Take new settings between two steps; requests of tenants that are gone end as "revoked"."""
        self._tenants = frozenset(tenant.name for tenant in tenants)
        self._inbox.send(SetTenants(tenants))

    def drain(self) -> None:
        """Take no new requests; waiting and running ones finish."""
        self._is_draining = True
        self._inbox.send(Drain())

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the load or the open requests ("draining"), then the thread.

        Returns:
            False: it is still busy after `timeout_s`.
        """
        if not self._is_stopping:
            self._is_draining = self._is_stopping = True
            self._inbox.send(Stop())
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete prompts in this process, as the first configured tenant; all of them at once.

        Starts the engine if need be; not for an engine that feeds a server.

        Raises:
            MlxdError: the model cannot be loaded, or a prompt cannot be served.
        """
        if self._local is None:
            assert self._thread is None, "this engine was started by someone else: use a client"
            self._local = LocalClient(self, self._config)
            self.start(self._local.receive)
        return self._local.generate(prompts, sampling or SamplingParams())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _main(self) -> None:
        runner: Runner | None = None
        loop: EngineLoop | None = None
        disk: DiskTier | None = None
        try:
            runner = self._factory(self._config, self._tell_progress)
            check_fit(self._config, runner.info.memory)
            disk, secret = open_disk(self._config, runner, self._clock)
            loop = self._make_loop(runner, disk, secret or secrets.token_bytes(32))
            self._info = runner.info
            loop.run()
        except _LoadStoppedError:
            self._end_unloaded()
        except ModelError as error:  # not logged: whoever waits for the model gets it and says so
            self._fail(error, loop)
        except Exception as error:  # the one place: whatever went wrong, clients are told and the engine ends
            logger.exception("engine failed")
            self._fail(EngineFailedError(f"{type(error).__name__}: {error}"), loop)
        finally:
            if disk is not None:
                disk.close()
            if runner is not None:
                runner.close()

    def _tell_progress(self, stage: str, share: float) -> None:
        if self._is_stopping:
            raise _LoadStoppedError
        self._on_progress(stage, share)

    def _end_unloaded(self) -> None:
        self._failure = EngineFailedError("the engine was stopped before the model was loaded")
        self._inbox.close()
        self._publish(replace(self._snapshot, state="stopped", now=self._clock()))

    def _make_loop(self, runner: Runner, disk: DiskTier | None, secret: bytes) -> EngineLoop:
        scheduler = Scheduler(
            self._config, runner.info, seed=self._seed, secret=secret, disk=disk, recorder=self._recorder
        )
        return EngineLoop(
            runner,
            scheduler,
            self._inbox,
            recorder=self._recorder,
            clock=self._clock,
            emit=self._on_events,
            publish=self._publish,
        )

    def _publish(self, snapshot: EngineSnapshot) -> None:
        if self._is_given_up:
            return
        self._snapshot = snapshot
        self._recorder.snapshot(snapshot)
        self._is_settled.set()

    def _fail(self, failure: MlxdError, loop: EngineLoop | None) -> None:
        self._failure = failure
        events = loop.abandon(str(failure)) if loop is not None else []
        self._inbox.close()
        self._publish(after_failure(self._snapshot, str(failure), self._clock()))
        if events:
            self._on_events(events)
