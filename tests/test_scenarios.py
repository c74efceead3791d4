"""docs/scenarios.md names every scenario, and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from scheduling import running, submission
from test_admission import world_of

from mlxd.scheduler.events import Finished, Rejected

ROOT = Path(__file__).resolve().parents[1]
LINES = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", (ROOT / "docs/scenarios.md").read_text(), re.MULTILINE)
NUM_SCENARIOS = 62


@cache
def names_in(name: str) -> frozenset[str]:
    """Tests of a file, "test_x", "TestX" and "TestX::test_x"; a path from the root, or a name in tests/."""
    path = ROOT / name if "/" in name else ROOT / "tests" / name
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            methods = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.FunctionDef))
            found |= {f"{node.name}::{method.name}" for method in methods}
    return frozenset(found)


def test_every_scenario_has_its_line_in_order() -> None:
    assert [int(number) for number, _, _ in LINES] == list(range(1, NUM_SCENARIOS + 1))


@pytest.mark.parametrize(("number", "proof"), [(number, proof) for number, _, proof in LINES])
def test_a_scenario_is_shown_by_tests_that_exist_or_says_why_not(number: str, proof: str) -> None:
    named = re.findall(r"`([^`]+)`", proof)
    if not named:
        assert proof.startswith("does not apply: ")
    for test in named:
        file, _, name = test.partition("::")
        assert name in names_in(file), f"scenario {number} names {test}"
        assert re.fullmatch(r"(\w+::)?test_\w+|Test\w+", name), f"scenario {number} names {test}"


def test_a_test_that_is_not_there_is_not_found() -> None:
    assert "test_two_that_fit_run_and_a_third_waits_until_one_ends" in names_in("test_scenarios.py")
    assert "test_nothing" not in names_in("test_scenarios.py")
    assert "CacheConformance::test_nothing" not in names_in("caches/conformance.py")


def test_two_that_fit_run_and_a_third_waits_until_one_ends() -> None:
    """Half the pages each; what is larger than all of them is refused meanwhile."""
    world = world_of(pages=8)
    for name, max_tokens in (("a", 20), ("b", 24), ("c", 24)):
        world.submit(submission(name, (1,) * 40, max_tokens=max_tokens))
    refused = world.submit(submission("too large", (1,) * 100, max_tokens=30))
    assert isinstance(refused, Rejected)
    seen = []
    while not world.is_idle:
        ended = [event.key.request_id for event in world.events if isinstance(event, Finished)]
        world.turn()
        if "c" in running(world) and not seen:
            seen = ended
            assert running(world) == ["b", "c"]
        elif not seen:
            assert set(running(world)) <= {"a", "b"}
    assert seen == ["a"]
    world.run()
