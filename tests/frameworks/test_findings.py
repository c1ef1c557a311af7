"""The findings about other projects: each program prints what its text says, where the project is installed."""

import re
import subprocess
import sys

import pytest
from some import first
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import UnknownNameError
from klgrad.frameworks import FRAMEWORKS
from klgrad.frameworks.record import findings

FINDINGS = {f"{finding.framework}.{finding.name}": finding for finding in findings()}


MISSING = {
    "tunix": ("metrax", "jaxtyping", "tqdm", "huggingface_hub", "sentencepiece", "PIL", "perfetto", "pandas"),
    "mlx-lm-lora": ("mlx_lm", "tqdm", "transformers"),
    "mlx-tune": ("mlx_lm", "datasets", "mlx_embeddings"),
}
MISSING["maxtext"] = MISSING["tunix"]
"""What the projects import beside the code that a program runs. Those of AReaL and Axolotl are too many to replace:
their programs run where they are installed whole."""

RUN = """
from klgrad.frameworks.harness import standing_in
with standing_in({missing!r}):
    exec({program!r}, {{"__name__": "__main__"}})
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", first(FINDINGS, 2))
def test_a_program_prints_what_its_text_says(name):
    finding = FINDINGS[name]
    program = RUN.format(missing=MISSING.get(finding.framework, ()), program=finding.program)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    if "ModuleNotFoundError" in done.stderr:
        assert FRAMEWORKS[finding.framework].installed is None or finding.framework in ("areal", "axolotl"), done.stderr
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = finding.printed.splitlines()
    assert lines[len(lines) - len(expected) :] == expected  # a package may print something when it is imported


@pytest.mark.parametrize("name", FINDINGS)
def test_a_text_has_all_its_parts(name):
    finding = FINDINGS[name]
    for part in ("**Declared.**", "**What happens.**", "**Reproduction.**", "**Why.**", "**Patch.**", "**Versions.**"):
        assert part in finding.text
    assert re.search(r"```diff\n(-|\+| )", finding.text)
    assert finding.printed
    assert "klgrad" not in finding.text
    compile(finding.program, name, "exec")


def test_the_command_prints_the_text_as_it_is():
    for finding in FINDINGS.values():
        shown = CliRunner().invoke(app, ["report", finding.framework, finding.name])
        assert shown.stdout == finding.text


def test_without_a_name_all_are_listed():
    shown = CliRunner().invoke(app, ["report"]).stdout
    for finding in FINDINGS.values():
        assert finding.framework in shown
        assert finding.title.replace("`", "") in shown


@pytest.mark.parametrize("arguments", [["no-such-project"], ["rlinf", "no-such-finding"]])
def test_an_unknown_name(arguments):
    assert isinstance(CliRunner().invoke(app, ["report", *arguments]).exception, UnknownNameError)
