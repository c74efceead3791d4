"""HTTP door for Prometheus and health probes, on threads of its own: it answers while the engine hangs."""

import json
import logging
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from threading import Condition, Thread

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from mlxd.metrics.health import Health

logger = logging.getLogger(__name__)

_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_MAX_CONNECTIONS = 32
_DEADLINE_S = 5.0
_CLOSE_TIMEOUT_S = 5.0
_POLL_S = 0.1

_Request = socket.socket | tuple[bytes, socket.socket]


class ExporterError(Exception):
    """The address cannot be served; the message names it and says why."""


class Exporter:
    """Serves `/metrics` and `/healthz` from construction until `close`.

    Args:
        address: "host:port" or "[v6]:port"; port 0 takes a free one.
        registry: what `/metrics` shows.
        health: asked at each `/healthz`, on an exporter thread; must not wait for the engine.

    Attributes:
        port: the port bound.

    Raises:
        ExporterError: the address is malformed, unknown or taken.
    """

    def __init__(self, address: str, registry: CollectorRegistry, health: Callable[[], Health]) -> None:
        self._server = _bind(address, registry, health)
        self.port: int = self._server.server_address[1]
        self._thread = Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="mlxd-exporter", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, cut open connections off, free the port. A second call does nothing."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.cut_off()


def _bind(address: str, registry: CollectorRegistry, health: Callable[[], Health]) -> "_Server":
    host, port = _split(address)
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _Server(family, (host, port), registry, health)
    except OSError as error:
        raise ExporterError(f"cannot serve metrics at {address!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise ExporterError(f"metrics address {address!r} has no valid host name: {error}") from error


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host:
        raise ExporterError(f"metrics address {address!r} is not host:port")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ExporterError(f"metrics address {address!r} has port {port!r}; it must be 0 to 65535")
    return host, int(port)


class _Server(ThreadingMixIn, TCPServer):
    """A daemon thread a connection, each for `_DEADLINE_S` at most.

    With `_MAX_CONNECTIONS` open the oldest makes way for a new one: who sends nothing shuts nobody out.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _MAX_CONNECTIONS

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        registry: CollectorRegistry,
        health: Callable[[], Health],
    ) -> None:
        self.address_family = family
        self.registry = registry
        self.health = health
        self._open: dict[socket.socket, float] = {}
        self._ending: set[socket.socket] = set()
        self._changed = Condition()
        super().__init__(address, _Handler)

    def verify_request(self, request: _Request, client_address: object) -> bool:
        assert isinstance(request, socket.socket)
        with self._changed:
            if len(self._ending) >= _MAX_CONNECTIONS:
                return False
            if len(self._open) >= _MAX_CONNECTIONS:
                self._end(next(iter(self._open)))
            self._open[request] = time.monotonic()
            return True

    def service_actions(self) -> None:
        """Called by `serve_forever` once a connection and once a poll."""
        with self._changed:
            opened_before = time.monotonic() - _DEADLINE_S
            for connection in [c for c, opened_at in self._open.items() if opened_at < opened_before]:
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """Its thread sees the end of the stream and closes it."""
        del self._open[connection]
        self._ending.add(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def close_request(self, request: _Request) -> None:
        with self._changed:
            assert isinstance(request, socket.socket)
            self._open.pop(request, None)
            self._ending.discard(request)
            self._changed.notify_all()
        super().close_request(request)

    def cut_off(self) -> None:
        """Shut open connections and wait for their threads to let go."""
        with self._changed:
            for connection in tuple(self._open):
                self._end(connection)
            self._changed.wait_for(lambda: not self._ending, _CLOSE_TIMEOUT_S)

    def handle_error(self, request: _Request, client_address: object) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            logger.debug("metrics client went away client=%s error=%s", client_address, error)
        else:
            logger.error("metrics request failed client=%s", client_address, exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request, then closes the connection."""

    server: _Server
    server_version = "mlxd"
    sys_version = ""
    timeout = _DEADLINE_S

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer(200, _TEXT_FORMAT, generate_latest(self.server.registry))
            case "/healthz":
                health = self.server.health()
                body = json.dumps(health.as_dict()).encode() + b"\n"
                self._answer(200 if health.ok else 503, "application/json", body)
            case _:
                self._answer(404, "text/plain", b"not found: there are /metrics and /healthz\n")

    do_HEAD = do_GET

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)
