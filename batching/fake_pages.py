"""Pages of a runner without a model: hashes in place of keys and values, so that a mix-up shows."""

from array import array
from collections.abc import Sequence

from mlxd.batching.plan import RestoredPage, StepPlan
from mlxd.batching.plan_rules import PlanError
from mlxd.batching.row import Row


class FakePages:
    """What each page of each group holds: a hash a position, or a state's last one.

    A position's hash is that of all tokens up to it and never 0, which stands for nothing. What a row reads
    must be what it, or whoever left it pages to reuse, wrote for the same tokens.

    Args:
        checks: whether pages are looked at; else they are only copied, zeroed and filled.
    """

    def __init__(self, num_groups: int, *, checks: bool) -> None:
        self._checks = checks
        self._pages: list[dict[int, list[int]]] = [{} for _ in range(num_groups)]

    def clear(self) -> None:
        for pages in self._pages:
            pages.clear()

    def prepare(self, plan: StepPlan) -> None:
        """Copies, with all origins read first, then zeroes, then fills what `plan` says.

        Raises:
            PlanError: a page that nobody wrote is copied.
        """
        for group, pairs in enumerate(plan.copies):
            pages = self._pages[group]
            if self._checks and any(origin not in pages for origin, _ in pairs):
                raise PlanError(f"step {plan.step_id}: of {pairs}, group {group}, an origin is empty")
            pages |= [(page, list(pages[origin])) for origin, page in pairs if origin in pages]
        for pages, scrubbed in zip(self._pages, plan.scrub, strict=True):
            for page in scrubbed:
                pages.pop(page, None)
        for restored in plan.restored:
            self._restore(restored)

    def _restore(self, restored: RestoredPage) -> None:
        self._pages[restored.group][restored.page] = array("Q", bytes(restored.payload)).tolist()

    def export(self, pages: Sequence[tuple[int, int]]) -> list[bytes]:
        """Payloads of these pages, (group, page id); a page that is not full is never shared.

        Raises:
            PlanError: a page is not full.
        """
        payloads = []
        for group, page in pages:
            held = self._pages[group].get(page, [0])
            if self._checks and not all(held):
                raise PlanError(f"page {page} of group {group} is exported and is not full")
            payloads.append(array("Q", held).tobytes())
        return payloads

    def write(self, row: Row, history: Sequence[int], start: int) -> None:
        """Put positions from `start` on into the row's pages, once it was seen what attention would read.

        Args:
            history: the hash of each position of the row, the new ones included.
        Raises:
            PlanError: a page does not hold what the row wrote before, is not zeroed, or not the row's.
        """
        if not self._checks:
            return
        for group, table in enumerate(row.tables):
            if table.spec.state_bytes:
                self._write_state(row, history, group, start)
            elif table.spec.serves(start):
                self._write_pages(row, history, group, start)

    def _write_state(self, row: Row, history: Sequence[int], group: int, start: int) -> None:
        [slot] = row.tables[group].pages
        found = self._pages[group].get(slot, [0])
        if found != [history[start - 1] if start else 0]:
            raise PlanError(f"row {row.row_id}: slot {slot} does not hold its state before position {start}")
        self._pages[group][slot] = [history[-1]]

    def _write_pages(self, row: Row, history: Sequence[int], group: int, start: int) -> None:
        table, end = row.tables[group], len(history)
        size, first = table.spec.page_size, table.spec.first_live_page(start)
        if not table.first_page <= first or not end <= table.end:
            raise PlanError(
                f"row {row.row_id}: {first * size}..{end} not in pages {table.start}..{table.end}"
            )
        for index in range(first, -(-end // size)):
            self._write_page(row, history, group, index, start)
        if end == table.spec.until:
            self._hand_over(row, history, group + 1)

    def _write_page(self, row: Row, history: Sequence[int], group: int, index: int, start: int) -> None:
        """The part of the row's page number `index` from position `start` on; what is before is read."""
        table, pages = row.tables[group], self._pages[group]
        size, page_id = table.spec.page_size, table.page(index)
        low, high = index * size, min((index + 1) * size, len(history))
        if low >= start and page_id in pages:
            raise PlanError(f"row {row.row_id}: page {page_id} of group {group} was not scrubbed")
        page = pages.setdefault(page_id, [0] * size)
        if page[: max(0, start - low)] != history[low : min(start, high)]:
            raise PlanError(f"row {row.row_id}: positions from {low} do not hold what it wrote")
        fresh = max(start, low)
        if any(page[fresh - low :]):
            raise PlanError(f"row {row.row_id}: position {fresh} or a later one is written again")
        page[fresh - low : high - low] = history[fresh:high]

    def _hand_over(self, row: Row, history: Sequence[int], group: int) -> None:
        """All that the row has passes into the pages of its next group."""
        table, size = row.tables[group], row.tables[group].spec.page_size
        for index in range(table.first_page, len(history) // size):
            page = table.page(index)
            if self._pages[group].setdefault(page, [0] * size) != [0] * size:
                raise PlanError(f"row {row.row_id}: page {page} of group {group} was not scrubbed")
            self._pages[group][page] = list(history[index * size : (index + 1) * size])
