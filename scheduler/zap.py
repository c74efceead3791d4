"""Which CURVE keys may connect: libzmq asks, over ZAP (ZeroMQ RFC 27)."""

from collections.abc import Callable
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.utils import z85

ZAP_DOMAIN = b"mlxd"

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_ALLOWED = b"200"
_REFUSED = b"400"


class _Request(NamedTuple):
    version: bytes
    request_id: bytes
    domain: bytes
    address: bytes
    routing_id: bytes
    mechanism: bytes
    key: bytes


class Gatekeeper:
    """Answers for all CURVE sockets of a context; a key that may enter becomes its connection's User-Id.

    libzmq has made sure by then that the client holds the key's secret half.

    `may_enter` is told a public key, as Z85, on the loop's thread.
    """

    def __init__(self, context: zmq.asyncio.Context, may_enter: Callable[[str], bool]) -> None:
        """To be made before the sockets are bound: without it they let nobody in."""
        self._may_enter = may_enter
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ENDPOINT)

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self._socket.send_multipart(self._answer(await self._socket.recv_multipart()))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        request = _Request(*frames)  # libzmq asks, so the frames are right
        assert (request.version, request.mechanism, request.domain) == (_VERSION, b"CURVE", ZAP_DOMAIN)
        key = z85.encode(request.key).decode()
        if self._may_enter(key):
            return [_VERSION, request.request_id, _ALLOWED, b"", key.encode(), b""]
        return [_VERSION, request.request_id, _REFUSED, b"", b"", b""]

    def close(self) -> None:
        self._socket.close(linger=0)
