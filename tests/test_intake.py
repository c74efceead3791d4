"""Which prompts are tokenised off the event loop, and whose turn it is there."""

import gc
import logging
import threading
from pathlib import Path

import pytest
from text_tokenizers import byte_level
from wire_daemon import daemon, wait_until

from mlxd.batching.text import Tokenizer
from mlxd.scheduler.intake import INLINE_CHARS, INLINE_TURNS, MAX_TOKENISING, is_long
from mlxd.scheduler.messages import ChatMessage, Generate

LONG = "x" * (INLINE_CHARS + 1)


def chat(num_turns: int, content: str) -> Generate:
    return Generate(id="r", messages=(ChatMessage(role="user", content=content),) * num_turns)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Generate(id="r", prompt="x" * INLINE_CHARS), False),
        (Generate(id="r", prompt=LONG), True),
        (Generate(id="r", token_ids=(1,) * 10_000), False),
        (chat(INLINE_TURNS, ""), False),
        (chat(INLINE_TURNS + 1, ""), True),
        (chat(2, "x" * (INLINE_CHARS // 2 + 1)), True),
    ],
    ids=["text", "long text", "ids", "chat", "many turns", "long chat"],
)
def test_long_texts_and_long_conversations_are_tokenised_elsewhere(message: Generate, expected: bool) -> None:
    assert is_long(message) is expected


class GatedTokenizer(Tokenizer):
    """Holds prompts that begin with "held" until they are let go."""

    def __init__(self) -> None:
        super().__init__(byte_level(), special_tokens={})
        self.at_work = 0
        self.resume = threading.Event()

    def encode(self, text: str) -> list[int]:
        if text.startswith("held"):
            self.at_work += 1
            self.resume.wait(5.0)
        return super().encode(text)[:5]


def test_long_prompts_of_one_tenant_leave_room_for_the_others(tmp_path: Path) -> None:
    text = GatedTokenizer()
    short = {"max_tokens": 1}
    with (
        daemon(tmp_path, text=text) as served,
        served.submit("acme") as greedy,
        served.submit("beta") as other,
    ):
        for number in range(5):
            greedy.send("generate", id=str(number), prompt="held" + LONG, sampling=short)
        other.send("generate", id="b", prompt=LONG, sampling=short)
        assert other.until_terminal("b")[-1]["type"] == "done"
        wait_until(lambda: text.at_work == MAX_TOKENISING)
        text.resume.set()
        ends: set[str] = set()
        while len(ends) < 5:
            message = greedy.receive()
            if message["type"] == "done":
                ends.add(message["id"])


def test_a_daemon_that_ends_leaves_prompts_that_wait_for_their_turn_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever's turn comes because one before is given up, too."""
    text = GatedTokenizer()
    with (
        caplog.at_level(logging.ERROR),
        daemon(tmp_path, text=text, drain_timeout_s=0.1) as served,
        served.submit("acme") as acme,
        served.submit("beta") as beta,
    ):
        for peer in (acme, beta):
            for number in range(4):
                peer.send("generate", id=str(number), prompt="held" + LONG, sampling={"max_tokens": 1})
        wait_until(lambda: text.at_work == MAX_TOKENISING + 1)
        served.server.request_drain()
        served.join()
        text.resume.set()
        for peer in (acme, beta):
            ends = [peer.receive() for _ in range(4)]
            assert {(end["type"], end["reason"]) for end in ends} == {("rejected", "draining")}
    gc.collect()
    assert not caplog.records
