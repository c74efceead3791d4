"""KV budgets: bytes, or a share of what is free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd.caches.budget import MIN_BYTES, check_budget, parse_budget


@pytest.mark.parametrize(
    ("value", "free", "size"),
    [
        ("8GiB", 2**34, 2**33),
        ("512MiB", 2**34, 2**29),
        ("1.5 gib", 2**34, 3 * 2**29),
        ("2GB", 2**34, 2 * 10**9),
        (2**20, 2**20, 2**20),
        (0.5, 2**22, 2**21),
        (1.0, 2**22, 2**22),
    ],
)
def test_budgets_in_bytes_or_as_a_share(value: str | int | float, free: int, size: int) -> None:
    assert parse_budget(value, free) == size


NO_BUDGETS = (0, -1, 1, MIN_BYTES - 1, True, 0.0, -0.5, 1.01, float("nan"), float("inf"))


NO_BUDGET_TEXTS = ("", "8", "8G", "GiB", "-1GiB", "1e3MiB", "1KiB", "60%", "٣GiB", "8GiB ")


@pytest.mark.parametrize("value", NO_BUDGETS + NO_BUDGET_TEXTS)
def test_wrong_budgets_are_refused(value: str | int | float) -> None:
    with pytest.raises(ValueError, match=r"^is .*; it must be bytes from 1 MiB on"):
        check_budget(value)


@pytest.mark.parametrize(("value", "free"), [(2**21, 2**20), (0.5, 2**20), ("1GiB", 2**29)])
def test_a_budget_the_device_does_not_hold_is_refused(value: str | int | float, free: int) -> None:
    with pytest.raises(ValueError, match=f"to the {free} bytes that are free"):
        parse_budget(value, free)


@given(st.floats(0, 1, exclude_min=True), st.integers(MIN_BYTES, 2**45))
def test_a_share_never_exceeds_what_is_free(share: float, free: int) -> None:
    if int(share * free) >= MIN_BYTES:
        assert parse_budget(share, free) <= free
