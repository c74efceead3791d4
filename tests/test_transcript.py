"""What was answered, told again from any piece on; and what is kept of it."""

import tracemalloc
from itertools import count

import pytest
from msgspec import UNSET

from mlxd.batching.plan import TokenLogprobs
from mlxd.scheduler import messages as wire
from mlxd.scheduler.events import RequestKey, Usage
from mlxd.scheduler.retention import Retention
from mlxd.scheduler.stream import Stream, digest_of
from mlxd.scheduler.transcript import Transcript

DONE = wire.Done(id="a", finish_reason="stop", usage=Usage(1, 3))


def transcript(*, with_logprobs: bool = False) -> Transcript:
    """Three tokens, the second without text, and text that was left at the end."""
    made = Transcript("a")
    for number, text in enumerate(("hé", "", "llo")):
        made.add(text, (number,), (TokenLogprobs(-1.0, ((number, -1.0),)),) if with_logprobs else ())
    made.add("!", ())
    made.terminal = DONE
    return made


@pytest.mark.parametrize(
    ("seq", "max_bytes", "text", "token_ids"),
    [
        (0, 1000, "héllo", (0, 1, 2)),
        (0, 0, "hé", (0,)),
        (0, 13, "hé", (0, 1)),
        (1, 1000, "llo", (1, 2)),
        (2, 1, "llo", (2,)),
        (3, 1, "!", ()),
    ],
)
def test_a_chunk_holds_what_fits_and_at_least_a_piece(
    seq: int, max_bytes: int, text: str, token_ids: tuple[int, ...]
) -> None:
    chunk = transcript().chunk(seq, max_bytes)
    assert chunk == wire.Chunk(id="a", seq=seq, text=text, token_ids=token_ids)
    assert transcript().chunk(4, 1000) is None


def test_bytes_are_counted_from_any_piece_on() -> None:
    made = transcript()
    sizes = [made.bytes_from(seq) for seq in range(6)]
    assert sizes == [27, 19, 14, 6, 0, 0]
    assert made.num_bytes == 27
    assert transcript(with_logprobs=True).num_bytes == 27 + 3 * 32


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_record_is_the_whole_transcript(with_logprobs: bool) -> None:
    made = transcript(with_logprobs=with_logprobs)
    again = Transcript.restored("a", made.record())
    assert again.terminal == DONE
    assert [again.chunk(seq, 1) for seq in range(5)] == [made.chunk(seq, 1) for seq in range(5)]
    assert again.whole(DONE) == made.whole(DONE)
    assert made.whole(DONE).text == "héllo!"
    assert (made.whole(DONE).logprobs is UNSET) != with_logprobs


def test_tokens_that_come_together_are_pieces_of_their_own() -> None:
    made = Transcript("a")
    made.add("xyz", (1, 2, 3))
    assert [made.chunk(seq, 0) for seq in range(3)] == [
        wire.Chunk(id="a", seq=seq, text="xyz" if seq == 2 else "", token_ids=(seq + 1,)) for seq in range(3)
    ]


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [({}, True), ({"credit": 5}, True), ({"stream": False}, False), ({"prompt": "hi!"}, False)],
)
def test_credit_is_no_part_of_what_is_asked_for(changed: dict[str, object], is_same: bool) -> None:
    message = {"id": "a", "prompt": "hi"}
    same = digest_of(wire.Generate(**message)) == digest_of(wire.Generate(**(message | changed)))  # type: ignore[arg-type]
    assert same is is_same


def stream(number: int, text: str = "", tenant: str = "acme") -> Stream:
    made = Transcript(str(number))
    made.add(text, (number,))
    return Stream(RequestKey(tenant, str(number)), b"", is_whole=False, transcript=made)


def test_the_oldest_go_first_by_age_and_by_size() -> None:
    dropped: list[Stream] = []
    kept = Retention(10.0, 4_000, dropped.append)
    streams = [stream(number) for number in range(4)]
    for number, each in enumerate(streams[:3]):
        kept.add(each, float(number))
    assert kept.get(streams[0].key) is streams[0]
    kept.add(streams[3], 3.0)
    assert dropped == streams[:1]
    kept.expire(11.5)
    assert dropped == streams[:2]
    large = stream(5, "x" * 5_000)
    kept.add(large, 12.0)
    assert kept.get(streams[3].key) is None
    assert kept.get(large.key) is large
    kept.add(stream(6), 12.0)
    assert dropped[-1] is large


def test_what_is_taken_back_counts_no_more_and_nobody_is_told() -> None:
    dropped: list[Stream] = []
    kept = Retention(10.0, 4_000, dropped.append)
    streams = [stream(number) for number in range(4)]
    for each in streams[:3]:
        kept.add(each, 0.0)
    kept.discard(streams[1])
    kept.discard(streams[1])
    kept.discard(stream(2))
    kept.add(streams[3], 1.0)
    assert (len(kept), dropped) == (3, [])
    kept.expire(20.0)
    assert (len(kept), dropped) == (0, [streams[0], streams[2], streams[3]])


def test_a_stream_that_grew_since_it_came_takes_back_what_it_came_with() -> None:
    dropped: list[Stream] = []
    kept = Retention(10.0, 4_000, dropped.append)
    grown = stream(0)
    kept.add(grown, 0.0)
    grown.transcript.add("x" * 2_000, (1,))
    kept.discard(grown)
    for number in range(1, 4):
        kept.add(stream(number), 1.0)
    assert dropped == []
    kept.add(stream(4), 1.0)
    assert len(dropped) == 1


@pytest.mark.parametrize("num_top", [None, 0, 5, 20])
def test_what_is_kept_takes_about_as_much_memory_as_is_counted(num_top: int | None) -> None:
    def answer(number: int) -> Stream:
        made = stream(number)
        for token in range(1_000, 1_060):
            top = tuple((token + rank, rank / 7) for rank in range(num_top or 0))
            logprobs = () if num_top is None else (TokenLogprobs(token / 7, top),)
            made.transcript.add(f"word {token}", (token,), logprobs)
        return made

    dropped: list[Stream] = []
    kept = Retention(10.0, 1_000_000, dropped.append)
    tracemalloc.start()
    for number in count():
        kept.add(answer(number), 0.0)
        if dropped:
            break
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.7e6 < num_bytes < 1.3e6


def test_who_holds_most_gives_up_its_oldest_first() -> None:
    dropped: list[Stream] = []
    kept = Retention(10.0, 6_000, dropped.append)
    quiet = [stream(number, tenant="beta") for number in range(2)]
    flood = [stream(number) for number in range(2, 50)]
    for at, each in enumerate(quiet + flood):
        kept.add(each, at / 10)
    assert len(kept) == 5
    assert dropped == flood[:-3]
    assert all(kept.get(each.key) is each for each in quiet + flood[-3:])
    kept.expire(10.1)
    assert dropped[-2:] == quiet
    assert [kept.get(each.key) for each in quiet] == [None, None]
