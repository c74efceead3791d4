"""The daemon as a process among clients that vanish, never read or send rubbish: the others lose nothing."""

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rogue_clients
from daemon_process import DaemonProcess, Watcher, daemon_process, process_config
from rogue_clients import NUM_BROKEN_FRAMES, NUM_REQUESTS, Rogue, rogue
from scraping import Scraped, is_at_rest, unbalanced
from wire_daemon import TERMINAL, wait_until

CLIENTS = {"a": "acme", "b": "beta", "c": "acme", "d": "beta"}
"""Name -> tenant; the tenant of the client that vanishes is its own."""
SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. "


@dataclass(frozen=True)
class Answer:
    """One request's end: its terminal messages (one, if all is well) and the ids that were streamed."""

    terminals: tuple[str, ...]
    token_ids: tuple[int, ...]


def request(name: str, number: int) -> dict[str, Any]:
    """Half greedy, half drawn; prompts from three tokens to several chunks."""
    return {
        "id": f"{name}{number}",
        "prompt": f"{name}{number} " + SENTENCE * (number * number // 3),
        "sampling": {
            "max_tokens": 30 + 10 * number,
            "ignore_eos": True,
            "temperature": float(number % 2),
            "seed": number,
        },
    }


def ask(daemon: DaemonProcess, name: str, numbers: Sequence[int]) -> dict[str, Answer]:
    """Send requests over one connection and read until nothing more can come.

    A pong comes from the engine after everything that it told before: no terminal can follow it unseen.
    """
    messages: list[dict[str, Any]] = []
    salt = uuid.uuid4().hex
    with daemon.peer(CLIENTS[name]) as peer:
        for number in numbers:
            peer.send("generate", **request(name, number) | {"id": own_id(salt, name, number)})
        while sum(message["type"] in TERMINAL for message in messages) < len(numbers):
            messages.append(peer.receive(60.0))
        peer.send("ping", id="end")
        while messages[-1]["type"] != "pong":
            messages.append(peer.receive())
    return {f"{name}{number}": answer_in(messages, own_id(salt, name, number)) for number in numbers}


def own_id(salt: str, name: str, number: int) -> str:
    """An id that was not used before, so that the daemon computes the answer anew."""
    return f"{salt}-{name}{number}"


def answer_in(messages: Sequence[dict[str, Any]], request_id: str) -> Answer:
    own = [message for message in messages if message["id"] == request_id]
    chunks = [message for message in own if message["type"] == "chunk"]
    lengths = [max(1, len(chunk["token_ids"])) for chunk in chunks]
    assert [chunk["seq"] for chunk in chunks] == [sum(lengths[:index]) for index in range(len(chunks))]
    return Answer(
        terminals=tuple(message["type"] for message in own if message["type"] in TERMINAL),
        token_ids=tuple(token for chunk in chunks for token in chunk["token_ids"]),
    )


def ask_alone(daemon: DaemonProcess) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for name in CLIENTS:
        for number in range(NUM_REQUESTS):
            answers |= ask(daemon, name, [number])
    return answers


def ask_together(pool: ThreadPoolExecutor, daemon: DaemonProcess) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for own in pool.map(lambda name: ask(daemon, name, range(NUM_REQUESTS)), CLIENTS):
        answers |= own
    return answers


def kill_while_streaming(victim: Rogue) -> float:
    """Returns when it was killed, on time.monotonic()."""
    victim.wait_for("streaming")
    victim.process.kill()
    return time.monotonic()


def open_requests(scraped: Scraped, tenant: str) -> int:
    states = (scraped.by("tenant", f"mlxd_requests_{state}") for state in ("running", "waiting", "paused"))
    return sum(state[tenant] for state in states)


def num_slow(daemon: DaemonProcess) -> float:
    return daemon.scrape().by("outcome", "mlxd_requests_total")["slow_client"]


def test_rogue_clients_cost_the_others_nothing(model: Path, tmp_path: Path) -> None:
    config = process_config(tmp_path, model, server={"max_client_buffer_bytes": 65_536, "retention_s": 2})
    at = (config.server.submit, config.server.control)
    with daemon_process(tmp_path, config) as daemon, ThreadPoolExecutor(5) as pool:
        undisturbed = ask_alone(daemon)
        with (
            Watcher(daemon) as watcher,
            rogue(rogue_clients.vanish, *at, "admin") as victim,
            rogue(rogue_clients.never_read, *at, "acme") as deaf,
            rogue(rogue_clients.flood, *at, "beta") as flooder,
        ):
            for each in (victim, deaf, flooder):
                each.go_on()
            killed_at = pool.submit(kill_while_streaming, victim)
            disturbed = ask_together(pool, daemon)
            for each in (deaf, flooder):
                each.wait_for("sent")
            wait_until(lambda: num_slow(daemon) == NUM_REQUESTS, 30.0)
            wait_until(lambda: any(has_vanished(each, "admin") for _, each in watcher.scrapes), 30.0)
        wait_until(lambda: is_at_rest(daemon.scrape()), 15.0)
        last = daemon.scrape()
        daemon.terminate()
        assert daemon.wait() == 0
    assert disturbed == undisturbed
    assert {answer.terminals for answer in disturbed.values()} == {("done",)}
    assert [unbalanced(scraped) for _, scraped in watcher.scrapes] == [{}] * len(watcher.scrapes)
    assert vanished_after_s(watcher, killed_at.result(), "admin") < 1.0
    outcomes = {"length": 2 * len(undisturbed), "client_gone": NUM_REQUESTS, "slow_client": NUM_REQUESTS}
    assert +last.by("outcome", "mlxd_requests_total") == outcomes
    assert last.total("mlxd_requests_accepted_total") == sum(outcomes.values())
    refused = last.by("reason", "mlxd_zmq_bad_messages_total")
    assert refused.pop("handshake") > 0
    # What the flooder had sent but nobody had read yet is dropped with its connection.
    assert NUM_BROKEN_FRAMES // 2 < sum(refused.values()) <= NUM_BROKEN_FRAMES
    assert "Traceback" not in daemon.log


def vanished_after_s(watcher: Watcher, killed_at: float, tenant: str) -> float:
    """Seconds from the kill to the first scrape that shows all its requests ended; others were busy then."""
    after = [(at, scraped) for at, scraped in watcher.scrapes if at > killed_at]
    assert any(open_requests(scraped, other) for _, scraped in after for other in CLIENTS.values())
    return next(at for at, scraped in after if has_vanished(scraped, tenant)) - killed_at


def has_vanished(scraped: Scraped, tenant: str) -> bool:
    gone = scraped.get("mlxd_requests_total", tenant=tenant, outcome="client_gone")
    return gone == NUM_REQUESTS and open_requests(scraped, tenant) == 0
