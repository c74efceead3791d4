"""Memory plans for a runner without a model."""

from mlxd.caches.sizing import ENDLESS, GroupPlan, GroupSpec, MemoryPlan

_TOKEN_BYTES = 64


def fake_memory(
    *,
    max_rows: int = 32,
    max_model_len: int = 4096,
    chunk: int = 64,
    page_size: int = 16,
    num_pages: int | None = None,
    window: int | None = None,
    num_window_pages: int | None = None,
    has_full: bool = True,
    boundary: int = 0,
    has_state: bool = False,
    num_states: int | None = None,
) -> MemoryPlan:
    """A small memory plan of a full group, of a sliding one where `window` is given, and of one of states.

    Args:
        num_pages, num_window_pages, num_states: of the groups; None: what `max_rows` full rows need.
        boundary: positions, whole chunks, at which rows pass from one full group to another; 0: never.
    """
    specs: list[tuple[GroupSpec, int | None]] = []
    if has_full:
        specs += [(spec, num_pages) for spec in _full_groups(page_size, boundary)]
    if window is not None:
        sliding = GroupSpec(f"sliding:{window}", (1,), window, page_size, _TOKEN_BYTES)
        specs.append((sliding, num_window_pages))
    if has_state:
        specs.append((GroupSpec("state", (2,), None, ENDLESS, 0, state_bytes=512), num_states))
    groups = tuple(
        GroupPlan(spec, max_rows * spec.pages_for(max_model_len, chunk) if count is None else count)
        for spec, count in specs
    )
    return MemoryPlan(
        weights_bytes=0,
        budget_bytes=sum(group.capacity_bytes for group in groups),
        max_rows=max_rows,
        max_model_len=max_model_len,
        chunk=chunk,
        groups=groups,
    )


def _full_groups(page_size: int, boundary: int) -> list[GroupSpec]:
    full = GroupSpec("full", (0,), None, page_size, _TOKEN_BYTES)
    if not boundary:
        return [full]
    dense = GroupSpec(
        "full:dense", (0,), None, page_size, _TOKEN_BYTES, until=boundary, successor="full:packed"
    )
    return [dense, GroupSpec("full:packed", (0,), None, page_size, _TOKEN_BYTES // 4, since=boundary)]
