"""How benchmarks end: what their user can mend is one line, without a traceback."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mlxd.batching.errors import MlxdError
from mlxd.scheduler.standard_streams import flush_or_drop_stdout

_FAILED, _INTERRUPTED = 1, 130


class BenchmarkError(Exception):
    """What the user can mend: one line that names place, value and limit."""


def run(main: Callable[[], None]) -> None:
    """Run a script's `main`; its errors, Ctrl-C and a reader that has gone end the process in order."""
    try:
        main()
        sys.stdout.flush()
    except (BenchmarkError, MlxdError) as error:
        flush_or_drop_stdout()
        _fail(str(error))
    except BrokenPipeError:
        flush_or_drop_stdout()
        sys.exit(_FAILED)
    except OSError as error:
        flush_or_drop_stdout()
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _fail(message: str) -> NoReturn:
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")


def require(*modules: str) -> None:
    """Raises BenchmarkError: one of them is not installed."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise BenchmarkError(f"needs {name}, which is not installed")
