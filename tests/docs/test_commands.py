"""Every command in the README and the docs parses, and the names in it exist; the quick ones run."""

import ast
import re
import tomllib
from typing import Any

import pytest
from docs.pages import PAGES, ROOT, commands, name_of
from typer.main import get_command
from typer.testing import CliRunner

from klgrad.audit import catalogue
from klgrad.cli import app
from klgrad.frameworks import FRAMEWORKS, recorded
from klgrad.papers.study import studies
from klgrad.policy_losses import POLICY_LOSSES

GROUP: Any = get_command(app)
PLACEHOLDERS = {"FRAMEWORK": "trl", "D": "reverse", "L": "token"}
"""Words in capitals that stand for one of a few values; others stand for anything."""

FOUND = {tuple(PLACEHOLDERS.get(word, word) for word in words): pages for words, pages in commands("klgrad").items()}
BY_TRL = ("train", "distill")


def of(name):
    return [arguments for arguments in FOUND if arguments[:1] == (name,)]


def parsed(arguments):
    name, *rest = arguments
    return GROUP.commands[name].make_context(name, rest)


def test_there_are_commands_of_every_kind():
    assert {arguments[0] for arguments in FOUND if arguments} >= set(GROUP.commands)


@pytest.mark.parametrize("name", [name for name in GROUP.commands if name not in BY_TRL])
def test_a_command_parses(name):
    """The flags of the other two are TRL's: `test_names` has them."""
    for arguments in of(name):
        if len(arguments) > 1 and "--help" not in arguments:  # alone it is the name of the command
            parsed(arguments)


def test_the_names_in_an_audit_exist():
    settings = {row[0] for name in FRAMEWORKS for row in recorded(name).rows}
    known = {*catalogue(), *FRAMEWORKS, *settings, *POLICY_LOSSES}
    for arguments in of("audit"):
        for name in parsed(arguments).params["losses"] or ():
            path, _, function = name.partition(":")
            if name.startswith("examples/"):
                tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
                assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
            else:
                placeholder = name.replace(":", "").isupper()
                assert name in known or function or path.endswith(".py") or placeholder, f"{name} in {FOUND[arguments]}"


def test_the_names_in_a_reproduction_exist():
    words = {word for arguments in of("reproduce") for word in arguments[1:]}
    named = {word for word in words if not word.startswith("--") and ":" not in word}
    assert named - {"NAME", "build/reproduced"} <= set(studies())


@pytest.mark.parametrize("arguments", of("advise"), ids=" ".join)
def test_an_advice_is_printed(arguments):
    if "--config" not in arguments and len(arguments) > 1:
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == 0, done.output
        assert "Checked on" in done.output


def test_a_make_target_a_script_and_an_extra_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for line in re.findall(r"^([\w -]+):(?!=)", makefile, re.MULTILINE) for name in line.split()}
    for arguments, pages in commands("make").items():
        assert {word for word in arguments if not re.match(r"\.|.*=", word)} <= targets, pages
    for (script, *_), pages in commands("python").items():
        assert script in ("-c", "-m") or (ROOT / script).exists(), f"{script} in {pages}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for path in PAGES:
        named = ",".join(re.findall(r"klgrad\[([\w,]+)\]", path.read_text(encoding="utf-8")))
        assert {*filter(None, named.split(","))} <= set(project["optional-dependencies"]), name_of(path)
