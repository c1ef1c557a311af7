"""Every command in the README and the docs parses, and the names in it exist; the quick ones run."""

import ast
import re
import tomllib
from typing import Any

import pytest
from docs.pages import ROOT, commands, name_of
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

FOUND = {
    tuple(PLACEHOLDERS.get(word, word) for word in arguments): pages for arguments, pages in commands("klgrad").items()
}
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
    for arguments in of(name):
        if len(arguments) > 1 and "--help" not in arguments:  # alone it is the name of the command
            parsed(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_TRL)
def test_a_flag_of_a_training_command_exists(name):
    from klgrad.training.settings import Parser

    known = {flag.replace("-", "_") for action in Parser(name)._actions for flag in action.option_strings}
    flags = {word for arguments in of(name) for word in arguments if word.startswith("--")}
    assert {flag for flag in flags if flag.replace("-", "_") not in known | {"__help_all"}} == set()


def is_placeholder(word):
    return word.replace(":", "").isupper()


def settings_of_frameworks():
    return {row[0] for name in FRAMEWORKS for row in recorded(name).rows}


def test_the_names_in_an_audit_exist():
    known = {*catalogue(), *FRAMEWORKS, *settings_of_frameworks(), *POLICY_LOSSES}
    for arguments in of("audit"):
        params = parsed(arguments).params
        for name in [name for name in params["losses"] or () if not is_placeholder(name)]:
            path, _, function = name.partition(":")
            if name.startswith("examples/"):
                tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
                assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
            else:
                assert name in known or function or path.endswith(".py"), f"{name} in {FOUND[arguments]}"


def test_the_names_in_a_reproduction_exist():
    named = {
        word for arguments in of("reproduce") for word in arguments[1:] if not word.startswith("--") and ":" not in word
    }
    assert named - {"NAME", "build/reproduced"} <= set(studies())


@pytest.mark.parametrize("arguments", of("advise"), ids=" ".join)
def test_an_advice_is_printed(arguments):
    if "--config" not in arguments and len(arguments) > 1:
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == 0, done.output
        assert "Checked on" in done.output


@pytest.mark.slow
def test_the_first_audit_of_the_guide_runs():
    assert ("audit", "examples/losses.py:grpo_k3") in FOUND
    done = CliRunner().invoke(app, ["audit", str(ROOT / "examples" / "losses.py") + ":grpo_k3"])
    assert done.exit_code == 0, done.output
    assert "forward KL" in " ".join(done.output.split())


def test_a_make_target_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for line in re.findall(r"^([\w -]+):(?!=)", makefile, re.MULTILINE) for name in line.split()}
    for arguments, pages in commands("make").items():
        named = {word for word in arguments if "=" not in word and not word.startswith(".")}
        assert named <= targets, pages


def test_a_script_exists():
    for arguments, pages in commands("python").items():
        if arguments[0] not in ("-c", "-m"):
            assert (ROOT / arguments[0]).exists(), f"{arguments[0]} in {pages}"


def test_an_extra_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        named = re.findall(r"klgrad\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        assert {extra for group in named for extra in group.split(",")} <= extras, name_of(path)
