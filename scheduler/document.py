"""Strict YAML into a struct: every error is one line that names file, line, path, value and limit.

Stricter than YAML: one document, text keys without duplicates, no aliases, no tags, printable text, finite
numbers. As in YAML 1.2 only true and false are booleans and numbers are decimal, so `compile: off` is text.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml
from yaml.reader import ReaderError

from mlxd.batching.errors import show_path
from mlxd.caches.files import read_file
from mlxd.scheduler.errors import ConfigError
from mlxd.scheduler.schema import describe, field_names, is_secret, type_at

MAX_BYTES = 4 * 2**20
_MAX_DEPTH = 16
_MAX_CHARS = 4096
_MAX_SHOWN = 60
_TAG = "tag:yaml.org,2002:"
_WORDS = {None: "null", True: "true", False: "false"}

Keys = tuple[str | int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML text holds.

    Attributes:
        where: names the text in errors, a file path.
        lines: 1-based line of every value, by its path from the root.
    """

    where: str
    data: object
    lines: Mapping[Keys, int]

    def error(self, keys: Keys, sentence: str) -> ConfigError:
        """`sentence` follows the value's path: "is 0; it must be >= 1"."""
        path = show_path(keys)
        line = next((self.lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.lines), None)
        place = f"{self.where}:{line}" if line else self.where
        return ConfigError(f"{place}: {path} {sentence}" if path else f"{place}: {sentence}")

    def convert(self, target: type[T]) -> T:
        """Raises ConfigError for the first value that does not fit `target`, a msgspec struct."""
        try:
            return msgspec.convert(self.data, target)
        except msgspec.ValidationError as error:
            raise self._explain(str(error), target) from None

    def _explain(self, text: str, target: type) -> ConfigError:
        text, _, at = text.partition(" - at `$")
        keys = tuple(int(i) if i else name for name, i in re.findall(r"\.(\w+)|\[(\d+)\]", at))
        info = type_at(target, keys)
        if not keys and not isinstance(self.data, dict):
            return self.error((), f"the root is {_show(self.data)}; it must be a map of settings")
        named = re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", text, re.DOTALL)
        if named and named[1] == "missing required":
            return self.error((*keys, named[2]), "is missing")
        if named:
            near = difflib.get_close_matches(named[2], field_names(info), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(field_names(info))}"
            return self.error((*keys, named[2][:_MAX_SHOWN]), f"is not a setting; {hint}")
        shown = "has a wrong value" if is_secret(info) else f"is {_show(self._value(keys))}"
        return self.error(keys, f"{shown}; it must be {describe(info)}")

    def _value(self, keys: Keys) -> object:
        value = self.data
        for key in keys:
            value = value[key]  # type: ignore[index]
        return value


def read_text(path: str | Path) -> str:
    """A UTF-8 file's text. Raises ConfigError where it cannot be read, is too long or is not UTF-8."""
    try:
        return read_file(path, MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None


def parse_document(text: str, where: str) -> Document:
    """Raises ConfigError where `text` is not one strict YAML document or holds nothing."""
    loader: _StrictLoader | None = None
    try:
        loader = _StrictLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{where}: is empty")
        lines: dict[Keys, int] = {}
        _note_lines(root, (), lines)
        return Document(where, loader.construct_document(root), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        text = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{place}: {_one_line(text)}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{where}:{line}: U+{error.character:04X} is no character of YAML") from None
    finally:
        if loader is not None:
            loader.dispose()


class _StrictLoader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise self._problem("aliases are not supported")
        if self.peek_event().tag is not None:  # type: ignore[no-untyped-call]
            raise self._problem("tags are not supported")
        if self.check_event(yaml.ScalarEvent) and len(self.peek_event().value) > _MAX_CHARS:  # type: ignore[no-untyped-call]
            raise self._problem(f"a value of more than {_MAX_CHARS} characters")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._problem(f"nested more than {_MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)  # type: ignore[arg-type]
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Mapping[str, yaml.Node] | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # type: ignore[arg-type]
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != f"{_TAG}str":
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"duplicate key {_shortened(key.value)}", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return node

    def _problem(self, text: str) -> yaml.MarkedYAMLError:
        """An error at the event that comes next."""
        return yaml.MarkedYAMLError(problem=text, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]

    def construct_finite(self, node: yaml.ScalarNode) -> float:
        value = self.construct_yaml_float(node)
        if not math.isfinite(value):
            problem = f"{_shortened(node.value)} is not a finite number"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value

    def construct_printable(self, node: yaml.ScalarNode) -> str:
        value = self.construct_scalar(node)
        if not value.isprintable():
            problem = f"{_show(value)} has unprintable characters"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value


_StrictLoader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]{0,30})", list("-+0123456789")),
    (
        "float",
        r"[-+]?((0|[1-9][0-9]*)?\.[0-9]+|(0|[1-9][0-9]*)(?=[eE]))([eE][-+]?[0-9]+)?",
        list("-+.0123456789"),
    ),
):
    _StrictLoader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), _first)
_StrictLoader.add_constructor(f"{_TAG}float", _StrictLoader.construct_finite)
_StrictLoader.add_constructor(f"{_TAG}str", _StrictLoader.construct_printable)


def _note_lines(node: yaml.Node, keys: Keys, lines: dict[Keys, int]) -> None:
    lines[keys] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _note_lines(value, (*keys, key.value), lines)
            lines[(*keys, key.value)] = key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _note_lines(value, (*keys, index), lines)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _show(value: object) -> str:
    if isinstance(value, dict | list):
        return "a map" if isinstance(value, dict) else f"a list of {len(value)}"
    return _shortened(_WORDS[value] if value is None or isinstance(value, bool) else repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
