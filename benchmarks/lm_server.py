"""`mlx_lm.server` as a process of its own, and a client of it.

    python benchmarks/lm_server.py PEAK_FILE --model FOLDER --port 8080 ...

Run so, it is that server with the BLAS that mlxd uses, and takes its options, of which `--model` must be
there; when it ends it writes the most memory that MLX held, in bytes, to a file.
"""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import entry
from options import Parser
from servers import Piece

_HOST = "127.0.0.1"
_LOOK_INTERVAL_S = 0.2
_LONGEST_LINE = 2**20


class LmServer:
    """Serves from `start` to `end`."""

    name = "mlx_lm.server"

    def __init__(self, folder: Path, model: Path, max_rows: int) -> None:
        """`folder`: where it writes its log and its peak of memory."""
        with socket.create_server((_HOST, 0)) as free:
            self._port = free.getsockname()[1]
        self._peak, self._log = folder / "peak", folder / "mlx_lm.server.log"
        self._command = [sys.executable, __file__, str(self._peak), "--model", str(model)]
        self._command += ["--host", _HOST, "--port", str(self._port), "--log-level", "WARNING"]
        self._command += ["--decode-concurrency", str(max_rows)]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns when it takes requests; the first one may wait for the model."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log, start_new_session=True
            )
        while not await self._is_healthy():
            if self._process.returncode is not None:
                raise entry.BenchmarkError(f"mlx_lm.server ended: {self._last_words()}")
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def _last_words(self) -> str:
        lines = self._log.read_text().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")

    async def _is_healthy(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(_HOST, self._port)
        except OSError:
            return False
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        status = await reader.readline()
        writer.close()
        return b" 200 " in status

    async def stream(self, prompt: str, num_tokens: int) -> AsyncIterator[Piece]:
        request = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(request).encode()
        reader, writer = await asyncio.open_connection(_HOST, self._port, limit=_LONGEST_LINE)
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            while (line := await reader.readline()) and line != b"data: [DONE]\n":
                if line.startswith(b"data: "):
                    yield _piece(json.loads(line.removeprefix(b"data: ")))
        finally:
            writer.close()

    async def end(self) -> int:
        """The most memory that MLX held, in bytes."""
        if self._process is None:
            return 0
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()
        return int(self._peak.read_text()) if self._peak.exists() else 0


def _piece(message: dict[str, object]) -> Piece:
    match message:
        case {"choices": [{"text": str(text)}, *_]}:
            return Piece(text)
        case {"usage": {"prompt_tokens": int(prompt), "completion_tokens": int(output)}}:
            return Piece("", prompt, output)
    raise entry.BenchmarkError(f"mlx_lm.server sent {message}")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("peak_file", type=Path, help="gets the most memory that MLX held")
    parser.add_argument("--model", required=True, help="a model folder")
    options, others = parser.parse_known_args()
    sys.argv[1:] = ["--model", options.model, *others]
    from mlxd.batching.blas import ensure_blas

    ensure_blas()  # before anything imports mlx
    import mlx.core as mx
    from mlx_lm import server

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server.main()
    options.peak_file.write_text(str(mx.get_peak_memory()))


if __name__ == "__main__":
    entry.run(main)
