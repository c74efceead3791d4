"""What the daemon remembers of one peer of one socket."""

from collections import deque
from dataclasses import dataclass, field

from mlxd.scheduler.config import TenantConfig
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.protocol import Encoding

BAD_FRAME_BURST = 20
BAD_FRAMES_PER_S = 10.0
DEAF_S = 1.0
LOGIN_DELAY_S = 0.1
MAX_LOGIN_DELAY_S = 5.0


@dataclass(slots=True)
class Patience:
    """Slows a peer that sends what it should not: until `deaf_until` its frames are dropped unread."""

    deaf_until: float = 0.0
    _allowance: float = BAD_FRAME_BURST
    _updated_at: float = 0.0
    _failed_logins: int = 0

    def take_bad_frame(self, now: float) -> bool:
        """Whether this one still gets its own answer; False makes the peer unheard for DEAF_S."""
        earned = (now - self._updated_at) * BAD_FRAMES_PER_S
        self._allowance = min(BAD_FRAME_BURST, self._allowance + earned) - 1
        self._updated_at = now
        if self._allowance >= 0:
            return True
        self.deaf_until = now + DEAF_S
        return False

    def take_failed_login(self, now: float) -> float:
        """Seconds until the answer; the peer is unheard so long. Doubles with each failure."""
        delay = min(MAX_LOGIN_DELAY_S, LOGIN_DELAY_S * 2.0 ** min(self._failed_logins, 10))
        self._failed_logins += 1
        self.deaf_until = now + delay
        return delay


@dataclass(slots=True, eq=False)
class Session:
    """One connection, from accept to close; a reconnected client is a new one.

    Attributes:
        peer: the routing id that replies go to; empty until its first message.
        fd: libzmq's file descriptor of the connection.
        opened_at: when it was accepted.
        key: the public key that its CURVE handshake proved, as Z85; empty where nothing encrypts.
        proof: what showed its tenant: the key, or its token's hash.
        tenant: None until its hello was good.
        encoding: of its latest frame; replies use it too.
        gone: the connection is closed, or about to be; nothing is sent or read any more.
        lost: the door has forgotten it.
        slow: it left `max_client_buffer_bytes` unread; until it has read all it gets terminal messages only.
        sent_at: when it last was sent anything.
        outbox: frames its connection did not take yet, oldest first.
        requests: its open requests.
        pings: asked of the scheduler and not answered yet.
    """

    peer: bytes = b""
    fd: int = -1
    opened_at: float = 0.0
    key: str = ""
    proof: str = ""
    tenant: TenantConfig | None = None
    encoding: Encoding = "msgpack"
    gone: bool = False
    lost: bool = False
    slow: bool = False
    sent_at: float = 0.0
    outbox: deque[bytes] = field(default_factory=deque)
    outbox_bytes: int = 0
    requests: set[RequestKey] = field(default_factory=set)
    pings: int = 0
    patience: Patience = field(default_factory=Patience)
