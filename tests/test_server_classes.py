"""Classes and deadlines on real sockets."""

from pathlib import Path

import pytest
from wire_daemon import daemon, runner

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.errors import InvalidParamError, RequestFailedError


def test_a_request_of_a_higher_class_overtakes(tmp_path: Path) -> None:
    tenant = {"max_running": 1, "max_priority": "interactive"}
    with daemon(tmp_path, runner=runner(0.005), tenant=tenant) as served, served.submit() as peer:
        for name, priority in (("first", "normal"), ("batch", "batch"), ("urgent", "interactive")):
            sampling = {"max_tokens": 16, "ignore_eos": True}
            peer.send("generate", id=name, prompt="hi", sampling=sampling, priority=priority, stream=False)
        done: list[str] = []
        while len(done) < 3:
            message = peer.receive()
            done += [message["id"]] if message["type"] == "done" else []
        assert done.index("urgent") < done.index("batch")


def test_a_request_ends_at_its_deadline_with_a_code_of_its_own(tmp_path: Path) -> None:
    with daemon(tmp_path, runner=runner(0.01)) as served, served.client() as client:
        sampling = SamplingParams(max_tokens=2000, ignore_eos=True)
        with pytest.raises(RequestFailedError) as caught:
            client.generate("hi", sampling, deadline_ms=150)
        assert caught.value.code == "expired"
        assert served.metric("mlxd_requests_total", tenant="acme", outcome="expired") == 1
        chunks = client.stream("hi", sampling, deadline_ms=60_000, priority="batch")
        assert next(chunks).token_ids
        chunks.close()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"priority": "urgent"}, "priority"),
        ({"priority": 1}, "priority"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 86_400_001}, "deadline_ms"),
        ({"deadline_ms": 1.5}, "deadline_ms"),
    ],
)
def test_what_is_no_class_or_deadline_is_refused_by_name(
    tmp_path: Path, fields: dict[str, object], field: str
) -> None:
    with daemon(tmp_path) as served, served.submit() as peer:
        reply = peer.ask("generate", id="x", prompt="hi", **fields)
        assert (reply["type"], reply["code"], reply["field"]) == ("error", "invalid_param", field)


def test_a_client_hears_of_a_wrong_class_as_a_wrong_parameter(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.client() as client, pytest.raises(InvalidParamError):
        client.generate("hi", priority="urgent")  # type: ignore[arg-type]


def test_only_operators_see_how_tenants_are_served_beside_each_other(tmp_path: Path) -> None:
    with daemon(tmp_path) as served:
        with served.client("acme") as client:
            assert client.status().fairness is None
        with served.client("admin") as client:
            fairness = client.status().fairness
            assert fairness is not None
            assert (fairness.service_gap, fairness.jain_index) == (0.0, 1.0)
