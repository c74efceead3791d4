"""The deployment file: what it may say, and the one line an error is."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from config_text import HASH, MINIMAL, TENANTS, error_of, with_section
from hypothesis import given
from hypothesis import strategies as st

from mlxd.scheduler.config import (
    CacheConfig,
    Config,
    DiskConfig,
    JournalConfig,
    ModelConfig,
    ServerConfig,
    TenantConfig,
)
from mlxd.scheduler.document import parse_document
from mlxd.scheduler.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def test_two_settings_suffice() -> None:
    config = Config.parse(MINIMAL)
    assert config == Config(version=1, tenants=(TenantConfig(name="acme", token_sha256=HASH),))


def test_the_example_file_shows_every_setting_and_most_at_their_defaults() -> None:
    text = (ROOT / "deploy/mlxd.yaml").read_text()
    example = Config.parse(text)
    acme, ops = (tenant.token_sha256 for tenant in example.tenants)
    tenants = (
        TenantConfig(name="acme", token_sha256=acme),
        TenantConfig(name="ops", token_sha256=ops, operator=True),
    )
    assert example == Config(version=1, tenants=tenants, cache=CacheConfig(budget="2GiB"))
    every_setting = msgspec.json.decode(msgspec.json.encode(example))
    assert parse_document(text, "mlxd.yaml").data == every_setting


@pytest.mark.parametrize("path", sorted(ROOT.glob("deploy/*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    assert Config.load(path).tenants


def test_on_and_off_are_text() -> None:
    assert Config.parse(with_section("decode: {compile: off}")).decode.compile == "off"
    assert Config.parse(with_section("decode: {compile: on}")).decode.compile == "on"


def test_whole_numbers_serve_as_fractions_of_seconds() -> None:
    assert Config.parse(with_section("server: {drain_timeout_s: 3}")).server.drain_timeout_s == 3.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("cach: {}", "x.yaml:4: cach is not a setting; did you mean cache?"),
        (
            "cache: {block: 3}",
            "x.yaml:4: cache.block is not a setting; known are budget, page_size, prefix, checkpoints, "
            "quantization, disk",
        ),
        (
            "cache:\n  page_size: 17",
            "x.yaml:5: cache.page_size is 17; it must be 16, 32, 64, 128, 256 or auto",
        ),
        (
            "cache: {page_size: '16'}",
            "x.yaml:4: cache.page_size is '16'; it must be 16, 32, 64, 128, 256 or auto",
        ),
        ("decode: {compile: no}", "x.yaml:4: decode.compile is 'no'; it must be auto, off or on"),
        (
            "scheduler: {max_rows: 0}",
            "x.yaml:4: scheduler.max_rows is 0; it must be an integer >= 1 and <= 1024",
        ),
        (
            "scheduler: {max_rows: true}",
            "x.yaml:4: scheduler.max_rows is true; it must be an integer >= 1 and <= 1024",
        ),
        (
            "scheduler: {max_rows: 2.5}",
            "x.yaml:4: scheduler.max_rows is 2.5; it must be an integer >= 1 and <= 1024",
        ),
        (
            "scheduler: {max_rows: 010}",
            "x.yaml:4: scheduler.max_rows is '010'; it must be an integer >= 1 and <= 1024",
        ),
        (
            "scheduler: {prefill_chunk: 3}",
            "x.yaml:4: scheduler.prefill_chunk is 3; it must be auto or an integer >= 16 and <= 65536",
        ),
        (
            "server: {drain_timeout_s: .inf}",
            "x.yaml:4: server.drain_timeout_s is '.inf'; it must be a number >= 0 and <= 86400",
        ),
        ("server: {drain_timeout_s: 1e999}", "x.yaml:4:27: 1e999 is not a finite number"),
        ("server: null", "x.yaml:4: server is null; it must be a map"),
        ("model: {path: ''}", "x.yaml:4: model.path is ''; it must be text of 1 or more characters"),
        ('model: {path: "a\\0b"}', "x.yaml:4:15: 'a\\x00b' has unprintable characters"),
        ("model: {path: 3}", "x.yaml:4: model.path is 3; it must be text of 1 or more characters"),
        (
            "cache: {quantization: {bits: 3}}",
            "x.yaml:4: cache.quantization.bits is 3; it must be 4 or 8",
        ),
        (
            "cache: {quantization: {}}",
            "x.yaml:4: cache.quantization.bits is missing",
        ),
        (
            "cache: {quantization: {bits: 8, group_size: 128}}",
            "x.yaml:4: cache.quantization.group_size is 128; it must be 32 or 64",
        ),
        (
            "cache: {quantization: {bits: 8, end: 0}}",
            "x.yaml:4: cache.quantization.end is not a setting; known are bits, group_size, start",
        ),
        (
            "cache: {quantization: {bits: 8, start: -1}}",
            "x.yaml:4: cache.quantization.start is -1; it must be an integer >= 0",
        ),
        (
            "cache: {quantization: {bits: 8}}\ndecode: {attention: gathered}",
            "x.yaml:5: decode.attention is 'gathered'; with cache.quantization pages are read where they lie",
        ),
        (
            "cache: {quantization: {bits: 8, start: 64}}\ndecode: {attention: kernel}",
            "x.yaml:5: decode.attention is 'kernel'; "
            "with cache.quantization.start above 0 pages are read in_place",
        ),
        (
            "cache: {disk: {path: /d, max_bytes: 1000}}",
            "x.yaml:4: cache.disk.max_bytes is 1000; "
            'it must be bytes from 1 MiB on (1073741824, "8GiB", "512MiB")',
        ),
        (
            "cache: {disk: {path: /d, max_bytes: 0.5}}",
            "x.yaml:4: cache.disk.max_bytes is 0.5; "
            'it must be bytes from 1 MiB on (1073741824, "8GiB", "512MiB")',
        ),
        (
            "cache: {disk: {path: ~nobody-here/d, max_bytes: 1GiB}}",
            "x.yaml:4: cache.disk.path is '~nobody-here/d'; there is no such home folder",
        ),
        ("cache: {disk: {path: /d}}", "x.yaml:4: cache.disk.max_bytes is missing"),
        (
            "cache: {disk: {path: prefixes, max_bytes: 1GiB}}",
            "x.yaml:4: cache.disk.path is 'prefixes'; it must be an absolute path of a folder",
        ),
        ("cache: {disk: /d}", "x.yaml:4: cache.disk is '/d'; it must be a map or null"),
        (
            "cache: {prefix: false, disk: {path: /d, max_bytes: 1GiB}}",
            "x.yaml:4: cache.disk needs cache.prefix: true",
        ),
        (
            "cache: {page_size: 32}\nscheduler: {prefill_chunk: 48}",
            "x.yaml:5: scheduler.prefill_chunk is 48; it must be a multiple of cache.page_size, 32",
        ),
        (
            "server: {control: 'ipc:///tmp/mlxd.sock'}",
            "x.yaml:4: server.control is 'ipc:///tmp/mlxd.sock'; it must differ from server.submit",
        ),
        (
            "server: {control: 'ipc:///tmp/../tmp/./mlxd.sock'}",
            "x.yaml:4: server.control is 'ipc:///tmp/../tmp/./mlxd.sock'; it must differ from server.submit",
        ),
        (
            "server: {submit: 'tcp://127.0.0.1:9464'}",
            "x.yaml:4: server.metrics is '127.0.0.1:9464'; server.submit has that port",
        ),
        (
            "server: {submit: 'tcp://0.0.0.0:7000'}",
            "x.yaml:4: server.submit is 'tcp://0.0.0.0:7000'; "
            "beyond loopback there are only the sockets of server.curve",
        ),
        (
            "server: {metrics: 'localhost'}",
            "x.yaml:4: server.metrics is 'localhost'; it must be HOST:PORT with a port from 0 to 65535",
        ),
        (
            "cache: {budget: true}",
            'x.yaml:4: cache.budget is true; it must be bytes from 1 MiB on (1073741824, "8GiB", "512MiB") '
            "or a fraction above 0 up to 1 (0.6)",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_line_and_limit(section: str, message: str) -> None:
    assert error_of(with_section(section)) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml: is empty"),
        ("# nothing\n", "x.yaml: is empty"),
        ("---\n", "x.yaml: the root is null; it must be a map of settings"),
        ("- a", "x.yaml: the root is a list of 1; it must be a map of settings"),
        ("3", "x.yaml: the root is 3; it must be a map of settings"),
        ("version: 1", "x.yaml: tenants is missing"),
        (TENANTS, "x.yaml: version is missing"),
        ("version: 2\n" + TENANTS, "x.yaml:1: version is 2; it must be 1"),
        (
            "version: 1\ntenants: []",
            "x.yaml:2: tenants is a list of 0; it must be a list of 1 to 10000 entries",
        ),
        ("version: 1\ntenants: {}", "x.yaml:2: tenants is a map; it must be a list of 1 to 10000 entries"),
        ("version: 1\ntenants: [3]", "x.yaml:2: tenants[0] is 3; it must be a map"),
        ("version: 1\ntenants: [{name: a}]", "x.yaml:2: tenants[0].token_sha256 is missing"),
        ("version: 1\nversion: 1", "x.yaml:2:1: duplicate key version"),
        ("1: a", "x.yaml:1:1: a key must be text"),
        ("? [a]\n: b", "x.yaml:1:3: a key must be text"),
        ("a: &x 1\nb: *x", "x.yaml:2:4: aliases are not supported"),
        ("a: " + "9" * 4097, "x.yaml:1:4: a value of more than 4096 characters"),
        (f"? {'k' * 4097}\n: 1", "x.yaml:1:3: a value of more than 4096 characters"),
        ("a: " + "9" * 1000 + ".5", f"x.yaml:1:4: {'9' * 60}... is not a finite number"),
        ("a: !!python/object:os.system {}", "x.yaml:1:4: tags are not supported"),
        ("a: " + "[" * 100_000, "x.yaml:1:19: nested more than 16 levels deep"),
        (
            "a:\n\tb: 1",
            "x.yaml:2:1: while scanning for the next token found character '\\t' that cannot start any token",
        ),
        (
            "a: 1\n---\nb: 1",
            "x.yaml:2:1: expected a single document in the stream but found another document",
        ),
        ("a: 'b", "x.yaml:1:6: while scanning a quoted scalar found unexpected end of stream"),
    ],
)
def test_a_text_that_is_no_configuration_gets_one_line(text: str, message: str) -> None:
    assert error_of(text) == message


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({"server": ServerConfig(submit="ipc:///\ud800")}, "server.submit"),
        ({"model": ModelConfig(path="\ud800")}, "model.path"),
        ({"cache": CacheConfig(disk=DiskConfig(path="/\ud800", max_bytes="1GiB"))}, "cache.disk.path"),
        ({"journal": JournalConfig(durability="accepted", path="/\ud800")}, "journal.path"),
    ],
)
def test_a_path_that_the_file_system_cannot_name_is_refused(section: dict[str, Any], place: str) -> None:
    tenants = (TenantConfig(name="a", token_sha256=HASH),)
    with pytest.raises(ConfigError, match=rf"config: {place} is '.*ud800'; file names are UTF-8 here"):
        Config(version=1, tenants=tenants, **section).check()


def test_a_configuration_made_in_python_is_held_to_the_same_rules() -> None:
    good = Config(version=1, tenants=(TenantConfig(name="a", token_sha256=HASH),))
    good.check()
    with pytest.raises(ConfigError, match=r"^config: tenants\[0\].weight is -1; it must be a number >="):
        Config(version=1, tenants=(TenantConfig(name="a", token_sha256=HASH, weight=-1),)).check()
    with pytest.raises(ConfigError, match=r"server.submit is 'inproc://x'"):
        Config(version=1, tenants=good.tenants, server=ServerConfig(submit="inproc://x")).check()


@given(st.text(max_size=60))
def test_any_text_is_a_configuration_or_one_line(text: str) -> None:
    for candidate in (text, with_section(text), with_section(f"model: {{path: {text}}}")):
        try:
            Config.parse(candidate, "x.yaml")
        except ConfigError as error:
            message = str(error)
            assert message.startswith("x.yaml")
            assert message.isprintable()


# YAML takes these for line breaks, which JSON's strings may hold as they are.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85\u2028\u2029"), max_size=5)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)  # JSON has no others
    | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
FIELDS = [
    (section.name, field.name)
    for section in msgspec.structs.fields(Config)
    if dataclasses.is_dataclass(section.type) or hasattr(section.type, "__struct_fields__")
    for field in msgspec.structs.fields(section.type)
]


@given(st.sampled_from(FIELDS), json_values)
def test_any_value_of_any_setting_is_accepted_or_named(place: tuple[str, str], value: object) -> None:
    section, field = place
    tenant = {"name": "a", "token_sha256": HASH}
    text = msgspec.json.encode({"version": 1, "tenants": [tenant], section: {field: value}}).decode()
    try:
        config = Config.parse(text, "x.yaml")
    except ConfigError as error:
        message = str(error)
        causes = (
            f"{section}.{field}",
            "unprintable",
            "no character of YAML",
            "duplicate key",
            "a key must be text",
        )
        assert any(cause in message for cause in causes)
    else:
        assert getattr(getattr(config, section), field) == value
