"""What the client verbs print, against a scripted daemon and a real one."""

import io
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from daemon_process import write_config
from msgspec import UNSET
from severed import Relay
from wire_daemon import TENANTS, Daemon, config, runner, token
from wire_daemon import daemon as wire_daemon

from mlxd.batching.plan import TokenLogprobs
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import cli
from mlxd.scheduler.access import Access
from mlxd.scheduler.errors import InvalidParamError, RejectedError, RequestFailedError
from mlxd.scheduler.events import Usage
from mlxd.scheduler.results import Completion
from mlxd.scheduler.testing import FakeDaemon, Reply

Capture = pytest.CaptureFixture[str]
FULL = RejectedError("queue_full", "the queue is full", retryable=True, retry_after_ms=10)
PARIS = Completion(" Paris.", (7042, 30), "length", Usage(5, 2))


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Reply]], FakeDaemon]:
    """Makes every verb talk to a daemon that gives these replies."""

    def script(replies: Sequence[Reply]) -> FakeDaemon:
        fake = FakeDaemon(replies)
        monkeypatch.setenv("MLXD_TOKEN", "t")
        monkeypatch.setattr(Access, "client", lambda self: fake.client(timeout_s=self.timeout_s))
        monkeypatch.setattr(Access, "async_client", lambda self: fake.async_client(timeout_s=self.timeout_s))
        return fake

    return script


Script = Callable[[Sequence[Reply]], FakeDaemon]


def test_one_prompt_is_printed_as_it_comes(daemon: Script, capsys: Capture) -> None:
    fake = daemon(["Paris is the capital."])
    assert cli.run(["generate", "The capital of France?"]) == 0
    assert capsys.readouterr().out == "Paris is the capital.\n"
    assert fake.requests[0].prompt == "The capital of France?"


def test_options_reach_the_daemon(daemon: Script) -> None:
    fake = daemon(["x"])
    values = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "seed": 7,
    }
    options = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--stop", "a", "--stop", "b", "--logprobs", "2", "--json"]
    assert cli.run(["generate", *options, "p"]) == 0
    assert fake.requests[0].sampling == SamplingParams(**values, stop=("a", "b"), top_logprobs=2)  # type: ignore[arg-type]


def test_a_class_and_a_deadline_reach_the_daemon(daemon: Script, capsys: Capture) -> None:
    fake = daemon(["x", "y"])
    assert cli.run(["generate", "--priority", "batch", "--deadline", "1.5", "p"]) == 0
    assert cli.run(["generate", "p"]) == 0
    assert [(r.priority, r.deadline_ms) for r in fake.requests] == [("batch", 1500), ("normal", UNSET)]
    assert cli.run(["generate", "--priority", "urgent", "p"]) == 2
    assert "'urgent' is not one of 'interactive', 'normal', 'batch'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "turns"),
    [
        (["--chat"], [("user", "p")]),
        (["--system", "s"], [("system", "s"), ("user", "p")]),
        (["--chat", "--system", "s"], [("system", "s"), ("user", "p")]),
    ],
    ids=["chat", "system", "both"],
)
def test_a_prompt_may_be_a_users_message(
    options: list[str], turns: list[tuple[str, str]], daemon: Script
) -> None:
    fake = daemon(["x"])
    assert cli.run(["generate", *options, "p"]) == 0
    assert fake.requests[0].prompt is UNSET
    assert [(turn.role, turn.content) for turn in fake.requests[0].messages] == turns  # type: ignore[union-attr]


