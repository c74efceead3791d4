"""What the documents say is there."""

import re
import shlex
from pathlib import Path

import msgspec
import pytest
import typer
import yaml

from mlxd.scheduler.cli import app
from mlxd.scheduler.config import Config, TenantConfig
from mlxd.scheduler.cost_model import CostModel
from mlxd.scheduler.replay import Replay
from mlxd.scheduler.trace import Load, Machine, Trace

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def shell_commands(path: Path) -> list[list[str]]:
    lines = "\n".join(code_blocks(path, "sh")).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), f"{path.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            slugs = {
                re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
            }
            assert anchor in slugs, f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_shown_exist_with_their_options(path: Path) -> None:
    for program, *arguments in shell_commands(path):
        if program == "make":
            assert arguments[0] in make_targets()
        elif program == "mlxd":
            verb = COMMANDS[arguments[0]]
            if arguments[0] == "keys":
                verb = verb.commands[arguments[1]]
            known = {option for parameter in verb.params for option in parameter.opts}
            assert {word for word in arguments if word.startswith("--")} <= known


def test_readme_shows_the_verbs_a_user_starts_with() -> None:
    shown = {words[1] for words in shell_commands(ROOT / "README.md") if words[0] == "mlxd"}
    assert {"serve", "check", "generate", "cancel", "chat", "status"} <= shown


def test_no_command_shown_has_a_token_among_its_options() -> None:
    """Other users of a machine can read a command line."""
    for path in DOCUMENTS:
        assert not [words for words in shell_commands(path) if "--token" in words], path.name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_shown_compiles(path: Path) -> None:
    for block in code_blocks(path, "python"):
        compile(block, path.name, "exec")


@pytest.mark.parametrize("page", ["configuration.md", "security.md"])
def test_configuration_snippets_are_valid(page: str) -> None:
    blocks = code_blocks(ROOT / "docs" / page, "yaml")
    assert blocks
    for block in blocks:
        Config.parse(block, page)


def documented_settings(page: str) -> dict[str, dict[str, str]]:
    """Section -> setting -> default as written, from the tables of a page."""
    sections = re.split(r"^## ", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)[1:]
    return {
        section.split("\n", 1)[0]: dict(re.findall(r"^\| `(\w+)` \| (.*?) \| ", section, re.MULTILINE))
        for section in sections
    }


def test_every_setting_is_documented_with_its_default() -> None:
    documented = documented_settings("configuration.md")
    sections = {field.name: field.type for field in msgspec.structs.fields(Config) if field.name != "version"}
    for name, kind in (sections | {"tenants": TenantConfig}).items():
        fields = msgspec.structs.fields(kind)
        assert list(documented[name]) == [field.name for field in fields], name
        for field in fields:
            written = documented[name][field.name]
            if field.required:
                assert written == "required"
            else:
                assert yaml.safe_load(written.strip("`")) == field.default, f"{name}.{field.name}"


@pytest.mark.parametrize(
    ("section", "kind"), [("load", Load), ("replay", Replay), ("machine", Machine), ("cost", CostModel)]
)
def test_every_setting_of_a_trace_is_documented_with_its_default(
    section: str, kind: type[msgspec.Struct]
) -> None:
    documented = documented_settings("simulation.md")[section]
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    assert set(documented) == set(fields)
    for name, field in fields.items():
        written = yaml.safe_load(documented[name].strip("`"))
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        assert written == ("required" if field.required else default), name


def test_the_trace_shown_is_valid(tmp_path: Path) -> None:
    [block] = code_blocks(ROOT / "docs/simulation.md", "yaml")
    (tmp_path / "trace.yaml").write_text(block)
    assert Trace.load_file(tmp_path / "trace.yaml").arrivals(tmp_path)


def test_what_was_tried_names_tests_that_exist_and_all_of_test_security() -> None:
    section = (ROOT / "docs/security.md").read_text().split("\n## What was tried\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)` \|$", section, re.MULTILINE))
    sources = {
        name: (ROOT / f"tests/{name}.py").read_text() for name in re.findall(r"/(test_\w+)\.py`", section)
    }
    found = {name: set(re.findall(r"^def (test_\w+)", text, re.MULTILINE)) for name, text in sources.items()}
    assert found["test_security"] <= named <= set().union(*found.values())
