"""Renders a conversation with the template that came with the model, in a sandbox."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
import msgspec
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxd.batching.errors import InvalidPromptError, ModelError
from mlxd.batching.model_files import MAX_TEXT_BYTES, read_optional_json_object
from mlxd.caches.files import read_file

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {"role", "content"}


class ChatTemplate:
    """One compiled template, safe to use from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError where `source` is no template. `special_tokens`: names the template may use."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source, globals=dict(special_tokens))
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not a template: {error}") from error

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str]) -> "ChatTemplate | None":
        """The folder's template, None where it has none. Raises ModelError."""
        source = _source(folder)
        return None if source is None else cls(source, special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt, up to where the assistant's answer begins.

        Raises:
            InvalidPromptError: a message is malformed, or the template refuses the conversation.
        """
        _check(messages)
        try:
            return self._template.render(messages=[dict(m) for m in messages], add_generation_prompt=True)
        # A template is a program: on roles it did not foresee it can fail like one.
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise InvalidPromptError(f"the model's chat template refuses the messages: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _source(folder: Path) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return _read(own_file)
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_optional_json_object(folder / name).get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def _read(path: Path) -> str:
    try:
        return read_file(path, MAX_TEXT_BYTES).decode()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}") from error


def _check(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise InvalidPromptError("messages is empty; it must hold at least one message")
    for i, message in enumerate(messages):
        if message.keys() != _FIELDS:
            raise InvalidPromptError(
                f"messages[{i}] has fields {sorted(message)}; it must have role and content"
            )
        if message["role"] not in _ROLES:
            raise InvalidPromptError(
                f"messages[{i}].role is {message['role']!r}; it must be one of {', '.join(_ROLES)}"
            )
        if not isinstance(message["content"], str):
            raise InvalidPromptError(f"messages[{i}].content must be a string")


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON: jinja's own filter escapes it for HTML."""
    encoded = msgspec.json.encode(value)
    return (encoded if indent is None else msgspec.json.format(encoded, indent=indent)).decode()


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
