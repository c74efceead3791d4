"""Speculative rounds: how far each row goes back when a round is undone."""

from collections.abc import Sequence

from mlxd.caches.page_table import PageTable


def offsets_kept(before: Sequence[int] | None, now: Sequence[int], keep: Sequence[int]) -> tuple[int, ...]:
    """Where rows are that keep the first keep[i] positions which they appended since `before`.

    Raises:
        ValueError: no round is open, or a row would keep more than it appended.
    """
    if before is None:
        raise ValueError("no speculative round is open")
    for begun, offset, kept in zip(before, now, keep, strict=True):
        if not 0 <= kept <= offset - begun:
            raise ValueError(f"keep is {kept}; the row appended {offset - begun} positions in this round")
    return tuple(begun + kept for begun, kept in zip(before, keep, strict=True))


def check_window(table: PageTable, offset: int) -> None:
    """Raises ValueError where a row's next position would read pages that were handed back."""
    if table.spec.first_live_page(offset) < table.first_page:
        raise ValueError(f"a row cannot go back to position {offset}: its window was handed back")
