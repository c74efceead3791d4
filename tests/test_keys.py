"""Keys in files: who may read them, and what is told where one is no good."""

import re
from pathlib import Path

import pytest
import zmq
import zmq.utils.z85
from hypothesis import given
from hypothesis import strategies as st

from mlxd.batching.errors import SettingError
from mlxd.scheduler import cli
from mlxd.scheduler.config import Config, CurveConfig
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.keys import KeyPair, read_keys, read_public_key, server_keys, write_keys
from mlxd.scheduler.z85 import KEY_LENGTH, is_key

Run = pytest.CaptureFixture[str]
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def curve(path: Path) -> CurveConfig:
    return CurveConfig(secret_key_file=str(path), submit="tcp://127.0.0.1:1", control="tcp://127.0.0.1:2")


def test_what_was_written_is_read_and_the_secret_is_its_owners_alone(tmp_path: Path) -> None:
    keys = KeyPair.make()
    secret, public = write_keys(tmp_path, "acme", keys)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert read_keys(secret) == keys
    assert read_public_key(public) == keys.public
    assert keys.secret not in repr(keys)
    assert KeyPair.make() != keys


def test_no_file_is_overwritten_and_no_half_is_left(tmp_path: Path) -> None:
    (tmp_path / "acme.pub").write_text("mine")
    with pytest.raises(ConfigError, match=r"acme\.pub: cannot be made: File exists"):
        write_keys(tmp_path, "acme", KeyPair.make())
    assert [path.name for path in tmp_path.iterdir()] == ["acme.pub"]
    (tmp_path / "beta.key").write_text("mine")
    with pytest.raises(ConfigError, match=r"beta\.key: cannot be made: File exists"):
        write_keys(tmp_path, "beta", KeyPair.make())
    with pytest.raises(ConfigError, match=r"the tenant's name is '\.\./x'"):
        write_keys(tmp_path, "../x", KeyPair.make())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_secret_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    secret, _ = write_keys(tmp_path, "acme", KeyPair.make())
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=f"acme.key: has mode 0{mode:o}, so others may .* must be 0600"):
        read_keys(secret)


@pytest.mark.parametrize("content", [b"", b"short\n", b"\xff" * 40, b"#" * 40, b"0" * 40 + b"\n" + b"0" * 40])
def test_a_file_without_one_key_is_refused_and_not_repeated(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "k"
    path.write_bytes(content)
    path.chmod(0o600)
    for read in (read_keys, read_public_key):
        with pytest.raises(ConfigError, match="k: holds no key: one line of 40 characters of Z85"):
            read(path)
    with pytest.raises(ConfigError, match="k2: cannot be read: No such file"):
        read_keys(tmp_path / "k2")


def test_the_daemons_key_file_is_named_by_its_setting(tmp_path: Path) -> None:
    keys = KeyPair.make()
    secret, public = write_keys(tmp_path, "server", keys)
    assert server_keys(curve(secret)) == keys
    public.chmod(0o644)
    with pytest.raises(
        SettingError, match=r"^server\.curve\.secret_key_file is '.*server\.pub': has mode 0644"
    ):
        server_keys(curve(public))


def test_printed_lines_fit_the_configuration(tmp_path: Path, capsys: Run) -> None:
    assert cli.run(["keys", "new", "acme", "--out", str(tmp_path)]) == 0
    tenant = capsys.readouterr()
    assert cli.run(["keys", "new", "server", "--server", "--out", str(tmp_path)]) == 0
    server = capsys.readouterr()
    config = Config.parse(f"version: 1\ntenants:\n{tenant.out}\n{server.out}")
    assert config.tenants[0].public_key == read_public_key(tmp_path / "acme.pub")
    assert config.server.curve is not None
    assert server_keys(config.server.curve) == read_keys(tmp_path / "server.key")
    assert read_keys(tmp_path / "acme.key").secret not in tenant.out + tenant.err
    assert re.fullmatch(r"made \S+acme.key, which stays secret, and \S+acme.pub\n", tenant.err)


@given(st.binary(min_size=32, max_size=32))
def test_every_32_bytes_are_a_key(raw: bytes) -> None:
    assert is_key(zmq.utils.z85.encode(raw).decode())


@given(st.text(Z85, min_size=KEY_LENGTH, max_size=KEY_LENGTH))
def test_a_text_is_a_key_if_libzmq_reads_it(text: str) -> None:
    try:
        zmq.curve_public(text.encode())
    except zmq.ZMQError:
        assert not is_key(text)
    else:
        assert is_key(text)
