"""What servers of this kind were reported to get wrong with clients, tried over sockets."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemon_process import DaemonProcess, daemon_process, process_config, write_tiny_model
from wire_daemon import daemon, runner, tokenizer

from mlxd.batching.fake_runner import FakeRunner, fake_memory
from mlxd.batching.sampling_params import SamplingParams
from mlxd.metrics.stats import RunnerCounters

CHUNK = 64
LONG_PROMPT = 40 * CHUNK
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Between two decode steps it computes one chunk and no more."""
    folder = tmp_path_factory.mktemp("daemon")
    write_tiny_model(folder)
    limits = {"prefill_ms": 1, "prefill_chunk": CHUNK}
    with daemon_process(folder, process_config(folder, folder, scheduler=limits)) as running:
        yield running


def test_what_one_request_asks_for_does_not_reach_the_next_nor_those_beside_it(served: DaemonProcess) -> None:
    with served.client() as client, ThreadPoolExecutor(8) as pool:
        plain = client.generate("A prompt.", GREEDY)
        sorts = [
            GREEDY,
            changed(stop=(plain.text[4:6],)),
            changed(stop_token_ids=plain.token_ids[6:8]),
            changed(logit_bias={65: 100.0, 66: 100.0}),
            changed(temperature=1.0, seed=4, top_logprobs=2, repetition_penalty=1.5),
        ]

        def answer(sort: int) -> tuple[str, tuple[int, ...], bool]:
            given = client.generate("A prompt.", sorts[sort])
            return given.text, given.token_ids, bool(given.logprobs)

        alone = [answer(sort) for sort in range(len(sorts))]
        assert len(set(alone)) == len(sorts), "each must show"
        order = [(7 * number + number // 5) % len(sorts) for number in range(60)]
        assert list(pool.map(answer, order)) == [alone[sort] for sort in order]


def changed(**fields: Any) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **fields)


def test_equal_prompts_at_one_instant_all_end_with_equal_answers_cold_and_cached(
    served: DaemonProcess,
) -> None:
    prompt = "Eight of these at once. " * 20
    answers = []
    for time in ("cold", "cached"):
        with served.peer() as peer:
            for number in range(8):
                sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
                peer.send("generate", id=f"{time} {number}", prompt=prompt, sampling=sampling, stream=False)
            answers += receive(peer, 8, "done")
    assert len({(answer["text"], tuple(answer["token_ids"])) for answer in answers}) == 1
    assert all(answer["usage"]["cached_tokens"] for answer in answers[8:])


def test_short_prompts_do_not_wait_for_a_long_one_sent_before_them(served: DaemonProcess) -> None:
    with served.peer() as peer:
        sampling = {"max_tokens": 1, "ignore_eos": True}
        peer.send("generate", id="long", token_ids=[65] * LONG_PROMPT, sampling=sampling)
        for number in range(7):
            peer.send("generate", id=f"short {number}", prompt="Hello.", sampling=sampling)
        order = [message["id"] for message in receive(peer, 8, "done")]
    assert order[-1] == "long"


def test_a_stream_goes_on_between_any_two_chunks_of_anothers_prompt(served: DaemonProcess) -> None:
    with served.peer() as peer:
        endless = {"max_tokens": 5_000, "ignore_eos": True}
        peer.send("generate", id="stream", prompt="Hello.", sampling=endless)
        list(receive(peer, 1, "chunk"))
        prompt = [66] * LONG_PROMPT
        peer.send("generate", id="other", token_ids=prompt, sampling={"max_tokens": 1, "ignore_eos": True})
        num_meanwhile = 0
        while (message := peer.receive(60.0))["id"] != "other" or message["type"] != "chunk":
            num_meanwhile += len(message.get("token_ids", ()))
    assert num_meanwhile >= LONG_PROMPT / CHUNK - 1


def receive(peer: Any, count: int, type: str) -> Iterator[dict[str, Any]]:
    """The next messages of this type."""
    while count:
        message = peer.receive(60.0)
        assert message["type"] in ("accepted", "chunk", "done"), message
        if message["type"] == type:
            count -= 1
            yield message


def test_a_step_that_takes_longer_than_a_client_waits_for_a_sign_of_life_is_waited_for(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path, runner=runner(1.2)) as slow, slow.client(timeout_s=0.6) as client:
        assert client.generate("hi", SamplingParams(max_tokens=1)).usage.completion_tokens == 1


class Crammed(FakeRunner):
    """On a device that somebody else has filled."""

    def counters(self) -> RunnerCounters:
        return replace(super().counters(), memory_active_bytes=2**60)


def test_memory_that_others_hold_is_shown_and_turns_no_request_away(tmp_path: Path) -> None:
    memory = fake_memory(max_model_len=4096)
    with (
        daemon(tmp_path, runner=Crammed(memory, vocab_size=tokenizer().vocab_size)) as crammed,
        crammed.client() as client,
    ):
        for _ in range(20):
            assert client.generate("hi", SamplingParams(max_tokens=3)).usage.completion_tokens == 3
        assert crammed.metric("mlxd_device_memory_bytes", kind="active") == 2**60
        assert crammed.metric("mlxd_requests_rejected_total", tenant="acme", reason="queue_full") == 0


def test_ten_thousand_requests_at_a_full_queue_are_refused_with_a_time_to_come_back(tmp_path: Path) -> None:
    caps = {"max_running": 4, "max_waiting": 16}
    endless = {"max_tokens": 4_000}
    with daemon(tmp_path, runner=runner(0.01), tenant=caps) as full, full.submit() as peer:
        types: Counter[str] = Counter()
        for number in range(10_000):
            peer.send("generate", id=str(number), prompt="hi", sampling=endless, stream=False)
            if number % 250 == 249:
                replies = [peer.receive() for _ in range(250)]
                types.update(reply["type"] for reply in replies)
                assert all(reply["retry_after_ms"] > 0 for reply in replies if reply["type"] == "rejected")
                at = full.engine.snapshot
                assert (at.running <= 4, at.waiting <= 16) == (True, True)
    assert types == {"accepted": 20, "rejected": 9_980}
