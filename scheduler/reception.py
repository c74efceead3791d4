"""Who a client is, from its hello until its credential is withdrawn."""

import asyncio
import math
from collections.abc import Callable, Sequence

from mlxd.scheduler import messages as wire
from mlxd.scheduler.bad_frames import BadFrames
from mlxd.scheduler.config import TenantConfig
from mlxd.scheduler.credentials import Credentials
from mlxd.scheduler.door import Door
from mlxd.scheduler.errors import ProtocolError, RevokedError, UnauthenticatedError
from mlxd.scheduler.refusals import LAST_WORDS_S
from mlxd.scheduler.session import Session

FAREWELL_S = 5.0
"""Most time that requests get to end, once their client's credential is withdrawn."""
_POLL_S = 0.05


class Reception:
    """Runs on the asyncio thread.

    `end_requests` begins to end those of a session with an outcome.
    """

    def __init__(
        self,
        tenants: Sequence[TenantConfig],
        bad_frames: BadFrames,
        end_requests: Callable[[Session, str], None],
    ) -> None:
        self._credentials, self._num_tenants = Credentials(tenants), len(tenants)
        self._bad_frames = bad_frames
        self._end_requests = end_requests
        self._loop = asyncio.get_running_loop()

    def may_enter(self, key: str) -> bool:
        """Whether a client with this public key may connect."""
        if self._credentials.knows_key(key):
            return True
        self._bad_frames.count("unauthenticated")
        return False

    def welcome(self, door: Door, session: Session, hello: wire.Hello) -> TenantConfig:
        """Make it a client of `door`.

        Raises:
            UnauthenticatedError: it shows no tenant's credential.
            ProtocolError: "forbidden" or "too_many_clients".
        """
        proof = self._credentials.proof_of(session.key, hello.token)
        tenant = self._credentials.tenant_of(proof)
        if tenant is None:
            raise UnauthenticatedError
        if session.tenant not in (None, tenant):
            raise ProtocolError("forbidden", "this connection belongs to another tenant")
        if hello.tenant not in ("", tenant.name):
            raise ProtocolError("forbidden", "this credential belongs to another tenant", field="tenant")
        door.admit(session, tenant, proof, others_without=self._others_without(door, tenant))
        return tenant

    def _others_without(self, door: Door, tenant: TenantConfig) -> int:
        """Tenants that have no client at `door`, where this one has."""
        present = {session.tenant.name for session in door.clients if session.tenant is not None}
        return max(0, self._num_tenants - len(present)) if tenant.name in present else 0

    def update(self, tenants: Sequence[TenantConfig], doors: Sequence[Door]) -> None:
        """Take new tenants. Clients whose credential is none any more are told so and closed."""
        self._credentials, self._num_tenants = Credentials(tenants), len(tenants)
        withdrawn = [
            (door, session) for door in doors for session in door.clients if not self._keeps(session)
        ]
        for _, session in withdrawn:
            session.patience.deaf_until = math.inf
            self._end_requests(session, "revoked")
        self._loop.call_later(_POLL_S, self._see_off, withdrawn, self._loop.time() + FAREWELL_S)

    def _keeps(self, session: Session) -> bool:
        """Whether it is still of the tenant that it was of; it takes what the tenant may have now."""
        assert session.tenant is not None, "clients are somebody"
        tenant = self._credentials.holder_of(session.proof)
        if tenant is None or tenant.name != session.tenant.name:
            return False
        session.tenant = tenant
        return True

    def _see_off(self, clients: Sequence[tuple[Door, Session]], deadline: float) -> None:
        """Close these once their requests have ended, or at the deadline.

        Who has several connections gives them all up when one is closed, so all go together, after the
        requests' last words.
        """
        if any(session.requests for _, session in clients) and self._loop.time() < deadline:
            self._loop.call_later(_POLL_S, self._see_off, clients, deadline)
            return
        error = RevokedError()
        for door, session in clients:
            door.send(session, wire.Error(code=error.code, message=str(error)))
            self._loop.call_later(LAST_WORDS_S, door.lose, session)
