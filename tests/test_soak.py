"""After thousands of requests nothing is left of them: `python tests/soak.py` sends ten thousand."""

import gc
from collections import Counter
from pathlib import Path

import pytest
from memory_trace import MemoryTrace
from soak import KINDS, soak
from wire_daemon import Daemon, config, runner, wait_until

from mlxd.batching.row import Row
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.answer import Answer
from mlxd.scheduler.client import Client
from mlxd.scheduler.request import Request
from mlxd.scheduler.session import Session

TRACKED = (Request, Row, Answer, Session)
"""What there is one of for each request or client while it is open."""
ONE_A_LOOP = Counter({"Session": 3})
"""Readers of both doors and the heartbeat still name whom they served last."""


def tracked() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, TRACKED))


def ask_in_every_way(client: Client, number: int) -> None:
    for sampling in (SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, stop=("a",), top_logprobs=1)):
        client.generate("hi", sampling)
        list(client.stream("hi", sampling))
    stream = client.stream("hi", SamplingParams(max_tokens=4_000), request_id=str(number))
    next(stream)
    stream.close()


def test_an_idle_daemon_holds_no_object_of_the_requests_it_served(tmp_path: Path) -> None:
    before = tracked() + ONE_A_LOOP
    with Daemon(config(tmp_path), runner(0.0005)) as served:
        served.wait_ready()
        for number in range(40):
            with served.client(("acme", "beta")[number % 2]) as client:
                ask_in_every_way(client, number)
        wait_until(lambda: served.metric("mlxd_clients_connected") == 0)
        wait_until(lambda: not tracked() - before)


def test_a_soaked_daemon_holds_nothing_and_grows_by_nothing(tmp_path: Path) -> None:
    """The limit is wide as the machine may be busy; the script's own is 2 s."""
    report = soak(tmp_path, 200, 20, seed=2, max_rest_s=20.0)
    assert report.faults == ()
    assert (report.requests, report.kinds.keys()) == (200, KINDS.keys())


@pytest.mark.slow
def test_a_daemon_soaked_for_long_holds_nothing_and_grows_by_nothing(tmp_path: Path) -> None:
    assert soak(tmp_path, 10_000, 200, seed=3, max_rest_s=20.0).faults == ()


@pytest.mark.parametrize(
    ("held", "slope"),
    [
        ([9, 5, 5, 5, 5, 5], 0.0),
        ([0, 0, 0, 3, 6, 9], 3.0),
        ([1, 2, 3, 3, 3, 3, 3, 90, 3, 3], 0.0),
    ],
    ids=["what is allocated once", "what grows", "a peak"],
)
def test_the_slope_is_that_of_the_later_half_without_peaks(held: list[int], slope: float) -> None:
    memory = MemoryTrace(pid=0)
    memory.samples = list(enumerate(held))
    assert memory.slope() == slope