def test_a_dash_reads_standard_input(daemon: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = daemon(["x"])
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert cli.run(["generate", "-"]) == 0
    assert fake.requests[0].prompt == "from a pipe"


def test_several_prompts_are_printed_in_their_order(daemon: Script, capsys: Capture) -> None:
    daemon(["one", "two"])
    assert cli.run(["generate", "a", "b"]) == 0
    assert capsys.readouterr().out == "[1] a\none\n\n[2] b\ntwo\n\n"


def test_json_is_one_object_a_prompt(daemon: Script, capsys: Capture) -> None:
    daemon([PARIS, "two words"])
    assert cli.run(["generate", "--json", "a", "b"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first.pop("id") != second["id"]
    assert first == {
        "index": 0,
        "prompt": "a",
        "text": " Paris.",
        "token_ids": [7042, 30],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 0},
    }
    assert (second["index"], second["prompt"], second["text"]) == (1, "b", "two words")


def test_json_holds_the_log_probabilities_that_were_asked_for(daemon: Script, capsys: Capture) -> None:
    each = TokenLogprobs(-0.5, ((7, -0.5), (9, -1.5)))
    daemon([Completion("x", (7,), "stop", Usage(1, 1), (each,))])
    assert cli.run(["generate", "--json", "--logprobs", "2", "a"]) == 0
    top = [{"token_id": 7, "logprob": -0.5}, {"token_id": 9, "logprob": -1.5}]
    assert json.loads(capsys.readouterr().out)["logprobs"] == [{"logprob": -0.5, "top": top}]


def test_one_prompt_that_fails_leaves_the_others(daemon: Script, capsys: Capture) -> None:
    daemon([FULL, "two"])
    assert cli.run(["generate", "--json", "a", "b"]) == 1
    captured = capsys.readouterr()
    refused, answered = map(json.loads, captured.out.splitlines())
    error = {"code": "rejected", "reason": "queue_full", "message": "the queue is full"}
    assert refused.pop("id")
    assert refused == {"index": 0, "prompt": "a", "error": error}
    assert answered["text"] == "two"
    assert captured.err == "mlxd: prompt 1: the queue is full\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FULL, 1),
        (RequestFailedError("numeric", "the logits are not finite"), 1),
        (InvalidParamError("temperature", -1, "a number from 0 to 100"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_lone_prompt_that_fails_is_one_line(
    error: Reply, code: int, daemon: Script, capsys: Capture
) -> None:
    daemon([error])
    assert cli.run(["generate", "a"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"mlxd: {error}\n"


def test_chat_remembers_what_was_said(
    daemon: Script, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = daemon(["Rome.", "Madrid."])
    monkeypatch.setattr("sys.stdin", io.StringIO("Italy?\nSpain?\n"))
    assert cli.run(["chat", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "Rome.\nMadrid.\n"
    turns = [(turn.role, turn.content) for turn in fake.requests[1].messages]  # type: ignore[union-attr]
    assert turns == [
        ("system", "Be brief."),
        ("user", "Italy?"),
        ("assistant", "Rome."),
        ("user", "Spain?"),
    ]


class _Interrupted(io.StringIO):
    """A standard output that Ctrl-C hits when a word is written."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self._word = word

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._word and text.strip() == self._word:
            self._word = ""
            raise KeyboardInterrupt
        return written


def test_ctrl_c_ends_an_answer_and_keeps_the_conversation(
    daemon: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = daemon(["Rome was not built", "Madrid."])
    out = _Interrupted("was")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stdin", io.StringIO("Italy?\nSpain?\n"))
    assert cli.run(["chat"]) == 0
    assert out.getvalue() == "Rome was\n[stopped]\nMadrid.\n"
    turns = [turn.content for turn in fake.requests[1].messages]  # type: ignore[union-attr]
    assert turns == ["Italy?", "Rome", "Spain?"]


def test_what_cuts_a_stream_off_stands_on_a_line_of_its_own(
    daemon: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon(["Rome was not built"])
    out = _Interrupted("was")
    monkeypatch.setattr("sys.stdout", out)
    assert cli.run(["generate", "Italy?"]) == 130
    assert out.getvalue() == "Rome was\n"


def test_an_empty_line_ends_the_chat(daemon: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = daemon([])
    monkeypatch.setattr("sys.stdin", io.StringIO("\nnever asked\n"))
    assert cli.run(["chat"]) == 0
    assert not fake.requests


def test_status_and_drain_say_what_the_daemon_said(daemon: Script, capsys: Capture) -> None:
    daemon([])
    assert cli.run(["status"]) == cli.run(["drain"]) == 0
    out = capsys.readouterr().out
    assert "running" in out
    assert out.endswith("draining: open requests finish, new ones are turned away\n")


def test_a_reload_tells_what_changed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "daemon.yaml"
    monkeypatch.setenv("MLXD_ENDPOINT", config(tmp_path).server.submit)
    monkeypatch.setenv("MLXD_TOKEN", token("admin"))
    write_config(tmp_path, config(tmp_path))
    with Daemon(config(tmp_path), runner(), path=path) as running:
        running.wait_ready()
        assert cli.run(["reload"]) == 0
        write_config(tmp_path, config(tmp_path, {"weight": 3.0}))
        assert cli.run(["reload"]) == 0
        assert capsys.readouterr().out == "nothing changed\n" + "".join(
            f"{name}: weight 1.0 -> 3.0\n" for name in TENANTS
        )
        path.write_text("version: 2")
        assert cli.run(["reload"]) == 2
        assert capsys.readouterr().err.endswith(f"mlxd: {path}:1: version is 2; it must be 1\n")


def test_the_verbs_reach_a_daemon_over_its_sockets(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wire_daemon(tmp_path) as running:
        monkeypatch.setenv("MLXD_ENDPOINT", running.config.server.submit)
        monkeypatch.setenv("MLXD_TOKEN", token("admin"))
        assert cli.run(["generate", "--json", "--max-tokens", "5", "the dog", "the fox", "the end"]) == 0
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [5, 5, 5]
        assert cli.run(["status"]) == 0
        assert "acme" in capsys.readouterr().out
        assert cli.run(["drain"]) == 0
        running.join()
    assert running.exit_code == 0


def test_an_answer_can_be_had_again_by_its_id(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wire_daemon(tmp_path) as running:
        monkeypatch.setenv("MLXD_ENDPOINT", running.config.server.submit)
        monkeypatch.setenv("MLXD_TOKEN", token("acme"))
        assert cli.run(["generate", "--id", "mine", "--max-tokens", "5", "--seed", "1", "the dog"]) == 0
        answer = capsys.readouterr().out
        assert cli.run(["resume", "mine"]) == 0
        assert capsys.readouterr().out == answer
        assert cli.run(["resume", "mine", "--seq", "5"]) == 0
        assert len(capsys.readouterr().out) < len(answer)
        assert cli.run(["generate", "--json", "--max-tokens", "5", "the dog"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert cli.run(["resume", told["id"]]) == 0
        assert capsys.readouterr().out == f"{told['text']}\n"
        monkeypatch.setenv("MLXD_TOKEN", token("beta"))
        assert cli.run(["resume", "mine"]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_a_lost_connection_is_made_again_where_that_was_asked_for(tmp_path: Path, capsys: Capture) -> None:
    options = ["--token", token("acme"), "--max-tokens", "60", "--seed", "1"]
    with wire_daemon(tmp_path, runner=runner(0.01), resume_grace_s=5.0) as running:
        assert cli.run(["generate", "--endpoint", running.config.server.submit, *options, "the dog"]) == 0
        whole = capsys.readouterr().out
        for resume, code in (("10", 0), ("0", 1)):
            folder = tmp_path / resume
            folder.mkdir()
            with Relay(folder, running.config.server.submit) as relay:
                cut = threading.Timer(0.3, relay.cut)
                cut.start()
                given = ["--endpoint", relay.endpoint, *options, "--resume", resume]
                assert cli.run(["generate", *given, "the dog"]) == code
                cut.join()
            assert (capsys.readouterr().out == whole) is (code == 0)


def test_an_id_names_one_request(daemon: Script, capsys: Capture) -> None:
    fake = daemon(["one"])
    assert cli.run(["generate", "--id", "mine", "a", "b"]) == 2
    assert capsys.readouterr().err == "mlxd: --id names one request; there are 2 prompts\n"
    assert cli.run(["generate", "--id", "mine", "a"]) == 0
    assert [request.id for request in fake.requests] == ["mine"]
    assert cli.run(["generate", "--id", "", "a"]) == 2
    assert "id is ''; it must be 1 to 128 characters" in capsys.readouterr().err
