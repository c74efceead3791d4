"""Waiting for a blocking call in a way that can be given up."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

_Result = TypeVar("_Result")
_POLL_S = 0.2


def wait_for(call: Callable[[], _Result], while_waiting: Callable[[], None]) -> _Result:
    """What `call` returns or raises. It runs on a thread of its own.

    Args:
        while_waiting: called again and again. Where it raises, that thread is left behind; no process waits
            for it.
    """
    future: Future[_Result] = Future()
    Thread(target=_fulfil, args=(future, call), daemon=True).start()
    while not wait([future], timeout=_POLL_S).done:
        while_waiting()
    return future.result()


def _fulfil(future: Future[_Result], call: Callable[[], _Result]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # it is raised again where the future is read
        future.set_exception(error)
