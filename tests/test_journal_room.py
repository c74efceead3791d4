"""Each tenant's part of the journal, and what is for whoever comes first."""

import random

import pytest

from mlxd.scheduler.errors import JournalError
from mlxd.scheduler.events import RequestKey
from mlxd.scheduler.journal_room import JournalRoom

TENANTS = ("a", "b", "c", "d")


def room(max_bytes: int = 800) -> JournalRoom:
    """A part is 100, what is for all 400."""
    made = JournalRoom(max_bytes)
    made.keep(TENANTS)
    return made


def key(tenant: str, number: int = 0) -> RequestKey:
    return RequestKey(tenant, str(number))


@pytest.mark.parametrize(
    ("held", "tenant", "num_bytes", "fits"),
    [
        ({}, "a", 500, True),
        ({}, "a", 501, False),
        ({"a": 500}, "b", 100, True),
        ({"a": 500}, "b", 101, False),
        ({"a": 300, "b": 300}, "c", 100, True),
        ({"a": 300, "b": 300}, "c", 101, False),
        ({"a": 300, "b": 299}, "c", 101, True),
    ],
)
def test_a_part_is_its_tenants_and_the_rest_is_for_all(
    held: dict[str, int], tenant: str, num_bytes: int, fits: bool
) -> None:
    made = room()
    for name, size in held.items():
        made.put(key(name), size)
    if fits:
        made.put(key(tenant, 1), num_bytes)
        return
    with pytest.raises(JournalError, match=f"tenant '{tenant}' would hold {num_bytes} bytes .* part is 100"):
        made.put(key(tenant, 1), num_bytes)
    assert made.size_of(key(tenant, 1)) == 0


def test_a_request_that_shrinks_always_fits_and_one_that_grows_is_looked_at() -> None:
    made = room()
    made.put(key("a"), 500)
    made.put(key("a"), 400)
    made.put(key("a"), 500)
    with pytest.raises(JournalError):
        made.put(key("a"), 501)
    assert made.size_of(key("a")) == 500


def test_what_is_undone_is_as_it_was() -> None:
    made = room()
    made.put(key("a"), 300)
    made.settle()
    made.put(key("a"), 100)
    made.put(key("b", 1), 200)
    made.set(key("a"), 0)
    made.undo()
    assert [made.size_of(key("a")), made.size_of(key("b", 1))] == [300, 0]
    made.put(key("c"), 300)
    with pytest.raises(JournalError):
        made.put(key("d"), 101)


def test_what_tenants_that_are_gone_held_is_for_the_others() -> None:
    made = room()
    made.put(key("a"), 500)
    assert made.keep(("b", "c")) == ("a",)
    made.put(key("b"), 600)
    made.put(key("c"), 200)
    with pytest.raises(JournalError):
        made.put(key("c"), 201)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_within_its_part_is_refused_and_nothing_exceeds_the_room(seed: int) -> None:
    dice = random.Random(seed)
    made = room()
    sizes: dict[RequestKey, int] = {}
    for _ in range(500):
        one = key(dice.choice("aaabcd"), dice.randrange(8))
        num_bytes = dice.choice((0, 10, 40, 90, 250))
        before = {tenant: sum(sizes[k] for k in sizes if k.tenant == tenant) for tenant in TENANTS}
        after = before[one.tenant] - sizes.get(one, 0) + num_bytes
        try:
            made.put(one, num_bytes)
            sizes[one] = num_bytes
        except JournalError:
            assert after > max(100, before[one.tenant])
        made.settle()
        made.set(key(dice.choice("abcd"), 1), dice.choice((0, 500)))
        made.undo()
        assert sum(sizes.values()) <= 800
        assert all(made.size_of(each) == size for each, size in sizes.items())
