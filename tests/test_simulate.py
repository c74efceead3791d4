"""`mlxd simulate`: traces, their mistakes, and what is printed."""

import re
from pathlib import Path

import pytest

from mlxd.batching.plan import DecodeEntry, StepPlan
from mlxd.batching.row import Row
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import cli, simulation, simulation_report
from mlxd.scheduler.cost_model import CostModel
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.simulation import Simulation
from mlxd.scheduler.trace import Trace

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "traces"
TENANTS = "version: 1\ntenants: [{name: a}, {name: b}]\n"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LOAD = "{tenant: a, per_s: 5, until_s: 4, prompt_tokens: [1, 9], output_tokens: [1, 5]}"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.yaml"
    path.write_text(text)
    return path


def row(length: int) -> Row:
    return Row(1, SamplingParams(), length, (1,), [], ())


@pytest.mark.parametrize(("index", "token"), [(0, 0), (2, 0), (3, 1)])
def test_the_last_token_of_a_row_is_the_one_that_ends_it(index: int, token: int) -> None:
    plan = StepPlan(1, (DecodeEntry(row(4), 10, index, None),))
    assert CostModel().run(plan).rows[0].token == token


def test_a_step_costs_by_rows_positions_and_prompt_tokens() -> None:
    cost = CostModel(
        decode_ms=10, decode_ms_per_row=2, decode_ms_per_1000_positions=100, prefill_ms_per_token=3
    )
    result = cost.run(StepPlan(1, (DecodeEntry(row(9), 499, 0, 1), DecodeEntry(row(9), 499, 0, 1))))
    assert result.decode_s == pytest.approx(0.010 + 0.004 + 0.100)
    assert (result.prefill_s, cost.run(StepPlan(1)).decode_s) == (0.0, 0.0)


def load(old: str = "", new: str = "") -> str:
    """A trace whose only load has `new` in place of `old`."""
    return f"{TENANTS}load: [{LOAD.replace(old, new) if old else LOAD}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (load("tenant: a", "tenant: c"), "load[0].tenant is 'c'; tenants has no such name"),
        (load("until_s: 4", "until_s: 0"), "load[0].until_s is 0; it must be above from_s, 0"),
        (load("[1, 9]", "[9, 1]"), "load[0].prompt_tokens is [9, 1]; the first must not be above"),
        (load("[1, 9]", "[1]"), "load[0].prompt_tokens is a list of 1; it must be a list of 2 entries"),
        (load("[1, 9]", "[1, x]"), "load[0].prompt_tokens[1] is 'x'; it must be an integer >= 1"),
        (
            load("per_s: 5", "per_s: 5, burst: 1000001"),
            "burst is 1000001; it must be an integer >= 1 and <= 1",
        ),
        (f"{TENANTS}replay: {{csv: r.csv, bursty: [a, c]}}", "replay.bursty[1] is 'c'; tenants has no such"),
        (load("per_s: 5", "per_s: 5, max_tokens: 2"), "max_tokens is 2; output_tokens go to 5"),
        (load("per_s: 5", "per_s: 0"), "load[0].per_s is 0; it must be a number > 0"),
        (load("until_s: 4", "until_s: 80000").replace("per_s: 5", "per_s: 90"), "the limit is 1000000"),
        (
            load("per_s: 5", "per_s: 50").replace("[1, 9]", "[1000000, 1048576]"),
            "load[0].per_s makes about 204858200 tokens; the limit is 100000000",
        ),
        (
            load("per_s: 5", "per_s: 5, burst: 1000000").replace("[1, 9]", "[200, 200]"),
            "load[0].per_s makes about 203000000 tokens; the limit is 100000000",
        ),
        (TENANTS, "load is empty and there is no replay"),
        ("version: 1\ntenants: [{name: a}, {name: a}]\n", "tenants[1].name is 'a'; tenants[0] has that"),
        (f"{TENANTS}lode: []", "lode is not a setting; did you mean load?"),
        (f"{TENANTS}replay: {{csv: none.csv}}", "none.csv: cannot be read: No such file"),
    ],
)
def test_a_wrong_trace_is_told_in_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["simulate", str(write(tmp_path, text))]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"mlxd: [^\n]+\n", error)
    assert message in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("TIMESTAMP,ContextTokens\n", "1: the column GeneratedTokens is missing"),
        (f"{HEADER}noon,1,2\n", "2: Invalid isoformat"),
        (f"{HEADER}2023-11-16 18:15:46,x,2\n", "2: ContextTokens is 'x'; it must be a number of tokens"),
        (f"{HEADER}2023-11-16 18:15:46,1,-2\n", "2: GeneratedTokens is '-2'; it must be a number of tokens"),
        (f"{HEADER}2023-11-16 18:15:46\n", "2: ContextTokens is ''; it must be a number of tokens"),
        (
            f"{HEADER}2023-11-16 18:15:46,{9**99},2\n",
            "2: ContextTokens is '29512665430652752148'; it must be",
        ),
        (
            f"{HEADER}2023-11-16 18:15:46,1048577,2\n",
            "2: ContextTokens is 1048577, with length_scale 1048577;",
        ),
        (
            HEADER + "2023-11-16 18:15:46,1000000,2\n" * 101,
            "101: with this row there are 100000200 tokens; the limit is 100000000; a smaller",
        ),
        (
            f"{HEADER}2023-11-16 18:15:46,1,2\n2023-11-16 18:15:46+01:00,1,2\n",
            "3: TIMESTAMP 2023-11-16 18:15:46+01:00 is before that of the first row",
        ),
    ],
)
def test_a_wrong_recording_is_told_with_its_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recorded.csv").write_text(content)
    trace = Trace.load_file(write(tmp_path, f"{TENANTS}replay: {{csv: recorded.csv}}"))
    with pytest.raises(ConfigError, match=re.escape(f"recorded.csv:{message}")):
        trace.arrivals(tmp_path)


