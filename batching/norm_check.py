"""The kernel that adds and norms against built-in operations, in the shapes in which a model asked for it."""

from collections.abc import Iterable

import mlx.core as mx

from mlxd.batching.kernel_check import LIMITS, relative_errors
from mlxd.batching.norm_kernel import NormCase, add_and_norm
from mlxd.caches.model_faults import summary_of

_ROWS = (1, 3, 40)


def expected(
    case: NormCase, first: mx.array, second: mx.array, weight: mx.array
) -> tuple[mx.array, mx.array]:
    """What built-in operations make of it: the sum in the dtype of the terms, float32 what was normed."""
    total = (first.astype(mx.float32) + second.astype(mx.float32)).astype(case.dtype)
    return total, mx.fast.rms_norm(total.astype(mx.float32), weight.astype(mx.float32), case.eps)


def fault_in(cases: Iterable[NormCase]) -> str | None:
    """What the kernel does wrong, or None."""
    faults = (_fault(case, rows) for case in cases for rows in _ROWS)
    return next((fault for fault in faults if fault is not None), None)


def _fault(case: NormCase, rows: int) -> str | None:
    key = mx.random.key(rows)
    first, *wide = mx.random.normal((3, rows, 1, case.dims), key=key).astype(case.dtype)
    second = mx.concatenate(wide, axis=-1)[..., 1 : case.dims + 1]  # neither together nor aligned
    weight = mx.random.normal((case.dims,), key=key).astype(case.weight_dtype)
    try:
        found = add_and_norm(case, first, second, weight)
        mx.eval(found)
    except (RuntimeError, ValueError) as error:
        return f"{summary_of(error)} in {case}"
    for name, array, right in zip(("sum", "norm"), found, expected(case, first, second, weight), strict=True):
        worst = max(relative_errors(array, right))
        if not worst <= LIMITS[case.dtype]:
            return f"the {name} of {rows} rows is off by {worst:.2g} of it in {case}"
    return None
