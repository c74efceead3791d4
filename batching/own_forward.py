"""Which forwards of a model are ours: what was put into it computes otherwise in these alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_own: ContextVar[bool] = ContextVar("is_own", default=False)


def is_own_forward() -> bool:
    return _is_own.get()


@contextmanager
def own_forward() -> Iterator[None]:
    """What models compute in the block, on this thread, is a forward of ours."""
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)
