"""Memory runs out in a daemon: one request ends, all else goes on, and a restart tells the same."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_process import TIMEOUT_S, body, durable_config, expected, fault_process, tokens
from wire_daemon import TERMINAL, Peer

LONG = 120
Message = dict[str, Any]


class Listener:
    """A peer, and all that it was told."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.messages: list[Message] = []

    def send(self, request_id: str, seed: int, num_tokens: int) -> None:
        self._peer.send("generate", id=request_id, **body(seed, num_tokens))
        self.until(request_id, lambda message: message["type"] == "chunk")

    def until(self, request_id: str, condition: Callable[[Message], bool]) -> Message:
        """The first message of a request that fulfils `condition`."""
        while True:
            for message in self.of(request_id):
                if condition(message):
                    return message
            self.messages.append(self._peer.receive(30.0))

    def end_of(self, request_id: str) -> Message:
        return self.until(request_id, lambda message: message["type"] in TERMINAL)

    def of(self, request_id: str) -> list[Message]:
        return [message for message in self.messages if message.get("id") == request_id]


@pytest.mark.parametrize("point", ["launch a step", "wait for a step"])
def test_the_last_request_to_enter_ends_and_the_daemon_goes_on(tmp_path: Path, point: str) -> None:
    config = durable_config(tmp_path, step_timeout_s=TIMEOUT_S)
    with fault_process(tmp_path, config, point, "starve") as daemon, daemon.peer() as peer:
        listener = Listener(peer)
        listener.send("old", 0, LONG)
        listener.send("young", 1, LONG)
        daemon.arm()
        error = listener.end_of("young")
        assert (error["type"], error["code"]) == ("error", "out_of_memory")
        listener.send("late", 2, 10)
        ends = {"young": error} | {name: listener.end_of(name) for name in ("old", "late")}
        assert [ends[name]["type"] for name in ("old", "late")] == ["done", "done"]
        assert tokens(listener.of("old")) == expected(0, LONG)
        assert tokens(listener.of("late")) == expected(2, 10)
        young = tokens(listener.of("young"))
        assert young == expected(1, LONG)[: len(young)]
        assert daemon.process.poll() is None
        assert len(re.findall(r"out of memory: .* ended=acme/young waiting=1", daemon.log)) == 1
        assert "Traceback" not in daemon.log
    with fault_process(tmp_path, config, action="quick") as again, again.peer() as peer:
        for name, end in ends.items():
            peer.send("resume", id=name)
            assert peer.until_terminal(name)[-1] == end
