"""Who gets the name of somebody who is gone finds nothing of what that one kept under it."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlxd.caches.disk_store import DiskStore
from mlxd.caches.namespaces import Namespaces

SEVERAL: list[tuple[Sequence[str], Sequence[bool]]] = [
    (["a", "b"], [False, False]),
    (["b"], [True, False]),
    (["a", "b"], [True, False]),
    (["a"], [True, True]),
    (["a", "b", "c"], [True, True]),
]
"""The names in use, one change after another, and whether "a" and "b" are others' than at first."""


@pytest.mark.parametrize("restarts", [False, True])
def test_a_name_that_was_given_up_is_another_ones_from_then_on(tmp_path: Path, restarts: bool) -> None:
    """Also where it is given up between two processes."""
    path = tmp_path / "namespaces" if restarts else None
    names = Namespaces(path)
    first = {name: names[name] for name in "ab"}
    for in_use, others in SEVERAL:
        names = Namespaces(path) if restarts else names
        names.keep(set(in_use))
        assert [names[name] != first[name] for name in "ab"] == list(others)
    assert len({*first.values(), *(names[name] for name in "abc")}) == 5


def test_each_one_who_has_a_name_has_a_namespace_of_his_own() -> None:
    names, seen = Namespaces(), set[str]()
    for _ in range(5):
        names.keep({"a"})
        seen.add(names["a"])
        names.keep({"b"})
    assert len(seen) == 5


def test_nothing_is_written_where_nothing_changes(tmp_path: Path) -> None:
    names = Namespaces(tmp_path / "n")
    names.keep({"a", "b"})
    assert (tmp_path / "n").stat().st_mode & 0o777 == 0o600
    (tmp_path / "n").unlink()
    names.keep({"b", "a"})
    assert not (tmp_path / "n").exists()


def test_what_cannot_be_written_holds_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Namespaces(tmp_path / "n")
    names.keep({"a"})
    before = names["a"]

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for in_use in ({"b"}, {"a", "b"}):
        with pytest.raises(OSError, match="No space left"):
            names.keep(in_use)
    assert names["a"] != before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"in_use": ["a"], "given_up": {"a": "x"}}', b"\xff"])
def test_a_damaged_file_is_told_and_closes_the_store(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "namespaces").write_bytes(content)
    for _ in range(2):
        with pytest.raises(OSError, match=f"{tmp_path}/namespaces is damaged"):
            DiskStore(tmp_path, 10**6)
