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
import sys
from klgrad.cli import app
sys.argv[1:] = {arguments}
app(standalone_mode=False)
print("torch" in sys.modules)
"""


def ran(*arguments):
    code = LOOK.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        *((name, "--help") for name in sorted(COMMANDS)),
        ("advise", "trl"),
        ("advise", "verl", "--off-policy"),
    ],
    ids=" ".join,
)
def test_torch_is_not_imported(arguments):
    shown = ran(*arguments)
    assert len(shown) > 200
    assert shown.endswith("\nFalse\n")


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


@pytest.mark.slow
def test_a_command_that_computes_imports_it():
    assert ran("audit", "k2-loss").endswith("\nTrue\n")


@pytest.mark.slow
def test_no_warning_where_numpy_is_missing():
    code = (
        "import sys, warnings; sys.modules['numpy'] = None; warnings.simplefilter('error'); "
        "import klgrad; klgrad.KLTerm(); import klgrad.audit; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.stderr) == ("True\n", "")
