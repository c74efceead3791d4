"""Makes `mlxd` importable from a bare checkout; an installed package is used as it is.

Where CI is set, hypothesis draws the same examples each time: a run that fails, fails again.
"""

import os
import sys
import types
from pathlib import Path

import pytest
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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which nobody writes to."""
    from daemon_process import write_tiny_model  # imports MLX, which most tests do without

    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder
