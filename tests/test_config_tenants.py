"""Tenants in the deployment file: names, credentials and weights."""

import re

import pytest
from config_text import HASH, error_of, with_section

from mlxd.scheduler.config import Config, CurveConfig

OTHER_HASH = "1" * 64
KEY = "0" * 40


def test_tenant_names_and_tokens_are_unique() -> None:
    def tenants(*pairs: tuple[str, str]) -> str:
        lines = [f"  - {{name: {name}, token_sha256: '{digest}'}}" for name, digest in pairs]
        return "version: 1\ntenants:\n" + "\n".join(lines)

    assert (
        error_of(tenants(("a", HASH), ("a", OTHER_HASH)))
        == "x.yaml:4: tenants[1].name is 'a'; tenants[0] has that name"
    )
    same_token = error_of(tenants(("a", HASH), ("b", HASH)))
    assert same_token == "x.yaml:4: tenants[1].token_sha256 is that of tenants[0]; tokens must differ"


@pytest.mark.parametrize("value", ["hunter2", "[hunter2]"])
def test_a_token_in_place_of_its_hash_is_not_repeated(value: str) -> None:
    message = error_of(f"version: 1\ntenants: [{{name: a, token_sha256: {value}}}]")
    assert re.search(r"token_sha256(\[0\])? has a wrong value", message)
    assert "hunter2" not in message


def test_a_tenant_may_have_two_tokens_or_keys_while_one_is_replaced() -> None:
    text = (
        f"version: 1\ntenants: [{{name: a, token_sha256: ['{HASH}', '{OTHER_HASH}'], public_key: '{KEY}'}}]"
    )
    (tenant,) = Config.parse(text).tenants
    assert (tenant.token_hashes, tenant.public_keys) == ((HASH, OTHER_HASH), (KEY,))


@pytest.mark.parametrize(
    ("credential", "sentence"),
    [
        ("token_sha256: []", "token_sha256 has a wrong value; it must be the quoted 64 hex digits that"),
        (f"token_sha256: ['{HASH}', '{HASH}']", "token_sha256 is that of tenants[0]; tokens must differ"),
        (
            "public_key: short",
            "public_key is 'short'; it must be the quoted 40 characters that `mlxd keys new`",
        ),
        (f"public_key: ['{KEY}', '{KEY}']", "public_key is that of tenants[0]; keys must differ"),
        (f"public_key: '{'#' * 40}'", f"public_key is '{'#' * 40}'; it is no key: Z85 text of 32 bytes"),
        (f"public_key: '{KEY}'", "token_sha256 is missing"),
    ],
)
def test_credentials_that_are_none_are_named(credential: str, sentence: str) -> None:
    if "token" not in credential and "missing" not in sentence:
        credential += f", token_sha256: '{HASH}'"
    text = f"version: 1\ntenants: [{{name: a, {credential}}}]"
    assert f"tenants[0].{sentence}" in error_of(text)


CURVE = "server: {curve: {secret_key_file: /k, submit: 'tcp://0.0.0.0:1', control: 'tcp://0.0.0.0:2'}}"


def test_with_curve_a_tenant_has_a_key_or_a_token() -> None:
    tenants = f"version: 1\ntenants: [{{name: a, public_key: '{KEY}'}}, {{name: b"
    config = Config.parse(f"{tenants}, token_sha256: '{HASH}'}}]\n{CURVE}")
    assert config.server.curve == CurveConfig(
        secret_key_file="/k", submit="tcp://0.0.0.0:1", control="tcp://0.0.0.0:2"
    )
    message = error_of(f"{tenants}}}]\n{CURVE}")
    assert message == "x.yaml:2: tenants[1].token_sha256 is missing, and public_key, too"
    assert error_of(f"{tenants}}}]") == "x.yaml:2: tenants[0].token_sha256 is missing"


@pytest.mark.parametrize(
    ("submit", "sentence"),
    [
        ("ipc:///tmp/x", "server.curve.submit is 'ipc:///tmp/x'; it must be tcp://HOST:PORT"),
        (
            "tcp://0.0.0.0:2",
            "server.curve.control is 'tcp://0.0.0.0:2'; it must differ from server.curve.submit",
        ),
        ("tcp://127.0.0.1:9464", "server.metrics is '127.0.0.1:9464'; server.curve.submit has that port"),
    ],
)
def test_encrypted_sockets_are_tcp_and_have_addresses_of_their_own(submit: str, sentence: str) -> None:
    curve = f"{{secret_key_file: /k, submit: '{submit}', control: 'tcp://0.0.0.0:2'}}"
    assert error_of(with_section(f"server: {{curve: {curve}}}")) == f"x.yaml:4: {sentence}"


@pytest.mark.parametrize("weight", ["0", "-1", ".nan", "1e9", "'3'"])
def test_weights_are_positive_and_bounded(weight: str) -> None:
    text = f"version: 1\ntenants: [{{name: a, token_sha256: '{HASH}', weight: {weight}}}]"
    assert "tenants[0].weight is" in error_of(text)
