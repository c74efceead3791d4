"""Tokenizing prompts and conversations."""

import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from text_tokenizers import SPECIAL, byte_level, space_marked
from tokenizers import AddedToken, normalizers, processors

from mlxd.batching.chat_template import ChatTemplate
from mlxd.batching.errors import InvalidPromptError, ModelError
from mlxd.batching.text import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def write_folder(folder: Path, tokenizer_config: dict[str, object], **files: object) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def with_template(source: str) -> Tokenizer:
    tokens = {"eos_token": "<eos>"}
    return Tokenizer(byte_level(), special_tokens=tokens, chat_template=ChatTemplate(source, tokens))


@pytest.mark.parametrize(
    ("add_bos", "backend_adds_it", "text", "expected"),
    [
        (None, False, "hello", ""),
        (None, True, "hello", "<bos>"),
        (True, False, "hello", "<bos>"),
        (True, True, "hello", "<bos>"),
        (False, True, "hello", ""),
        (True, False, "<bos>hello", "<bos>"),
        (None, True, "<bos>hello", "<bos>"),
        (True, False, "", "<bos>"),
    ],
)
def test_bos_is_added_where_the_configuration_says_so_and_never_twice(
    add_bos: bool | None, backend_adds_it: bool, text: str, expected: str
) -> None:
    backend = byte_level()
    if backend_adds_it:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
        )
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<bos>"}, add_bos=add_bos)
    ids = tokenizer.encode(text)
    assert backend.decode(ids, skip_special_tokens=False) == expected + text.removeprefix("<bos>")


def test_truncation_and_padding_stored_in_the_tokenizer_are_ignored() -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=500)
    tokenizer = Tokenizer(backend, special_tokens={})
    text = "one two three four five six seven"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) < 500


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """The engine's thread and the one of the sockets: else one client's prompt stops everybody's tokens."""
    tokenizer = Tokenizer(byte_level(), special_tokens={})
    looks = [time.perf_counter()]
    encoding = threading.Thread(target=tokenizer.encode, args=("hello " * 200_000,))
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        looks.append(time.perf_counter())
    longest = max(later - before for before, later in pairwise(looks))
    assert longest < (looks[-1] - looks[0]) / 2


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidPromptError, match="not valid Unicode"):
        Tokenizer(byte_level(), special_tokens={}).encode("\ud83d")


def test_end_of_text_ids_are_those_of_all_files(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        {"eos_token": {"content": "<eos>"}},
        config={"eos_token_id": 7, "text_config": {"eos_token_id": 8}},
        generation_config={"eos_token_id": [7, 9]},
    )
    assert Tokenizer.load(folder).eos_token_ids == {SPECIAL.index("<eos>"), 7, 8, 9}


def test_vocabulary_size_is_one_above_the_highest_id() -> None:
    backend = byte_level()
    assert Tokenizer(backend, special_tokens={}).vocab_size == max(backend.get_vocab().values()) + 1


def test_conversation_is_rendered_and_its_control_tokens_are_single_ids() -> None:
    tokenizer = with_template(TEMPLATE)
    ids = tokenizer.encode_chat(HELLO)
    assert ids.count(SPECIAL.index("<eos>")) == 1
    assert tokenizer.decode(ids) == "<|user|>hello<|assistant|>"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "empty"),
        ([{"role": "user"}], r"messages\[0\] has fields \['role'\]"),
        ([{"role": "user", "content": "a", "name": "b"}], r"messages\[0\] has fields"),
        ([*HELLO, {"role": "root", "content": "a"}], r"messages\[1\].role is 'root'"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": ["user"], "content": "a"}], r"messages\[0\].role"),
    ],
)
def test_malformed_message_is_named(messages: list[dict[str, str]], named: str) -> None:
    with pytest.raises(InvalidPromptError, match=named):
        with_template(TEMPLATE).encode_chat(messages)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[7].role }}", "no element 7"),
        ("{{ 1 + messages }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange"),
        ("{{ messages.append(1) }}", "append"),
    ],
)
def test_what_a_template_refuses_is_an_invalid_prompt(source: str, named: str) -> None:
    with pytest.raises(InvalidPromptError, match=named):
        with_template(source).encode_chat(HELLO)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role":"user","content":"hello"}]'),
        ("{{ '<&>' | tojson }}", '"<&>"'),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("{% for m in messages %}{% break %}{% endfor %}end", "end"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if true %}\na\n{% endif %}\nb", "a\nb"),
    ],
)
def test_template_dialect(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).render(HELLO) == expected


def test_broken_template_is_told_at_load() -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{% for %}", {})


def test_model_without_a_template_refuses_messages() -> None:
    with pytest.raises(InvalidPromptError, match="no chat template"):
        Tokenizer(byte_level(), special_tokens={}).encode_chat(HELLO)


@pytest.mark.parametrize("place", ["string", "named list", "chat_template.json", "chat_template.jinja"])
def test_template_is_found_in_each_of_its_places(tmp_path: Path, place: str) -> None:
    named = [{"name": "tools", "template": "wrong"}, {"name": "default", "template": "right"}]
    config = {"string": "right", "named list": named, "chat_template.jinja": "wrong"}.get(place)
    folder = write_folder(tmp_path, {"chat_template": config})
    if place == "chat_template.json":
        (folder / place).write_text('{"chat_template": "right"}')
    if place == "chat_template.jinja":
        (folder / place).write_text("right")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode_chat(HELLO)) == "right"


def test_a_token_stands_for_so_many_characters_at_most() -> None:
    tokenizer = Tokenizer(byte_level(), special_tokens={})
    most = tokenizer.max_token_chars
    assert most is not None
    for text in ("<tool call>" * 3, "The quick brown fox jumps", "你好，世界。", " " * 100, "\n\n\n"):
        assert len(text) <= most * len(tokenizer.encode(text))
    assert 11 <= most < 32
    assert Tokenizer(space_marked(), special_tokens={}).max_token_chars is None


@pytest.mark.parametrize("change", ["normalizer", "added token"])
def test_no_bound_is_known_where_text_may_shrink(change: str) -> None:
    backend = byte_level()
    if change == "normalizer":
        backend.normalizer = normalizers.NFKC()
    else:
        backend.add_tokens([AddedToken("<end>", rstrip=True)])
    assert Tokenizer(backend, special_tokens={}).max_token_chars is None


def test_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja is not UTF-8 text"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("content", ["", "{}", "not json"])
def test_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json holds no usable tokenizer"):
        Tokenizer.load(tmp_path)


def test_space_marked_tokenizer_round_trips() -> None:
    tokenizer = Tokenizer(space_marked(), special_tokens={})
    text = "the cat sat, 你好 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("token", ["\ud800", {"content": "a\udfff"}], ids=["plain", "object"])
def test_a_special_token_that_is_no_text_is_named(tmp_path: Path, token: object) -> None:
    folder = write_folder(tmp_path, {"eos_token": token})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: eos_token is '.*', which is no text"):
        Tokenizer.load(folder)
