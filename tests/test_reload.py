"""Tenants change while the daemon runs: all that the file says, or nothing."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from curve_daemon import KEYS, CurveDaemon, KeyPeer, curve_config
from fault_process import durable_config
from scheduling import World, make_config, make_tenant, submission
from wire_daemon import Daemon, Peer, config, runner, token, wait_until

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.config import Config, TenantConfig
from mlxd.scheduler.errors import RevokedError
from mlxd.scheduler.keys import KeyPair
from mlxd.scheduler.reload import tenant_changes
from mlxd.scheduler.tokens import token_hash

FOREVER = {"max_tokens": 4000, "ignore_eos": True}


class Reloadable:
    """A daemon, its file, and an operator."""

    def __init__(self, daemon: Daemon, path: Path) -> None:
        self.daemon = daemon
        self.path = path
        self.config = daemon.config

    def write(self, changed: Config) -> None:
        self.path.write_bytes(msgspec.json.encode(changed))

    def reload(self, *tenants: TenantConfig) -> dict[str, Any]:
        """The reply, with these tenants in the file."""
        self.write(msgspec.structs.replace(self.config, tenants=tenants))
        with self.daemon.control("admin") as admin:
            return admin.ask("reload", id="now")

    def tenant(self, name: str, **changes: Any) -> TenantConfig:
        (found,) = (tenant for tenant in self.config.tenants if tenant.name == name)
        return msgspec.structs.replace(found, **changes)

    def all_but(self, *names: str) -> Sequence[TenantConfig]:
        return [tenant for tenant in self.config.tenants if tenant.name not in names]


@contextmanager
def reloadable(
    folder: Path, *, curve: bool = False, step_s: float = 0.002, settings: Config | None = None
) -> Iterator[Reloadable]:
    path = folder / "mlxd.yaml"
    chosen, kind = (curve_config(folder), CurveDaemon) if curve else (settings or config(folder), Daemon)
    with kind(chosen, runner(step_s), path=path) as daemon:
        daemon.wait_ready()
        yield Reloadable(daemon, path)


def key_peer(it: Reloadable, keys: str | KeyPair) -> KeyPeer:
    """Before its hello; with a tenant's keys, or others."""
    assert it.config.server.curve is not None
    return KeyPeer(it.config.server.curve.submit, KEYS[keys] if isinstance(keys, str) else keys)


def assert_closed(peer: Peer) -> None:
    """The daemon says why, then closes; whatever comes after that is from a stranger."""
    assert peer.receive()["code"] == "revoked"

    def is_stranger() -> bool:
        peer.send("ping")
        return not peer.is_silent() and peer.receive_any().get("code") == "unauthenticated"

    wait_until(is_stranger)


def test_a_new_tenant_gets_in_and_one_that_is_gone_ends_alone(tmp_path: Path) -> None:
    newcomer = TenantConfig(name="gamma", token_sha256=token_hash(token("gamma")))
    with reloadable(tmp_path) as it, it.daemon.submit("acme") as acme, it.daemon.submit("beta") as beta:
        for peer in (acme, beta):
            peer.send("generate", id="r", prompt="hi", sampling=FOREVER)
            assert [peer.receive()["type"] for _ in range(2)] == ["accepted", "chunk"]
        reply = it.reload(*it.all_but("acme"), newcomer)
        assert (reply["type"], reply["changes"]) == ("reloaded", ["acme: removed", "gamma: added"])
        *chunks, end = acme.until_terminal("r")
        assert (end["type"], end["code"]) == ("error", "revoked")
        assert {message["type"] for message in chunks} <= {"chunk"}
        assert_closed(acme)
        assert acme.ask("hello", v=1, token=token("acme"))["code"] == "unauthenticated"
        assert beta.receive()["type"] == "chunk"
        with it.daemon.submit("gamma") as gamma, it.daemon.control("admin") as admin:
            gamma.send("generate", id="r", prompt="hi", sampling={"max_tokens": 3})
            assert gamma.until_terminal("r")[-1]["type"] == "done"
            status = admin.ask("status")
            assert set(status["tenants"]) == {"beta", "admin", "gamma"}
            assert status["running"] == 1
        assert it.daemon.metric("mlxd_requests_total", tenant="acme", outcome="revoked") == 1
        assert it.daemon.metric("mlxd_requests_running", tenant="acme") == 0
        assert it.daemon.metric("mlxd_requests_total", tenant="gamma", outcome="length") == 1


