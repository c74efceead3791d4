"""What benchmarks count and compare; they measure elsewhere."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import azure  # noqa: E402
import plots  # noqa: E402
import step_profile  # noqa: E402
from decode import Case  # noqa: E402
from decode_table import print_table  # noqa: E402
from entry import BenchmarkError  # noqa: E402
from figures import quantile, read_lines, record  # noqa: E402
from options import Parser, add_output  # noqa: E402
from script_options import takes  # noqa: E402
from server_load import Answer, Ask, WrongCountError, closed_loop, figures, open_loop, same  # noqa: E402
from servers import Piece  # noqa: E402
from traffic import Arrival, poisson, serve, wave  # noqa: E402

DOCUMENTS = (*sorted(BENCHMARKS.glob("*.py")), ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMAND = re.compile(r"python benchmarks/(\w+\.py)((?:[^`\n]*\\\n)*[^`\n]*)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_benchmarks_that_are_named_exist_with_their_options(path: Path) -> None:
    for name, arguments in COMMAND.findall(path.read_text()):
        for option in re.findall(r"--[a-z-]+", arguments):
            assert takes(BENCHMARKS / name, option), f"{path.name} shows {name} with {option}"


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.5, 3), (0.99, 4), (1.0, 4)], ids=lambda value: str(value)
)
def test_a_quantile_is_one_of_the_values(share: float, expected: int) -> None:
    assert quantile([4, 1, 3, 2], share) == expected


def test_lines_are_read_as_they_were_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["some.py"])
    parser = Parser("What it is.")
    add_output(parser, "some")
    options = parser.options()
    lines = [{"kind": "a", "ms": 1.5}, {"kind": "b"}]
    for line in lines:
        record(line, options.out, quiet=True)
    assert read_lines([tmp_path / "some.jsonl"], "b") == lines


@pytest.mark.parametrize(
    ("rows", "shape", "expected"),
    [(1, "ragged", [100]), (3, "aligned", [100, 100, 100]), (3, "ragged", [100, 75, 50])],
)
def test_ragged_rows_go_from_all_of_the_context_to_half_of_it(
    rows: int, shape: str, expected: list[int]
) -> None:
    assert Case(rows, 100, shape).lengths == expected


def test_the_recording_is_scaled_in_time_and_length(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.0000000,100,10\n"
        "2023-11-16 18:15:48.5000000,300,1\n"
    )
    assert list(azure.recorded(path, 2.0, 0.5)) == [(0.0, 50, 5), (5.0, 150, 2)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", " has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", " has no requests"),
        ("a,b\n1,2\n", ":2: no request with TIMESTAMP, ContextTokens, GeneratedTokens"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,100,many\n",
            ":2: no request with TIMESTAMP, ContextTokens, GeneratedTokens",
        ),
    ],
    ids=["empty", "no rows", "other columns", "no number"],
)
def test_a_file_that_is_no_recording_is_told(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(BenchmarkError) as error:
        list(azure.recorded(path, 1.0, 1.0))
    assert str(error.value) == f"{path}{told}"


def test_the_table_has_each_case_with_fixed_decimals_and_tells_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = {"model": "m", "rows": 8, "context": 64, "lengths": "aligned"}
    speeds = {"tokens_per_s": 1000.0, "ms_per_step": 8.0, "floor_ms": 2.5}
    machine = {"device": "cpu", "blas": "b", "mlx": "1", "mlx_lm": "2", "read_gb_per_s": 30.0}
    print_table(
        [
            {"kind": "machine", **machine},
            {"kind": "skipped", **case, "rows": 9, "reason": "needs 9 GB"},
            {"kind": "steady", **case, "side": "mlxd", **speeds},
            {"kind": "steady", **case, "side": "mlx-lm", **speeds, "tokens_per_s": 500.0},
            {"kind": "ratio", **case, "mlxd_over_mlx_lm": 2.0},
        ]
    )
    told = " ".join(capsys.readouterr().out.split())
    assert "1000.0 │ 500.0 │ 2.00 │ 8.00 │ 2.50" in told
    assert "needs 9 GB" in told
    assert "device cpu" in told


class OneTokenAStep:
    """An engine that gives each open request a token a step, at most `max_rows` of them."""

    name = "fake"

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._left: dict[int, int] = {}

    def add(self, request: int, prompt: Sequence[int], num_tokens: int) -> None:
        self._left[request] = num_tokens

    def step(self) -> list[int]:
        got = list(self._left)[: self._max_rows]
        for request in got:
            self._left[request] -= 1
        self._left = {request: left for request, left in self._left.items() if left}
        return got

    def drain(self) -> None:
        assert not self._left


@pytest.mark.parametrize(
    "arrivals", [wave(6, 3, 4, 50, seed=0), poisson(20, 5_000, 4, 6, 50, seed=0)], ids=["wave", "poisson"]
)
def test_every_token_of_an_arrival_is_counted_after_it_came(arrivals: list[Arrival]) -> None:
    served = serve(OneTokenAStep(2), arrivals, 2)
    assert [len(times) for times in served.tokens_at] == [arrival.num_tokens for arrival in arrivals]
    assert all(times[0] >= each.at_s for times, each in zip(served.tokens_at, arrivals, strict=True))
    assert served.full_tokens <= sum(arrival.num_tokens for arrival in arrivals)
    assert served.figures(arrivals)["ttft_p99_s"] >= served.figures(arrivals)["ttft_p50_s"] >= 0


def test_full_time_is_that_with_as_many_open_requests_as_rows() -> None:
    served = serve(OneTokenAStep(2), [Arrival(0.0, (1, 2), tokens) for tokens in (3, 3, 2)], 2)
    assert served.full_tokens == 6, "the last one is alone"


class Echo:
    """A server that answers with the words of the prompt, or miscounts."""

    name, pid = "echo", 0

    def __init__(self, extra_tokens: int = 0) -> None:
        self._extra_tokens = extra_tokens
        self.open = self.most_open = 0

    async def start(self) -> None: ...

    async def end(self) -> int:
        return 0

    async def stream(self, prompt: str, num_tokens: int) -> AsyncIterator[Piece]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for word in prompt.split()[:num_tokens]:
            await asyncio.sleep(0)
            yield Piece(f" {word}")
        self.open -= 1
        yield Piece("", len(prompt.split()), num_tokens + self._extra_tokens)


ASKS = [Ask(0.001 * number, f" a b c{number}", 3, 2 + number % 2) for number in range(7)]


@pytest.mark.parametrize("num_clients", [1, 3])
def test_a_closed_loop_has_no_more_requests_open_than_clients(num_clients: int) -> None:
    server = Echo()
    answers = asyncio.run(closed_loop(server, ASKS, num_clients))
    assert server.most_open == num_clients
    assert [answer.ask for answer in answers] == ASKS
    assert figures(answers)["requests"] == len(ASKS)


def test_first_tokens_of_an_open_loop_count_from_when_requests_were_due() -> None:
    answers = asyncio.run(open_loop(Echo(), ASKS))
    assert [answer.asked_s for answer in answers] == [ask.at_s for ask in ASKS]
    assert all(answer.pieces_s[0] >= answer.asked_s for answer in answers)


def test_a_server_that_counts_other_tokens_ends_the_benchmark() -> None:
    with pytest.raises(WrongCountError, match=r"echo counted 3 \+ 3 tokens where 3 \+ 2 were due"):
        asyncio.run(closed_loop(Echo(extra_tokens=1), ASKS[:1], 1))


def test_answers_are_compared_up_to_their_first_difference() -> None:
    one = [Answer(ASKS[0], 0.0, text=text) for text in (" abcd", "abcd", "")]
    other = [Answer(ASKS[0], 0.0, text=text) for text in ("abcd", "abxd", "")]
    assert same(one, other) == {"same_answers": 2, "same_until": 0.833}


SIDES = {"model": "m", "rows": 8, "context": 64, "lengths": "aligned", "load": 0.7, "length": 100}
DRAWN = {
    "decode": [
        SIDES | {"kind": "steady", "side": side, "ms_per_step": 2.0, "floor_ms": 1.0}
        for side in ("mlxd", "mlx-lm")
    ],
    "arrivals": [
        SIDES | {"kind": kind, "side": side, "tokens_per_s": 9.0, "gap_p50_ms": 1.0, "gap_p99_ms": 3.0}
        for side in ("mlxd", "mlx-lm")
        for kind in ("waves", "poisson")
    ]
    + [
        SIDES | {"kind": "join_leave", "side": side, "join_ms": 2.0, "leave_ms": 1.0}
        for side in ("mlxd", "mlx-lm")
    ],
    "serve": [
        SIDES
        | {"kind": "load", "load": "open", "side": side, "tokens_per_s": 9.0}
        | dict.fromkeys(("ttft_p50_s", "ttft_p99_s", "itl_p50_ms", "itl_p99_ms"), 1.0)
        for side in ("mlxd", "mlx_lm.server")
    ],
    "breakdown": [
        SIDES
        | {
            "kind": kind,
            "part": part,
            "one_graph": True,
            "build_ms": 1.0,
            "launch_ms": 1.0,
            "wait_ms": 3.0,
            "cpu_ms": 4.0,
        }
        for kind in ("whole", "part")
        for part in ("products", "attention", "sampling, greedy")
    ]
    + [SIDES | {"kind": "host", "schedule_ms": 1.0, "text_ms": 1.0}],
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_plot_needs_nothing_but_the_lines(name: str, tmp_path: Path) -> None:
    getattr(plots, f"draw_{name}")(DRAWN[name], tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png", f"{name}.svg"}


@pytest.mark.parametrize("name", ["arrivals", "serve"])
def test_a_run_that_was_broken_off_is_told_where_it_lacks_a_side(name: str, tmp_path: Path) -> None:
    half = [line for line in DRAWN[name] if line["side"] == "mlxd"]
    with pytest.raises(BenchmarkError, match=r"^there is no line of side mlx.lm.* to draw$"):
        getattr(plots, f"draw_{name}")(half, tmp_path / name)


@pytest.mark.parametrize("name", DRAWN)
def test_where_nothing_was_measured_there_is_nothing_to_draw(name: str, tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="there is nothing to draw: no line of kind"):
        getattr(plots, f"draw_{name}")([{"kind": "machine"}, {"kind": "skipped"}], tmp_path / name)


def test_kernels_of_a_step_are_summed_by_what_they_do() -> None:
    product = "custom_kernel_mlxd_product_1a_2"
    kernels = [
        step_profile.Kernel(product, 0.0, 10.0),
        step_profile.Kernel("rms_norm_small", 8.0, 4.0),  # beside the one before
        step_profile.Kernel(product, 20.0, 30.0),
        step_profile.Kernel("binary_vv<Add>", 60.0, 5.0),
    ]
    assert step_profile.busy_us(kernels) == 12.0 + 30.0 + 5.0
    first, *others = step_profile.by_name(kernels, num_steps=2)
    assert first == {
        "part": "products",
        "kernel": product,
        "launches": 1.0,
        "us": 20.0,
        "longest_us": 30.0,
        "ms_a_step": 0.02,
    }
    assert {line["part"] for line in others} == {"norm", "other"}
    assert step_profile.by_part([first, *others]) == {"norm": 0.002, "other": 0.003, "products": 0.02}
