"""Sliding-window keys and values: pages that the window has left go back to the pool."""

from mlxd.caches.paged import PagedRows


class RotatingRows(PagedRows):
    """One sliding-window layer, all rows.

    Its pages are those of full attention; what rotates is the table, whose oldest pages the scheduler hands
    back (`PageTable.release_before`). So a row costs at most the window, rounded to pages, whatever its
    length, and the step masks what is still in a page but no longer in the window.
    """

    @property
    def window(self) -> int:
        window = self.group.spec.window
        assert window is not None, "a rotating layer needs a window"
        return window

    def signature(self) -> str:
        return f"kv:paged-rotating:{self.window}:{self.group.spec.page_size}"

    def is_trimmable(self) -> bool:
        """Only until the first page left the window: a position before it could not be resumed."""
        return all(table.first_page == 0 for table in self.group.tables)

    def trim(self, num_tokens: int, *, bypass: bool = False) -> None:
        """Drop the newest positions; `bypass` allows it although pages are gone, while the window's are held.

        Raises:
            ValueError: not trimmable, or the window of the new last position reaches into pages handed back.
        """
        if not bypass and not self.is_trimmable():
            raise ValueError("pages have left the window: rows can no longer be trimmed")
        for table, offset in zip(self.group.tables, self.row_offsets, strict=True):
            oldest = max(0, offset - num_tokens - self.window)
            if oldest < table.start:
                raise ValueError(f"cannot drop {num_tokens}: position {oldest} was handed back")
        super().trim(num_tokens)