@pytest.mark.parametrize("is_durable", [False, True])
def test_who_gets_the_name_of_a_tenant_that_is_gone_gets_nothing_of_what_it_had(
    tmp_path: Path, is_durable: bool
) -> None:
    settings = durable_config(tmp_path) if is_durable else config(tmp_path)
    mine = {"prompt": "hi", "sampling": {"max_tokens": 5, "seed": 1}}
    with reloadable(tmp_path, settings=settings) as it, it.daemon.submit() as old:
        old.send("generate", id="ended", **mine)
        old.until_terminal("ended")
        old.send("generate", id="open", prompt="hi", sampling=FOREVER | {"seed": 1})
        assert [old.receive()["type"] for _ in range(2)] == ["accepted", "chunk"]
        it.reload(*it.all_but("acme"))
        it.reload(*it.all_but("acme"), it.tenant("acme", token_sha256=token_hash("new")))
        assert old.until_terminal("open")[-1]["code"] == "revoked"
        with Peer(it.config.server.submit) as new:
            assert new.ask("hello", v=1, token="new")["tenant"] == "acme"
            with Peer(it.config.server.control) as control:
                control.ask("hello", v=1, token="new")
                assert control.ask("status")["tenants"]["acme"]["generated_tokens"] == 0
            for name in ("ended", "open"):
                assert new.ask("resume", id=name)["code"] == "gone"
            new.send("generate", id="ended", **mine)
            assert new.until_terminal("ended")[-1]["type"] == "done"
            assert it.daemon.metric("mlxd_requests_accepted_total", tenant="acme") == 3


def test_an_open_request_of_a_tenant_that_is_gone_is_told_to_its_reader_alone(tmp_path: Path) -> None:
    with reloadable(tmp_path, step_s=0.5) as it, it.daemon.submit() as old:
        asked = {"prompt": "hi", "sampling": FOREVER | {"seed": 1}}
        old.send("generate", id="open", **asked)
        assert [old.receive()["type"] for _ in range(2)] == ["accepted", "chunk"]
        it.reload(*it.all_but("acme"))
        it.reload(*it.all_but("acme"), it.tenant("acme", token_sha256=token_hash("new")))
        with Peer(it.config.server.submit) as new:
            assert new.ask("hello", v=1, token="new")["tenant"] == "acme"
            assert new.ask("resume", id="open")["code"] == "gone"
            assert new.ask("generate", id="open", **asked)["reason"] == "id_conflict"
            assert old.until_terminal("open")[-1]["code"] == "revoked"
            with Peer(it.config.server.control) as control:
                control.ask("hello", v=1, token="new")
                assert control.ask("status")["tenants"]["acme"]["generated_tokens"] == 0


@pytest.mark.parametrize("curve", [False, True])
def test_a_client_hears_of_the_end_of_its_request_before_that_of_its_connections(
    tmp_path: Path, curve: bool
) -> None:
    with reloadable(tmp_path, curve=curve, step_s=0.2) as it, it.daemon.client() as client:
        chunks = client.stream("hi", SamplingParams(**FOREVER))
        next(chunks)
        it.reload(*it.all_but("acme"))
        with pytest.raises(RevokedError):
            list(chunks)


def test_a_token_is_replaced_without_a_gap(tmp_path: Path) -> None:
    old, new = token_hash(token("beta")), token_hash("fresh")
    with reloadable(tmp_path) as it, it.daemon.submit("beta") as before:
        it.reload(*it.all_but("beta"), it.tenant("beta", token_sha256=(old, new)))
        with Peer(it.config.server.submit) as after:
            assert after.ask("hello", v=1, token="fresh")["tenant"] == "beta"
            assert before.ask("ping")["type"] == "pong"
            reply = it.reload(*it.all_but("beta"), it.tenant("beta", token_sha256=new))
            assert reply["changes"] == ["beta: token_sha256 removed"]
            assert_closed(before)
            assert after.ask("ping")["type"] == "pong"


def test_a_key_is_replaced_without_a_gap(tmp_path: Path) -> None:
    new = KeyPair.make()
    with (
        reloadable(tmp_path, curve=True) as it,
        key_peer(it, "beta") as before,
    ):
        assert before.ask("hello", v=1)["tenant"] == "beta"
        before.send("generate", id="r", prompt="hi", sampling=FOREVER)
        it.reload(*it.all_but("beta"), it.tenant("beta", public_key=(KEYS["beta"].public, new.public)))
        with key_peer(it, new) as after:
            assert after.ask("hello", v=1)["tenant"] == "beta"
            reply = it.reload(*it.all_but("beta"), it.tenant("beta", public_key=new.public))
            assert reply["changes"] == ["beta: public_key removed"]
            assert before.until_terminal("r")[-1]["code"] == "revoked"
            assert before.receive()["code"] == "revoked"
            assert after.ask("ping")["type"] == "pong"


