"""What `mlxd.scheduler` offers, and what it imports for it."""

import subprocess
import sys

import pytest

from mlxd.scheduler.config import Config
from mlxd.scheduler.engine import Engine


def test_importing_a_client_imports_neither_the_engine_nor_mlx() -> None:
    code = (
        "import sys; from mlxd.scheduler import Client, SamplingParams, errors;"
        "print([m for m in ('mlx', 'mlx.core', 'mlxd.scheduler.engine') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_package_offers_its_names_and_no_others() -> None:
    import mlxd.scheduler as package

    assert package.Engine is Engine
    assert package.Config is Config
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = package.Nothing