def test_a_recording_is_scaled_and_bursty_tenants_send_all_of_a_span_at_once(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:00:{second:02}.5000000,100,{second + 1}\n" for second in range(60))
    (tmp_path / "r.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    replay = "{csv: r.csv, time_scale: 2, length_scale: 0.1, bursty: [b], burst_s: 30, limit: 50}"
    arrivals = Trace.load_file(write(tmp_path, f"{TENANTS}replay: {replay}")).arrivals(tmp_path)
    assert len(arrivals) == 50
    assert {len(a.submission.prompt) for a in arrivals} == {10}
    assert {a.submission.sampling.max_tokens for a in arrivals} == {1, 2, 3, 4, 5}
    times = {
        name: {a.submission.arrived_at for a in arrivals if a.submission.key.tenant == name} for name in "ab"
    }
    assert times["b"] <= {0.0, 30.0, 60.0, 90.0}
    assert times["a"] - {0.0, 30.0, 60.0, 90.0}
    assert max(times["a"] | times["b"]) <= 98.0


def test_however_long_a_simulation_is_its_samples_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace.load_file(write(tmp_path, f"{TENANTS}load: [{LOAD.replace('until_s: 4', 'until_s: 60')}]"))
    whole = Simulation(trace, trace.arrivals(tmp_path)).run()
    monkeypatch.setattr(simulation, "MAX_SAMPLES", 20)
    thinned = Simulation(trace, trace.arrivals(tmp_path)).run()
    assert len(whole.samples) > 50
    assert 5 <= len(thinned.samples) <= 12
    assert thinned.samples[0] == whole.samples[0]
    assert thinned.samples[-1] == whole.samples[-1]


def test_simulate_prints_each_tenant_under_each_policy_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, f"{TENANTS}load: [{LOAD}, {LOAD.replace('tenant: a', 'tenant: b')}]")
    plot = tmp_path / "plot.svg"
    options = ["--policy", "fair", "--policy", "fcfs", "--plot", str(plot)]
    assert cli.run(["simulate", str(path), *options]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("policy")] == ["policy fair", "policy fcfs"]
    assert len(re.findall(r"^[ab] +\d+ +\d+ stop +none ", out, re.MULTILINE)) == 4
    assert "</svg>" in plot.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "fair", "--policy", "best"], "--policy is 'best'; it must be fair or fcfs"),
        (["--plot", "none/x.png"], "none/x.png: cannot be written: there is no folder none"),
        (["--plot", "x.gif"], "--plot is 'x.gif'; its name must end in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_tried_or_drawn_is_told_before_anything_is_simulated(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, f"{TENANTS}load: [{LOAD}]")
    assert cli.run(["simulate", str(path), *options]) == 2
    assert capsys.readouterr() == ("", f"mlxd: {message}\n")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, f"{TENANTS}load: [{LOAD}]")
    monkeypatch.setattr(simulation_report, "find_spec", lambda name: None)
    assert cli.run(["simulate", str(path), "--plot", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr() == ("", "mlxd: --plot needs matplotlib: pip install matplotlib\n")


def test_a_plot_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, f"{TENANTS}load: [{LOAD}]")
    (tmp_path / "x.png").mkdir()
    assert cli.run(["simulate", str(path), "--plot", str(tmp_path / "x.png")]) == 2
    assert f"{tmp_path / 'x.png'}: cannot be written" in capsys.readouterr().err


def test_a_flood_leaves_the_other_tenant_its_pace() -> None:
    """The shipped example, two minutes of it: its first tokens wait for a row, not for the flood."""
    trace = Trace.load_file(EXAMPLES / "two_tenants.yaml")
    record = Simulation(trace, trace.arrivals(EXAMPLES)).run()
    assert max(record.tenants["victim"].first_tokens_s) < 10
    assert sorted(record.tenants["flood"].first_tokens_s)[-1] > 500
    assert record.largest_gap <= record.bound


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_shipped_traces_are_valid(path: Path) -> None:
    Trace.load_file(path)