def test_a_key_moves_to_another_tenant_and_its_connections_do_not(tmp_path: Path) -> None:
    moved = KEYS["acme"].public
    with reloadable(tmp_path, curve=True) as it, key_peer(it, "acme") as peer:
        assert peer.ask("hello", v=1)["tenant"] == "acme"
        it.reload(it.tenant("admin"), it.tenant("beta", public_key=(KEYS["beta"].public, moved)))
        assert peer.receive()["code"] == "revoked"
        with key_peer(it, "acme") as again:
            assert again.ask("hello", v=1)["tenant"] == "beta"


def test_caps_change_for_those_who_are_connected(tmp_path: Path) -> None:
    with reloadable(tmp_path) as it, it.daemon.submit("acme") as acme:

        def ask(request_id: str) -> str:
            acme.send("generate", id=request_id, prompt="hi", sampling=FOREVER)
            while (reply := acme.receive()).get("id") != request_id:
                pass
            return str(reply.get("reason", reply["type"]))

        it.reload(*it.all_but("acme"), it.tenant("acme", max_running=1, max_waiting=1))
        assert [ask("a"), ask("b"), ask("c")] == ["accepted", "accepted", "queue_full"]
        reply = it.reload(*it.all_but("acme"), it.tenant("acme", max_running=3, max_waiting=1))
        assert reply["changes"] == ["acme: max_running 1 -> 3"]
        wait_until(lambda: it.daemon.metric("mlxd_requests_running", tenant="acme") == 2)
        assert ask("d") == "accepted"
        wait_until(lambda: it.daemon.metric("mlxd_requests_running", tenant="acme") == 3)
        assert [ask("e"), ask("f")] == ["accepted", "queue_full"]
        it.reload(*it.all_but("acme"), it.tenant("acme", operator=True))
        with it.daemon.control("acme") as same:
            assert same.ask("reload", id="mine")["type"] == "reloaded"


def test_rates_and_reserves_change_for_those_who_are_connected(tmp_path: Path) -> None:
    with reloadable(tmp_path) as it, it.daemon.submit("acme") as acme, it.daemon.submit("beta") as beta:
        for peer in (acme, beta):
            peer.send("generate", id="r", prompt="hi", sampling=FOREVER)
            assert [peer.receive()["type"] for _ in range(2)] == ["accepted", "chunk"]
        caps = {"kv_reserve": 0.5, "tokens_per_minute": 100, "max_prefilling": 1, "max_priority": "batch"}
        reply = it.reload(*it.all_but("acme"), it.tenant("acme", **caps))
        assert reply["changes"] == [
            "acme: kv_reserve 0.0 -> 0.5, tokens_per_minute None -> 100, max_prefilling 2 -> 1, "
            "max_priority normal -> batch"
        ]
        end = acme.until_terminal("r")[-1]
        assert (end["code"], "above the 100 tokens a minute" in end["message"]) == ("revoked", True)
        acme.send("generate", id="s", prompt="hi", sampling={"max_tokens": 90})
        assert acme.until_terminal("s")[-1]["type"] == "done"
        acme.send("generate", id="t", prompt="hi", sampling={"max_tokens": 100})
        assert acme.until_terminal("t")[-1]["reason"] == "quota"
        it.reload(*it.config.tenants)
        acme.send("generate", id="u", prompt="hi", sampling={"max_tokens": 100})
        assert acme.until_terminal("u")[-1]["type"] == "done"
        assert beta.receive()["type"] == "chunk"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server": {"max_clients": 7}}, "server.max_clients changed; that takes effect with a restart"),
        ({"scheduler": {"max_rows": 3}}, "scheduler.max_rows changed; that takes effect with a restart"),
        ({"cache": {"disk": {"path": "/d", "max_bytes": "1GiB"}}}, "cache.disk changed; that takes effect"),
        ({"tenants": []}, "tenants is a list of 0; it must be a list of 1 to 10000 entries"),
        ({"tenants": [{"name": "a"}]}, "tenants[0].token_sha256 is missing"),
        (
            {"tenants": [{"name": "a", "token_sha256": "0" * 64, "kv_share": 1e-9}]},
            "tenants[0].kv_share is 1e-09, 0 of ",
        ),
    ],
)
def test_a_wrong_file_is_refused_whole(
    tmp_path: Path, change: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with reloadable(tmp_path) as it, it.daemon.control("admin") as admin:
        good = msgspec.to_builtins(it.config)
        for section, value in change.items():
            good[section] = good[section] | value if isinstance(value, dict) else value
        it.path.write_bytes(msgspec.json.encode(good))
        reply = admin.ask("reload", id="now")
        assert (reply["id"], reply["code"]) == ("now", "config")
        assert reply["message"].startswith(f"{it.path}:1: {message}")
        assert f"reload refused: {it.path}:1: {message}" in caplog.text
        for name in ("acme", "beta", "admin"):
            with it.daemon.submit(name) as peer:
                assert peer.ask("ping")["type"] == "pong"


def test_a_daemon_without_a_file_says_so(tmp_path: Path) -> None:
    with Daemon(config(tmp_path), runner()) as daemon, daemon.wait_ready().control("admin") as admin:
        reply = admin.ask("reload", id="now")
        assert (reply["code"], reply["message"]) == (
            "config",
            "this daemon was started without a configuration file",
        )


def test_while_the_model_loads_tenants_do_not_change(tmp_path: Path) -> None:
    starting = Daemon(config(tmp_path), runner(), path=tmp_path / "x")
    starting.loading.clear()
    with starting, starting.control("admin") as admin:
        assert admin.ask("reload")["message"] == "the daemon is starting; tenants change while it runs"
        starting.loading.set()


def test_only_operators_reload(tmp_path: Path) -> None:
    with reloadable(tmp_path) as it, it.daemon.control("acme") as acme:
        assert acme.ask("reload", id="now")["code"] == "forbidden"


def test_the_log_shows_the_difference_and_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxd")
    fresh = token_hash("fresh")
    with reloadable(tmp_path) as it:
        it.reload(*it.all_but("beta", "acme"), it.tenant("acme", weight=4.0, token_sha256=fresh))
    assert "reloaded tenants=2 changes=2" in caplog.text
    assert "reloaded beta: removed" in caplog.text
    assert "reloaded acme: weight 1.0 -> 4.0, token_sha256 replaced" in caplog.text
    for secret in (fresh, token_hash(token("acme")), token_hash(token("beta"))):
        assert secret not in caplog.text


def test_changes_are_one_line_a_tenant() -> None:
    old = (make_tenant("a"), make_tenant("b"), make_tenant("c", kv_share=0.5))
    new = (make_tenant("c", kv_share=1.0, operator=True), make_tenant("b"), make_tenant("d"))
    assert list(tenant_changes(old, new)) == [
        "a: removed",
        "c: kv_share 0.5 -> 1.0, operator False -> True",
        "d: added",
    ]
    assert not list(tenant_changes(old, old[::-1]))


A, B, C = (KeyPair.make().public for _ in range(3))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (None, A, ["a: public_key added"]),
        (A, (A, B), ["a: public_key added"]),
        ((A, B), B, ["a: public_key removed"]),
        (A, None, ["a: public_key removed"]),
        (A, B, ["a: public_key replaced"]),
        ((A, B), (B, C), ["a: public_key replaced"]),
        (A, (A,), []),
        ((A, B), (B, A), []),
    ],
)
def test_what_became_of_credentials_is_told_without_them(before: Any, after: Any, told: list[str]) -> None:
    old, new = (make_tenant("a", public_key=keys) for keys in (before, after))
    assert list(tenant_changes((old,), (new,))) == told


