"""A Unix socket in front of a daemon's, whose connections a test can cut."""

import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self


class Relay:
    """Passes bytes on in both directions, from `__enter__` to `__exit__`."""

    def __init__(self, folder: Path, to: str) -> None:
        self.endpoint = f"ipc://{folder}/relay"
        self._to = to.removeprefix("ipc://")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.endpoint.removeprefix("ipc://"))
        self._listener.listen()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def cut(self) -> None:
        """Close all connections there are; new ones may be made."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._to)
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    thread = threading.Thread(target=_pass_on, args=(source, sink))
                    self._threads.append(thread)
                    thread.start()

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
