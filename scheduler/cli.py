"""The command line: what each verb takes. What a verb does is in `client_verbs` and `daemon_verbs`."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from mlxd.batching.errors import InvalidParamError, InvalidPromptError, MlxdError
from mlxd.batching.sampling_params import SamplingParams
from mlxd.scheduler import client_verbs, daemon_verbs, tokens
from mlxd.scheduler.client_verbs import Access
from mlxd.scheduler.errors import ConfigError

DEFAULT_ENDPOINT = "ipc:///tmp/mlxd.sock"
EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="mlxd",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]
Endpoint = Annotated[str, typer.Option(envvar="MLXD_ENDPOINT", help="The daemon's submit address.")]
Token = Annotated[
    str | None, typer.Option(envvar="MLXD_TOKEN", help="The tenant's token.", show_default=False)
]
TenantKey = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Read the token from this file.", show_default=False)
]
TimeoutS = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for a sign of life.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.", show_default=False)]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.", show_default=False)]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Serve one MLX model to many tenants."""
    if show_version:
        print(f"mlxd {version('mlxd')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def serve(
    config: ConfigPath,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the daemon until it is drained or stopped.

    Example: mlxd serve deploy/mlxd.yaml
    """
    raise typer.Exit(daemon_verbs.serve(config, log_level))


@app.command()
def check(config: ConfigPath) -> None:
    """Validate CONFIG and print the memory plan; starts nothing.

    Example: mlxd check deploy/mlxd.yaml
    """
    daemon_verbs.check(config)


@app.command()
def pull(model: Annotated[str, typer.Argument(help="A built-in or hub name.", show_default=False)]) -> None:
    """Fetch a model into the cache and print its folder.

    Example: mlxd pull smollm2-135m-instruct
    """
    daemon_verbs.pull(model)


@app.command()
def token(name: Annotated[str, typer.Argument(help="The tenant's name.", show_default=False)]) -> None:
    """Make a tenant's token and print it with the YAML lines to paste.

    Example: mlxd token acme
    """
    print(tokens.describe_new_token(name))


@app.command()
def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="- reads standard input.", show_default=False)
    ],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token: Token = None,
    tenant_key: TenantKey = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt.")] = False,
    timeout_s: TimeoutS = 30.0,
) -> None:
    """Complete each PROMPT; several run at once.

    Example: mlxd generate --max-tokens 32 "The capital of France is"
    """
    access = Access(endpoint, tokens.read_token(token, tenant_key), timeout_s)
    sampling = _sampling(max_tokens, temperature, top_p, seed, stop)
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if not client_verbs.generate(access, texts, sampling, as_json=as_json):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def chat(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token: Token = None,
    tenant_key: TenantKey = None,
    system: Annotated[str | None, typer.Option(help="The system message.", show_default=False)] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    stop: Stop = None,
    timeout_s: TimeoutS = 30.0,
) -> None:
    """Talk with the model, line by line; an empty line or Ctrl-D ends.

    Example: mlxd chat --system "Answer in one sentence."
    """
    access = Access(endpoint, tokens.read_token(token, tenant_key), timeout_s)
    client_verbs.chat(access, system, _sampling(max_tokens, temperature, top_p, seed, stop))


@app.command()
def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token: Token = None,
    tenant_key: TenantKey = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh once a second until Ctrl-C.")] = False,
    timeout_s: TimeoutS = 5.0,
) -> None:
    """Show the daemon's state: tenants, rows, pages, compiled graphs.

    Example: mlxd status --watch
    """
    client_verbs.status(Access(endpoint, tokens.read_token(token, tenant_key), timeout_s), watch=watch)


@app.command()
def drain(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token: Token = None,
    tenant_key: TenantKey = None,
    timeout_s: TimeoutS = 5.0,
) -> None:
    """Finish what is open, then end the daemon; for operators.

    Example: mlxd drain --tenant-key ops.token
    """
    client_verbs.drain(Access(endpoint, tokens.read_token(token, tenant_key), timeout_s))


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and exit: 0 ok, 1 it failed, 2 bad input or configuration, 130 Ctrl-C."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one verb; errors become one line on stderr and an exit code."""
    try:
        code = app(arguments, prog_name="mlxd", standalone_mode=False)
        sys.stdout.flush()
        return code or EXIT_OK
    except (ConfigError, InvalidParamError, InvalidPromptError) as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except TyperException as error:
        return _fail(error.format_message(), EXIT_BAD_INPUT)
    except MlxdError as error:
        return _fail(str(error), EXIT_FAILED)
    except BrokenPipeError:
        # Python flushes stdout once more at exit, into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED


def _fail(message: str, code: int) -> int:
    print(f"mlxd: {' '.join(message.split())}", file=sys.stderr)
    return code


def _sampling(
    max_tokens: int, temperature: float, top_p: float, seed: int | None, stop: list[str] | None
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
