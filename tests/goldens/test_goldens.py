"""What the commands print is what tests/goldens has."""

import subprocess
import sys
from pathlib import Path

import goldens
import pytest


def test_help_is_as_before(monkeypatch):
    for name, value in goldens.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert goldens.computed(["help.txt"])["help.txt"] == (goldens.FOLDER / "help.txt").read_text(encoding="utf-8")


@pytest.mark.many
@pytest.mark.parametrize("name", [name for name in goldens.GOLDENS if name != "help.txt"])
def test_output_is_as_before(name):
    """In a process of its own, where no test has left a setting of torch."""
    command = [sys.executable, str(Path(goldens.__file__)), "--check", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
