"""Reading the deployment file."""

import os
from pathlib import Path

import pytest

from mlxd.scheduler.config import Config
from mlxd.scheduler.document import MAX_BYTES
from mlxd.scheduler.errors import ConfigError

MINIMAL = "version: 1\ntenants: [{name: acme, token_sha256: '" + "0" * 64 + "'}]\n"


def test_files_that_cannot_be_read_get_one_line(tmp_path: Path) -> None:
    (tmp_path / "latin1.yaml").write_bytes(b"# caf\xe9\n")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    for name, reason in {
        "missing.yaml": "cannot be read: No such file or directory",
        ".": "cannot be read: Is a directory",
        "a\0b": "cannot be read: embedded null byte",
        "latin1.yaml": "byte 5 is not UTF-8",
        "huge.yaml": f"cannot be read: it has more than {MAX_BYTES} bytes, the limit",
    }.items():
        with pytest.raises(ConfigError) as caught:
            Config.load(f"{tmp_path}/{name}")
        assert str(caught.value) == f"{tmp_path}/{name}: {reason}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mlxd.yaml"
    path.write_text(MINIMAL)
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        Config.load(path)


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "mlxd.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert Config.load(path).version == 1
