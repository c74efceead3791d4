"""docs/models.md says what is measured, and of every model file."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from models_table import (
    DOCUMENT,
    NATIVE_HEAD,
    PACKED_HEAD,
    PackedVerdict,
    Verdict,
    judge,
    judge_packed,
    lines_of,
    table,
    written,
)
from tiny_zoo import MODELS

NOT_TRIED = {"olmo", "prism_hadamard_qwen35"}
FAMILIES = (
    "llama",
    "gpt_oss",
    "qwen3_moe",
    "gemma2",
    "gemma3n",
    "gemma4",
    "deepseek_v3",
    "deepseek_v32",
    "qwen3_next",
    "qwen3_5",
    "mamba2",
    "jamba",
    "nemotron_h",
    "falcon_h1",
    "bailing_moe_linear",
    "longcat_flash_ngram",
    "recurrent_gemma",
    "plamo3",
    "gpt_bigcode",
    "dbrx",
    "afm7",
    "llama4",
    "phi3small",
)
"""Each way of keeping state, each way of being refused, and what is wrong batched elsewhere."""


PACKED_FAMILIES = ("llama", "gpt_oss", "qwen3_next", "gemma3n", "deepseek_v3", "mamba2")


def lines(head: str) -> list[str]:
    return lines_of(head, DOCUMENT.read_text())


def check_native(name: str) -> None:
    assert str(judge(name)) in lines(NATIVE_HEAD)


def check_packed(name: str) -> None:
    """A line is there as it should be, or there is none as there should not be."""
    verdict = judge_packed(name)
    found = [line for line in lines(PACKED_HEAD) if line.startswith(f"| {name} |")]
    assert found == ([] if verdict is None else [str(verdict)])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_line_of_the_document_is_what_is_measured(name: str) -> None:
    check_native(name)


@pytest.mark.parametrize("name", PACKED_FAMILIES)
def test_a_line_of_packed_keys_and_values_is_what_is_measured(name: str) -> None:
    check_packed(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MODELS) - set(FAMILIES)))
def test_every_line_of_the_document_is_what_is_measured(name: str) -> None:
    check_native(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MODELS) - set(PACKED_FAMILIES)))
def test_every_line_of_packed_keys_and_values_is_what_is_measured(name: str) -> None:
    check_packed(name)


def test_the_document_has_a_line_for_every_model_tried_and_no_other() -> None:
    expected = table(NATIVE_HEAD, [])
    assert lines(NATIVE_HEAD)[:2] == expected
    listed = [line.split(" | ")[0] for line in lines(NATIVE_HEAD)[2:]]
    assert sorted(listed) == sorted(f"| {name}" for name in MODELS)


def test_what_is_not_plain_comes_first() -> None:
    plain = Verdict("plain", ("full",), "batched", ("in_place",), ("yes",) * 5)
    odd = replace(plain, name="odd", checks=("yes", "yes", "eager only", "yes", "yes"))
    alone = replace(
        plain, name="alone", served="one row at a time: why", checks=("yes", "", "yes", "yes", "yes")
    )
    refused = Verdict("refused", (), "refused: why")
    assert table(NATIVE_HEAD, [plain, odd, alone, refused])[2:] == list(
        map(str, (refused, alone, odd, plain))
    )
    packed = [
        PackedVerdict(name, cells) for name, cells in (("a", ("yes", "yes")), ("b", ("yes", "refused")))
    ]
    assert table(PACKED_HEAD, packed)[2:] == list(map(str, reversed(packed)))


def test_the_document_is_in_that_order() -> None:
    served = [line.split(" | ")[2].split()[0] for line in lines(NATIVE_HEAD)[2:]]
    assert served == sorted(served, key=["refused:", "one", "batched"].index)


def test_packed_keys_and_values_are_tried_for_every_model_that_is_served_with_any() -> None:
    assert lines(PACKED_HEAD)[:2] == table(PACKED_HEAD, [])
    served = [line.split(" | ") for line in lines(NATIVE_HEAD)[2:]]
    expected = [name for name, state, *_ in served if "full" in state or "sliding" in state]
    tried = [line.split(" | ")[0] for line in lines(PACKED_HEAD)[2:]]
    assert set(expected) <= set(tried)


def test_new_lines_take_the_place_of_the_old_ones_and_of_nothing_else() -> None:
    document = "before\n\n| a |\n|---|\n| old |\n\nbetween\n\n| b |\n|---|\n| kept |\n\nafter\n"
    found = written(document, {"| a |": ["| a |", "|---|", "| new |", "| more |"]})
    assert found == document.replace("| old |", "| new |\n| more |")


def test_every_model_file_of_mlx_lm_is_tried_or_named() -> None:
    package = find_spec("mlx_lm.models")
    assert package is not None
    assert package.origin is not None
    files = {
        path.stem
        for path in Path(package.origin).parent.glob("*.py")
        if "class ModelArgs" in path.read_text()
    }
    assert files == set(MODELS) | NOT_TRIED
    assert all(name in DOCUMENT.read_text() for name in NOT_TRIED)


def test_the_readme_counts_what_the_document_lists() -> None:
    served = [line.split(" | ")[2] for line in lines(NATIVE_HEAD)[2:]]
    counts = {
        start: sum(text.startswith(start) for text in served) for start in ("batched", "one row", "refused")
    }
    assert sum(counts.values()) == len(MODELS)
    assert (
        f"Of {len(MODELS)} text model files of mlx-lm that were tried, {counts['batched']} run batched, "
        f"{counts['one row']} a row at a time and {counts['refused']} are refused"
    ) in (DOCUMENT.parents[1] / "README.md").read_text()


def test_what_is_wrong_shows() -> None:
    line = str(Verdict("x", ("full",), "batched", ("gathered",), ("yes", "**no**", "yes", "yes", "**no**")))
    assert line == "| x | full | batched | gathered | yes | **no** | yes | yes | **no** |"
    assert str(PackedVerdict("x", ("refused", "**no**: warm"))) == "| x | refused | **no**: warm |"
