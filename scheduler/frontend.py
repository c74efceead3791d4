"""What comes in at the sockets: who speaks, what they may ask, and where it goes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from mlxd.metrics.recorder import Recorder
from mlxd.scheduler import messages as wire
from mlxd.scheduler.bad_frames import BadFrames
from mlxd.scheduler.config import Config, TenantConfig
from mlxd.scheduler.connections import is_own_id
from mlxd.scheduler.desk import Desk
from mlxd.scheduler.door import Door
from mlxd.scheduler.doors import Doors
from mlxd.scheduler.engine import Engine
from mlxd.scheduler.errors import ConfigError, ProtocolError, UnauthenticatedError
from mlxd.scheduler.events import Event, RequestKey
from mlxd.scheduler.journal import Journal
from mlxd.scheduler.protocol import decode, encoding_of, kind_of
from mlxd.scheduler.reading import LARGE_BYTES, Reader, size_of
from mlxd.scheduler.reception import Reception
from mlxd.scheduler.refusals import Refusals
from mlxd.scheduler.reports import limits, status_reply
from mlxd.scheduler.session import Session

MAX_STRANGER_BYTES = 2**12
MAX_PINGS = 8

T = TypeVar("T")


class Frontend:
    """Owns the sockets. Everything but `post` runs on the asyncio thread, `__init__` inside its loop.

    `on_drain` and `on_reload` are called when an operator asks for it; the latter tells what changed, or
    raises ConfigError.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        recorder: Recorder,
        *,
        epoch: str,
        on_drain: Callable[[], None],
        journal: Journal,
        on_reload: Callable[[], Awaitable[tuple[str, ...]]],
    ) -> None:
        """Binds the sockets; owns a file at each ipc address from here on.

        Raises:
            ConfigError, SettingError: what `Doors` raises.
        """
        self._config = config
        self._engine = engine
        self._recorder = recorder
        self._epoch = epoch
        self._on_drain = on_drain
        self._journal = journal
        self._on_reload = on_reload
        self._reloads: set[asyncio.Task[None]] = set()
        self._bad_frames = BadFrames(recorder)
        self._refusals = Refusals(self._bad_frames)
        self._reception = Reception(
            config.tenants, self._bad_frames, lambda session, outcome: self.desk.abandon(session, outcome)
        )
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._decoder = ThreadPoolExecutor(1, "mlxd-decode")
        self._doors = Doors(
            config.server,
            recorder,
            may_enter=self._reception.may_enter,
            on_gone=lambda session: self.desk.abandon(session, "client_gone"),
            on_slow=lambda session: self.desk.abandon(session, "slow_client"),
            on_room=lambda session: self.desk.has_room(session),
        )
        self.desk: Desk = Desk(config, engine, recorder, self._doors.send, journal)

    def update(self, config: Config) -> None:
        """Take other tenants; clients whose credential is withdrawn are told so and closed."""
        self._config = config
        self.desk.update({tenant.name for tenant in config.tenants})
        self._reception.update(config.tenants, tuple(self._doors))

    def post(self, events: Sequence[Event]) -> None:
        """Take the engine's events; from any thread."""
        self._on_loop(self.desk.deliver, events)

    def _on_loop(self, call: Callable[[T], None], argument: T) -> None:
        # The loop is closed when an engine that hung comes back after the daemon gave it up.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, argument)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for door in self._doors:
                tasks.create_task(Reader(door, partial(self._take, door)).run())
            tasks.create_task(self._doors.run())
            tasks.create_task(self._beat())
            tasks.create_task(self._bad_frames.log_forever())

    async def close(self) -> None:
        """Give clients LINGER_MS to take what they were sent, then close the sockets."""
        await self._doors.close()
        self.desk.close()
        self._decoder.shutdown(wait=False, cancel_futures=True)
        await self._doors.term()

    async def _take(self, door: Door, session: Session, frames: list[bytes]) -> None:
        if session.gone or self._loop.time() < session.patience.deaf_until:
            self._bad_frames.count("ignored")
            return
        try:
            message = await self._decode(session, frames)
        except ProtocolError as error:
            self._refusals.refuse_unread(door, session, error)
            return
        if session.gone:
            self._bad_frames.count("ignored")
            return
        self._recorder.message("in", kind_of(message))
        try:
            self._dispatch(door, session, message)
        except ProtocolError as error:
            error.about = kind_of(message)
            self._refusals.refuse(door, session, error)
        except UnauthenticatedError as error:
            self._refusals.refuse_stranger(door, session, error.code)

    async def _decode(self, session: Session, frames: list[bytes]) -> wire.ClientMessage:
        if is_own_id(session.peer):
            raise ProtocolError("unsupported", "a client must not set a routing id", field="routing_id")
        size = size_of(frames)
        if session.tenant is None and size > MAX_STRANGER_BYTES:
            text = f"the message has {size} bytes; before hello the limit is {MAX_STRANGER_BYTES}"
            raise ProtocolError("too_large", text)
        if frames[-1]:
            session.encoding = encoding_of(frames[-1])
        if len(frames) != 1:
            raise ProtocolError("malformed_frames", f"a message is one frame, not {len(frames)}")
        limit = self._config.server.max_message_bytes
        if size > LARGE_BYTES:
            return await self._loop.run_in_executor(self._decoder, decode, frames[0], limit)
        return decode(frames[0], limit)

    def _dispatch(self, door: Door, session: Session, message: wire.ClientMessage) -> None:
        """Raises ProtocolError for what the peer may not ask, UnauthenticatedError before its hello."""
        if isinstance(message, wire.Hello):
            self._greet(door, session, message)
            return
        if session.tenant is None:
            raise UnauthenticatedError
        match message:
            case wire.Generate():
                self._only_on_submit(door, "generate", message.id)
                self.desk.generate(session, message)
            case wire.Resume():
                self._only_on_submit(door, "resume", message.id)
                self.desk.resume(session, message)
            case wire.Grant():
                self._only_on_submit(door, "grant", message.id)
                self.desk.grant(session, message)
            case wire.Cancel():
                found = self.desk.cancel(RequestKey(session.tenant.name, message.id))
                result = wire.CancelReply(id=message.id, result="cancelling" if found else "not_found")
                door.send(session, result)
            case wire.Status():
                door.send(session, self._status(session.tenant, message.id))
            case wire.Ping():
                self._ping(door, session, message.id)
            case wire.Drain():
                _check_operator(session.tenant, message.id)
                door.send(session, wire.Draining(id=message.id))
                self._on_drain()
            case wire.Reload():
                _check_operator(session.tenant, message.id)
                reload = self._loop.create_task(self._reload(door, session, message.id))
                self._reloads.add(reload)
                reload.add_done_callback(self._reloads.discard)

    async def _reload(self, door: Door, session: Session, reply_id: str) -> None:
        try:
            changes = await self._on_reload()
        except ConfigError as error:
            door.send(session, wire.Error(id=reply_id, code=error.code, message=str(error), about="reload"))
        else:
            door.send(session, wire.Reloaded(id=reply_id, changes=changes))

    def _only_on_submit(self, door: Door, kind: str, request_id: str) -> None:
        if door is not self._doors.entrance(door).submit:
            text = f"{kind} belongs on the submit socket"
            raise ProtocolError("unsupported", text, field="type", request_id=request_id)

    def _greet(self, door: Door, session: Session, message: wire.Hello) -> None:
        tenant = self._reception.welcome(door, session, message)
        served = self.desk.served
        welcome = wire.Welcome(
            versions=(wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION),
            epoch=self._epoch,
            tenant=tenant.name,
            model=served.info.model if served else self._config.model.path,
            state=self._state,
            control=self._doors.entrance(door).control.endpoint,
            limits=limits(self._config.server, served.info if served else None),
        )
        door.send(session, welcome)

    @property
    def _state(self) -> str:
        """ "starting" until requests are taken: the tokenizer comes after the engine."""
        state = self._engine.snapshot.state
        return "starting" if state == "running" and self.desk.served is None else state

    def _status(self, tenant: TenantConfig, reply_id: str) -> wire.StatusReply:
        served = self.desk.served
        return status_reply(
            reply_id,
            tenant,
            config=self._config,
            state=self._state,
            epoch=self._epoch,
            info=served.info if served else None,
            at=self._engine.snapshot,
            now=self._loop.time(),
            started_at=self._started_at,
            generated_tokens=self.desk.generated_tokens,
            journal=self._journal.usage,
        )

    def _ping(self, door: Door, session: Session, reply_id: str) -> None:
        if self.desk.served is None:
            door.send(session, wire.Pong(id=reply_id, state=self._state))
            return
        if session.pings >= MAX_PINGS:
            raise ProtocolError("busy", f"{MAX_PINGS} pings are unanswered", request_id=reply_id)
        session.pings += 1

        def pong(to: Session) -> None:
            to.pings -= 1
            door.send(to, wire.Pong(id=reply_id, state=self._state))

        self._engine.ping(lambda: self._on_loop(pong, session))

    async def _beat(self) -> None:
        """Show every client once a heartbeat that we live; sending is also how vanished ones are noticed."""
        interval = self._config.server.heartbeat_ms / 1000
        while True:
            await asyncio.sleep(interval)
            quiet_since = self._loop.time() - interval
            self.desk.expire()
            for session in self._clients:
                self.desk.keep_alive(session, quiet_since)
            for door in self._doors:
                door.shut_strangers()
                for session in tuple(door.clients):
                    if session.sent_at <= quiet_since and not session.outbox:
                        door.send(session, wire.KeepAlive(state="idle"))
            self._recorder.clients(len(self._clients), self._doors.buffered_bytes)

    @property
    def _clients(self) -> tuple[Session, ...]:
        """Those that may have requests."""
        return tuple(session for door in self._doors.submits for session in door.clients)


def _check_operator(tenant: TenantConfig, request_id: str) -> None:
    """Raises ProtocolError."""
    if not tenant.operator:
        text = f"tenant {tenant.name!r} is not an operator"
        raise ProtocolError("forbidden", text, request_id=request_id)
