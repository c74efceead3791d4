"""The command `mlxd`, which is `python -m mlxd.scheduler`, too."""

import os
import signal
import sys

from mlxd.scheduler.exit_codes import EXIT_INTERRUPTED
from mlxd.scheduler.standard_streams import open_standard_streams


def main() -> None:
    """Run one verb and exit with its code."""
    open_standard_streams()
    at_ctrl_c = signal.getsignal(signal.SIGINT)
    _leave_at_ctrl_c()  # the imports take long enough to be interrupted
    from mlxd.scheduler.cli import run

    try:
        signal.signal(signal.SIGINT, at_ctrl_c)
        exit_code = run(sys.argv[1:])
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    _leave_at_ctrl_c()  # as does what Python has to do at its end
    sys.exit(exit_code)


def _leave_at_ctrl_c() -> None:
    """From here on Ctrl-C ends the process where it is, without a word; ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))


if __name__ == "__main__":
    main()
