"""Arguments and options that verbs of the command line share."""

from pathlib import Path
from typing import Annotated

import typer

from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler.priority import PriorityName

DEFAULT_ENDPOINT = "ipc:///tmp/mlxd.sock"

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A built-in or hub name.", show_default=False)
]
TenantName = Annotated[str, typer.Argument(metavar="NAME", help="The tenant's name.", show_default=False)]
Prompts = Annotated[
    list[str], typer.Argument(metavar="PROMPT", help="A text; - reads standard input.", show_default=False)
]

PriorityOption = Annotated[
    PriorityName, typer.Option("--priority", metavar="CLASS", help="interactive, normal or batch.")
]
DeadlineS = Annotated[
    float | None,
    typer.Option(
        "--deadline", metavar="SECONDS", min=0.001, max=86_400, help="End by then.", show_default=False
    ),
]
TracePath = Annotated[Path, typer.Argument(metavar="TRACE", help="The trace, YAML.", show_default=False)]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="fair or fcfs, in place of the trace's; repeat it to compare.",
        show_default=False,
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="Draw service over time: PNG, SVG or PDF.", show_default=False
    ),
]
LogLevel = Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")]
TokenFile = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the token to this new file.", show_default=False),
]
Endpoint = Annotated[
    str, typer.Option(metavar="ADDRESS", envvar="MLXD_ENDPOINT", help="The daemon's submit address.")
]
Token = Annotated[
    str | None,
    typer.Option(metavar="TOKEN", help="The tenant's token; or set MLXD_TOKEN.", show_default=False),
]
TenantKey = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Read the token from this file.", show_default=False)
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", help="With CURVE: your secret key; or set MLXD_KEY.", show_default=False
    ),
]
ServerKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--server-key",
        metavar="FILE",
        help="With CURVE: the daemon's public key; or set MLXD_SERVER_KEY.",
        show_default=False,
    ),
]
KeyName = Annotated[
    str, typer.Argument(metavar="NAME", help="The tenant's name, and the files'.", show_default=False)
]
KeyFolder = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the files go.")]
IsServer = Annotated[bool, typer.Option("--server", help="Make the daemon's own keys.")]
TimeoutS = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Longest silence of the daemon to bear."),
]
WaitS = Annotated[
    float,
    typer.Option(
        "--wait", metavar="SECONDS", min=0, help="Wait for a daemon that is not there yet, or loads."
    ),
]
RequestId = Annotated[
    str | None,
    typer.Option(
        "--id", metavar="ID", help="The request's id, for mlxd resume; yours to choose.", show_default=False
    ),
]
KnownId = Annotated[
    str, typer.Argument(metavar="ID", help="What --id or --json told of it.", show_default=False)
]
Seq = Annotated[int, typer.Option(metavar="N", min=0, help="Leave out the N tokens that came already.")]
ResumeS = Annotated[
    float,
    typer.Option(
        "--resume", metavar="SECONDS", min=0, help="How long to try to go on after a lost connection."
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Send each prompt as a user's message, through the chat template.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt.")]
Watch = Annotated[bool, typer.Option("--watch", help="Refresh once a second until Ctrl-C.")]

MaxTokens = Annotated[int, typer.Option(metavar="N", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(metavar="X", help="0 takes the likeliest token.")]
TopP = Annotated[
    float, typer.Option(metavar="P", help="Draw from the likeliest tokens that reach this probability.")
]
TopK = Annotated[int, typer.Option(metavar="N", help="Draw from the N likeliest tokens; 0: from all.")]
MinP = Annotated[
    float, typer.Option(metavar="P", help="Drop tokens below this part of the likeliest one's probability.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(metavar="X", help="Above 1: tokens of prompt and answer become less likely.")
]
PresencePenalty = Annotated[
    float, typer.Option(metavar="X", help="Taken from the logit of every token of the answer.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(metavar="X", help="The same, once for each time it occurred.")
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="The same seed gives the same text.", show_default=False)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End before this text; repeatable.", show_default=False),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --json: log-probabilities of each token and the N likeliest.",
        show_default=False,
    ),
]


def sampling_of(*, stop: list[str] | None, **values: float | None) -> SamplingParams:
    """Checked sampling parameters; raises InvalidParamError before anything is sent."""
    sampling = SamplingParams(stop=tuple(stop or ()), **values)  # type: ignore[arg-type]
    sampling.check()
    return sampling
