"""What the commands print is what tests/goldens has."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "goldens.py"


def check(*names):
    done = subprocess.run([sys.executable, str(SCRIPT), "--check", *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_help_is_as_before():
    check("help.txt")


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize(
    "name", ["advise.txt", "catalogue.json", "dry_run.txt", "logs.json", "studies.json", "trl.json"]
)
def test_output_is_as_before(name):
    check(name)
