"""docs/models.md says what is measured, and of every model file."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from models_table import BEGIN, DOCUMENT, END, Verdict, judge, table
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


def lines() -> list[str]:
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_line_of_the_document_is_what_is_measured(name: str) -> None:
    assert str(judge(name)) in lines()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MODELS) - set(FAMILIES)))
def test_every_line_of_the_document_is_what_is_measured(name: str) -> None:
    assert str(judge(name)) in lines()


def test_the_document_has_a_line_for_every_model_tried_and_no_other() -> None:
    head = table([]).splitlines()
    assert lines()[: len(head)] == head
    assert [line.split(" | ")[0] for line in lines()[len(head) :]] == [f"| {name}" for name in MODELS]


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
    served = [line.split(" | ")[2] for line in lines()[2:]]
    counts = {
        start: sum(text.startswith(start) for text in served) for start in ("batched", "one row", "refused")
    }
    assert sum(counts.values()) == len(MODELS)
    assert (
        f"Of {len(MODELS)} text model files of mlx-lm that were tried, {counts['batched']} run batched, "
        f"{counts['one row']} a row at a time and {counts['refused']} are refused"
    ) in (DOCUMENT.parents[1] / "README.md").read_text()


def test_what_is_wrong_shows() -> None:
    line = str(Verdict("x", ("full",), "batched", ("gathered",), ("yes", "**no**", "yes", "yes")))
    assert line == "| x | full | batched | gathered | yes | **no** | yes | yes |"
