"""Makes `mlxd` importable from a bare checkout; an installed package is used as it is."""

import sys
import types
from pathlib import Path

try:
    import mlxd.scheduler  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("mlxd", "mlxd.scheduler"):
        raise
    package = types.ModuleType("mlxd")
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["mlxd"] = package
