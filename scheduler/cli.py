"""The command line: what each verb takes. What a verb does is in `client_verbs` and `daemon_verbs`."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from mlxd.batching.errors import InvalidParamError, InvalidPromptError, MlxdError
from mlxd.scheduler import client_verbs, daemon_verbs, keys, simulate_verb, tokens
from mlxd.scheduler import options as opt
from mlxd.scheduler.access import Access, reaches_daemon
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.exit_codes import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from mlxd.scheduler.request_options import new_id

app = typer.Typer(
    name="mlxd",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

keys_app = typer.Typer(name="keys")
app.add_typer(keys_app)


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
def serve(config: opt.ConfigPath, log_level: opt.LogLevel = "info") -> None:
    """Run the daemon until it is drained or stopped.

    Ctrl-C or SIGTERM drains: open requests finish, new ones are turned away. A second one ends them.

    Example: mlxd serve deploy/mlxd.yaml
    """
    raise typer.Exit(daemon_verbs.serve(config, log_level))


@app.command()
def check(config: opt.ConfigPath) -> None:
    """Validate CONFIG and print the memory plan; starts nothing.

    A built-in or hub model that is not on this machine yet is downloaded.

    Example: mlxd check deploy/mlxd.yaml
    """
    daemon_verbs.check(config)


@app.command()
def pull(model: opt.ModelName) -> None:
    """Fetch a model into the cache and print its folder.

    Example: mlxd pull smollm2-135m-instruct
    """
    daemon_verbs.pull(model)


@app.command()
def token(name: opt.TenantName, out: opt.TokenFile = None) -> None:
    """Make a tenant's token and print its lines for the YAML file.

    They go under `tenants:`. The token itself goes to FILE, readable by you alone, or to standard error.

    Example: mlxd token acme --out acme.token
    """
    made = tokens.make_token(name)
    if out is None:
        print(f"the token of {name}, kept nowhere: {made.token}", file=sys.stderr)
    else:
        tokens.write_secret(out, made.token)
    print(made.yaml)


@keys_app.callback(invoke_without_command=True)
def keys_root(context: typer.Context) -> None:
    """Make CURVE keys.

    Example: mlxd keys new acme
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@keys_app.command("new")
def new_keys(name: opt.KeyName, server: opt.IsServer = False, folder: opt.KeyFolder = Path()) -> None:
    """Make NAME.key, a secret readable by you alone, and NAME.pub; print the lines for the YAML file.

    A tenant's lines go under `tenants:`. With --server they are the daemon's own, and NAME.pub is what
    clients give as --server-key.

    Example: mlxd keys new acme --out keys
    """
    made = keys.KeyPair.make()
    secret, public = keys.write_keys(folder, name, made)
    print(f"made {secret}, which stays secret, and {public}", file=sys.stderr)
    print(keys.server_yaml(secret) if server else keys.tenant_yaml(name, made))


@app.command()
@reaches_daemon(timeout_s=30.0, resumes=True)
def generate(
    access: Access,
    prompts: opt.Prompts,
    chat: opt.Chat = False,
    system: opt.System = None,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = 1.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    logprobs: opt.Logprobs = None,
    priority: opt.PriorityOption = "normal",
    deadline_s: opt.DeadlineS = None,
    request_id: opt.RequestId = None,
    as_json: opt.AsJson = False,
) -> None:
    """Complete each PROMPT; several run at once.

    Example: mlxd generate --temperature 0 "The capital of France is"
    """
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs shows in JSON alone; add --json")
    if request_id is not None and len(prompts) > 1:
        raise ConfigError(f"--id names one request; there are {len(prompts)} prompts")
    sampling = opt.sampling_of(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
        top_logprobs=logprobs,
    )
    texts = [client_verbs.read_prompt() if prompt == "-" else prompt for prompt in prompts]
    deadline_ms = None if deadline_s is None else round(1000 * deadline_s)
    inputs = [
        client_verbs.Input(text, chat, system, priority, deadline_ms, request_id or new_id())
        for text in texts
    ]
    if not client_verbs.generate(access, inputs, sampling, as_json=as_json):
        raise typer.Exit(EXIT_FAILED)


@app.command()
@reaches_daemon(timeout_s=30.0, resumes=True)
def resume(access: Access, request_id: opt.KnownId, seq: opt.Seq = 0) -> None:
    """Print the answer to a request that was sent before.

    The daemon knows those that run, and for a time those that ended; with a journal also after a crash.

    Example: mlxd resume story-1 --wait 60
    """
    client_verbs.resume(access, request_id, seq)


@app.command()
@reaches_daemon(timeout_s=5.0)
def cancel(access: Access, request_id: opt.KnownId) -> None:
    """End a request that waits or runs; whoever reads it is told.

    Example: mlxd cancel story-1
    """
    client_verbs.cancel(access, request_id)


@app.command()
@reaches_daemon(timeout_s=30.0)
def chat(
    access: Access,
    system: opt.System = None,
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = 0.7,
    top_p: opt.TopP = 0.95,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
) -> None:
    """Talk with the model, line by line; an empty line or Ctrl-D ends.

    Ctrl-C ends an answer and keeps the conversation.

    Example: mlxd chat --system "Answer in one sentence."
    """
    sampling = opt.sampling_of(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
    )
    client_verbs.chat(access, system, sampling)


@app.command()
@reaches_daemon(timeout_s=5.0)
def status(access: Access, watch: opt.Watch = False) -> None:
    """Show the daemon's state and your own requests.

    An operator sees all tenants, pages, memory and compiled graphs.

    Example: mlxd status --watch
    """
    client_verbs.status(access, watch=watch)


@app.command()
def simulate(
    trace: opt.TracePath,
    policy: opt.Policies = None,
    plot: opt.PlotFile = None,
) -> None:
    """Replay TRACE on a simulated machine, without a model.

    Runs the daemon's own scheduler under a fake clock and prints how each tenant was served.

    Example: mlxd simulate examples/traces/two_tenants.yaml --policy fair --policy fcfs
    """
    simulate_verb.simulate(trace, policy or [], plot)


@app.command()
@reaches_daemon(timeout_s=5.0, waits=False)
def drain(access: Access) -> None:
    """Finish what is open, then end the daemon; for operators.

    Example: mlxd drain --tenant-key ops.token
    """
    client_verbs.drain(access)


@app.command()
@reaches_daemon(timeout_s=30.0, waits=False)
def reload(access: Access) -> None:
    """Put the file's tenants into effect; for operators.

    The daemon reads its file anew: all or none of it; SIGHUP does the same. Other sections need a restart.

    Example: mlxd reload --tenant-key ops.token
    """
    client_verbs.reload(access)


def run(arguments: list[str]) -> int:
    """Run one verb and return its exit code; errors become one line on stderr."""
    try:
        _check_text(arguments)
        code = app(arguments, prog_name="mlxd", standalone_mode=False)
        sys.stdout.flush()
        return code or EXIT_OK
    except (ConfigError, InvalidParamError, InvalidPromptError) as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except TyperException as error:
        return _fail(error.format_message().replace(": Value error, ", ": "), EXIT_BAD_INPUT)
    except MlxdError as error:
        return _fail(str(error), EXIT_FAILED)
    except BrokenPipeError:
        # Python flushes stdout once more at exit, into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED


def _check_text(arguments: Sequence[str]) -> None:
    """Raises ConfigError where an argument is no text: it could not be sent, nor printed."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the argument {argument!r} is not UTF-8 text") from None


def _fail(message: str, code: int) -> int:
    print(f"mlxd: {' '.join(message.split())}", file=sys.stderr)
    return code
