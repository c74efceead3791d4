"""Makes `mlxd` importable from a bare checkout; an installed package is used as it is.

Where CI is set, hypothesis draws the same examples each time: a run that fails, fails again.
"""

import os
import sys
import types
from pathlib import Path

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

try:
    import mlxd.scheduler  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("mlxd", "mlxd.scheduler"):
        raise
    package = types.ModuleType("mlxd")
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["mlxd"] = package
