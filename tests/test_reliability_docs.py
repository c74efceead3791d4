"""docs/reliability.md names every report once, tests that exist, and scripts with options they have."""

import re

import pytest
from script_options import takes
from test_docs import ROOT, shell_commands
from test_scenarios import names_in

PAGE = ROOT / "docs/reliability.md"
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
REPORTS = (1, 2, 4, 6, 7, 9, 10, 11, 14, 15, 17, 18, 20, 23, 24, 26, 28, 30, 31, 32, 34, 36, 38, 40)


def test_every_report_has_its_row_in_order_with_a_link_of_its_own() -> None:
    assert tuple(int(number) for number, *_ in ROWS) == REPORTS
    links = {link for _, report, *_ in ROWS for link in re.findall(r"\]\((https://[^)]+)\)", report)}
    assert len(links) == len(REPORTS)


@pytest.mark.parametrize(("number", "proof"), [(number, proof) for number, _, _, proof, _ in ROWS])
def test_a_report_is_answered_by_tests_that_exist(number: str, proof: str) -> None:
    named = re.findall(r"`([^`]+)`", proof)
    assert named
    for test in named:
        file, _, name = test.partition("::")
        assert name.startswith("test_"), f"report {number} names {test}"
        assert name in names_in(file), f"report {number} names {test}"


def test_scripts_shown_exist_and_know_their_options() -> None:
    shown = [words for words in shell_commands(PAGE) if words[0] == "python"]
    assert shown
    for _, script, *arguments in shown:
        for option in (word for word in arguments if word.startswith("--")):
            assert takes(ROOT / script, option), f"{script} has no {option}"
