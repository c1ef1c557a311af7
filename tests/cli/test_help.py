"""A help text needs no torch: loading it takes seconds."""

import subprocess
import sys

import pytest
from rich.console import Console

from klgrad.cli import app
from klgrad.cli.train import SECTIONS, train_or_distill
from klgrad.errors import MissingExtraError

COMMANDS = {command.name for command in app.registered_commands}

LOOK = """
import contextlib, io, sys
from klgrad.cli import app
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        app(line.split(), standalone_mode=False)
    print(line, len(shown.getvalue()) > 200, "torch" in sys.modules, sep="\t")
"""


def ran(*lines):
    """Of each command whether it printed a text, and whether torch was imported by then; all in one process."""
    command = [sys.executable, "-c", LOOK, *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_help_text_and_an_advice_import_no_torch_and_an_audit_does():
    quick = ["--help", *(f"{name} --help" for name in sorted(COMMANDS)), "advise trl", "advise verl --off-policy"]
    assert ran(*quick, "audit k2-loss") == [
        *([line, "True", "False"] for line in quick),
        ["audit k2-loss", "True", "True"],
    ]


@pytest.mark.parametrize("command", ["train", "distill"])
def test_the_help_of_a_run_needs_no_trl_and_fits_two_screens(command, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("klgrad.cli.train.stdout", lambda: Console(width=80))
    train_or_distill(command, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 80  # two screens of 40 lines
    assert sum(line.startswith("--") for line in lines) == sum(len(section) for section in SECTIONS.values())
    assert lines[-1] == "TRL is not installed: pip install 'klgrad[train]'"
    assert not any(line.startswith(" ") for line in lines[9:])  # no setting takes two lines
    with pytest.raises(MissingExtraError, match="pip install 'klgrad\\[train\\]'"):
        train_or_distill(command, ["--help-all"])
