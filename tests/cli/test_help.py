"""A help text needs no torch: loading it takes seconds."""

import subprocess
import sys

import pytest

from klgrad.cli import app, train

COMMANDS = {command.name: command for command in app.registered_commands}
BY_TRL = {name for name, command in COMMANDS.items() if command.context_settings == train.SETTINGS}
"""The commands whose flags are the fields of TRL's configuration, which imports torch."""

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
        *((name, "--help") for name in COMMANDS if name not in BY_TRL),
        ("advise", "trl"),
        ("advise", "verl", "--off-policy"),
    ],
    ids=" ".join,
)
def test_torch_is_not_imported(arguments):
    shown = ran(*arguments)
    assert len(shown) > 200
    assert shown.endswith("\nFalse\n")


def test_only_the_commands_of_trl_are_left_out():
    assert sorted(BY_TRL) == ["distill", "train"]


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
