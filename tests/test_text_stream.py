"""Streaming text: what is shown adds up to the whole, and stops where it must."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import SPECIAL, byte_level, space_marked

from mlxd.batching.text import Tokenizer
from mlxd.batching.text_stream import TextStream, WindowDecoder, special_token_ids

BYTE_LEVEL = Tokenizer(byte_level(), special_tokens={})
SPACE_MARKED = Tokenizer(space_marked(), special_tokens={})
TOKENIZERS = {"byte level": BYTE_LEVEL, "space marked": SPACE_MARKED}
TEXTS = [
    "the cat sat on the mat",
    "  two leading spaces",
    "你好，世界",
    "family 👩‍👩‍👧 and flags 🇩🇪🇯🇵",
    "naïve é and é",
    "tabs\tand\nlines\r\n",
    "",
]


class Letters:
    """Decodes token n as character n of the text: puts a token border wherever a test wants one."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token: int) -> str:
        return self._pieces[token]

    def finish(self) -> str:
        return ""


def shown_pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push([token]) for token in ids), stream.finish()]


def cut_at_first_stop(text: str, stops: list[str]) -> str:
    """The rule: the first position where some stop string is complete; of two there, the longer one."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(len(stop) for stop in ended)]
    return text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 20), max_size=60))
def test_stream_of_any_byte_level_tokens_equals_decoding_them_at_once(ids: list[int]) -> None:
    assert "".join(shown_pieces(BYTE_LEVEL.stream(), ids)) == BYTE_LEVEL.decode(ids)


@settings(deadline=None)
@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\N{REPLACEMENT CHARACTER}"))
)
def test_stream_of_any_text_equals_it_and_shows_whole_characters_only(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    pieces = shown_pieces(tokenizer.stream(), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_shown_with_the_token_that_completes_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    for end in range(1, len(ids) + 1):
        shown = stream.push([ids[end - 1]])
        whole = tokenizer.decode(ids[:end])
        complete = not whole.endswith("\N{REPLACEMENT CHARACTER}")
        assert not (complete and not shown) or whole == tokenizer.decode(ids[: end - 1])
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_and_unknown_tokens_are_no_text_and_part_no_neighbours(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("the cat")
    noise = [SPECIAL.index("<eos>"), tokenizer.vocab_size + 5]
    spread = [token for pair in zip(ids, noise * len(ids), strict=False) for token in pair]
    assert "".join(shown_pieces(tokenizer.stream(), noise + spread)) == "the cat"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_unfinished_character_is_replaced_at_the_end_only(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    stream = tokenizer.stream()
    ids = tokenizer.encode("a😀")
    assert stream.push(ids[:-1]) == "a"
    assert set(stream.finish()) == {"\N{REPLACEMENT CHARACTER}"}


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, SPACE_MARKED.vocab_size - 1), max_size=60))
def test_window_stays_within_two_characters_of_tokens(ids: list[int]) -> None:
    backend = space_marked()
    decoded: list[int] = []

    class Counting:
        def decode(self, window: list[int]) -> str:
            decoded.append(len(window))
            return backend.decode(window)

        def id_to_token(self, token: int) -> str | None:
            return backend.id_to_token(token)

    decoder = WindowDecoder(Counting(), special_token_ids(backend))
    for token in ids:
        decoder.push(token)
    assert max(decoded, default=0) <= 8


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
)
def test_text_ends_where_the_first_stop_string_is_complete_whatever_the_token_borders(
    pieces: list[str], stops: list[str]
) -> None:
    text = "".join(pieces)
    stream = TextStream(Letters(pieces), stops)
    assert "".join(shown_pieces(stream, list(range(len(pieces))))) == cut_at_first_stop(text, stops)
    assert stream.stopped == (cut_at_first_stop(text, stops) != text)


@settings(deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_exactly_what_may_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    stream = TextStream(Letters(pieces), stops)
    shown = ""
    for i in range(len(pieces)):
        shown += stream.push([i])
        if stream.stopped:
            break
        text = "".join(pieces[: i + 1])
        ends = [text[at:] for at in range(len(text) + 1)]
        held = max(len(end) for end in ends if any(stop.startswith(end) for stop in stops))
        assert shown == text[: len(text) - held]


@pytest.mark.parametrize("cut", range(1, 7))
def test_stop_string_is_found_at_every_token_split(cut: int) -> None:
    text, stop = "say <END> more", "<END>"
    at = text.index(stop)
    pieces = [text[: at + cut], text[at + cut :]]
    stream = TextStream(Letters(pieces), [stop])
    assert stream.push([0, 1]) == "say "
    assert stream.stopped
    assert stream.finish() == ""


def test_tokens_after_the_stop_string_are_ignored_and_not_counted() -> None:
    stream = TextStream(Letters(["ab", "cd", "ef"]), ["bc"])
    assert stream.push([0, 1, 2]) == "a"
    assert stream.push([2]) == ""
    assert stream.num_tokens == 2


def test_held_text_is_shown_when_the_row_ends_without_a_stop_string() -> None:
    stream = TextStream(Letters(["end ", "<E"]), ["<END>"])
    assert stream.push([0, 1]) == "end "
    assert stream.finish() == "<E"
    assert not stream.stopped


@pytest.mark.parametrize("stop", ["世界", "👩‍👧", "é!"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_stop_string_beyond_ascii_is_found_across_byte_tokens(kind: str, stop: str) -> None:
    tokenizer = TOKENIZERS[kind]
    stream = tokenizer.stream([stop])
    assert "".join(shown_pieces(stream, tokenizer.encode(f"the {stop} cat"))) == "the "
    assert stream.stopped