def test_requests_of_a_tenant_that_is_gone_leave_nothing_behind() -> None:
    world = World(make_config(make_tenant("a"), make_tenant("b"), max_rows=1))
    for number, tenant in enumerate(("a", "a", "b")):
        world.submit(submission(f"{number}", tenant=tenant))
    world.turn()
    assert len(world.scheduler.batch) == 1
    ended = world.scheduler.set_tenants([make_tenant("b", weight=2.0), make_tenant("c")], world.now)
    assert [(event.key.request_id, event.outcome) for event in ended] == [("0", "revoked"), ("1", "revoked")]
    assert (world.scheduler.num_open, len(world.scheduler.batch)) == (1, 0)
    assert [(tenant.name, tenant.weight) for tenant in world.scheduler.book] == [("b", 2.0), ("c", 1.0)]
    world.run()
    assert world.events[-1].outcome == "length"


def test_requests_beyond_a_smaller_share_end_and_others_go_on() -> None:
    world = World(make_config(make_tenant("a"), max_rows=1))
    world.submit(submission("runs", tenant="a", max_tokens=8))
    world.submit(submission("large", range(1, 200), tenant="a", max_tokens=8))
    world.submit(submission("small", tenant="a", max_tokens=8))
    world.turn()
    memory = world.runner.info.memory
    smallest = sum(group.spec.page_bytes for group in memory.groups)
    ended = world.scheduler.set_tenants(
        [make_tenant("a", kv_share=2 * smallest / memory.kv_bytes)], world.now
    )
    assert [(event.key.request_id, event.outcome, event.error_code) for event in ended] == [
        ("large", "revoked", "revoked")
    ]
    assert "the tenant's share is" in ended[0].error
    world.run()
    assert [stats.outcome for stats in world.tape.requests] == ["revoked", "length", "length"]
