"""A running request's place in the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlxd.batching.sampling_params import SamplingParams
from mlxd.caches.page_table import PageTable


@dataclass(slots=True, eq=False)
class Row:
    """What the runner needs to know of one running request.

    Attributes:
        row_id: unique in the life of the engine; a request that is preempted and resumed gets a new Row.
        sampling: checked already.
        seed: 64-bit, always set; draws depend on it and on the output index alone.
        prompt: the request's own prompt token ids.
        output: tokens generated so far, a live list (the scheduler appends).
        tables: one page table a group, in the memory plan's order; the scheduler grows them.
        num_reused: positions whose keys and values other rows left in the pages that the tables begin with;
            whole pages, never written by this row.
    """

    row_id: int
    sampling: SamplingParams
    seed: int
    prompt: Sequence[int]
    output: list[int]
    tables: tuple[PageTable, ...]
    num_reused: int = 0
