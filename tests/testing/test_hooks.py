"""The pre-commit hook and the GitHub Action run `klgrad audit --expect`."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from klgrad.cli import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
LOSSES = ROOT / "examples" / "losses.py"


def block(name):
    return yaml.safe_load(re.search(rf"<!-- {name} -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)[1])


(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
AUDIT = ACTION["runs"]["steps"][-1]


def hook(*arguments):
    program, *rest = [*shlex.split(HOOK["entry"]), *arguments]
    assert program == "klgrad"
    return CliRunner().invoke(app, rest)


def test_the_hook_fails_where_a_verdict_differs():
    assert hook("reverse-kl-token", f"{LOSSES}:grpo_k3").exit_code == 1


def test_the_hook_never_passes_without_an_expectation_and_a_loss(monkeypatch):
    monkeypatch.setattr("klgrad.audit.subject.COMMON", ("k2-loss", "k3-loss"))  # two are enough
    assert hook().exit_code != 0
    assert hook(f"{LOSSES}:squared").exit_code != 0
    assert hook("reverse-kl-token").exit_code == 1  # the losses of the catalogue differ


def test_the_hook_of_the_page_passes():
    (used,) = block("pre-commit")["repos"][0]["hooks"]
    assert used["id"] == HOOK["id"]
    verdict, _, *options = used["args"]
    assert hook(verdict, f"{LOSSES}:squared", *options).exit_code == 0


def action(folder, python, **inputs):
    """Run the last step of the action as GitHub does, with a program as its `python`."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").write_text(f'#!/bin/sh\n{python} "$@"\n')
    (folder / "bin" / "python").chmod(stat.S_IRWXU)
    values = {name: given.get("default", "") for name, given in ACTION["inputs"].items()} | inputs
    variables = {
        name: values[re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", text)[1]] for name, text in AUDIT["env"].items()
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", AUDIT["run"]],
        env={**os.environ, **variables, "PATH": f"{folder}/bin:{os.environ['PATH']}",
             "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(folder / "summary.md")},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


PRINT = "printf '%s\\n'"


def test_the_arguments_of_the_action(tmp_path):
    used = block("action")[-1]["with"]
    assert set(used) <= set(ACTION["inputs"])
    assert action(tmp_path, PRINT, **used).stdout.split("\n") == [
        "-m", "klgrad", "audit", "src/losses.py:kl_penalty", "my_package.losses:other",
        "--expect", "reverse-kl-token", "--markdown", str(tmp_path / "summary.md"), "--strict", "",
    ]  # fmt: skip
    more = {"expect": "nothing", "expect-off-policy": "climbs k3-token"}
    assert action(tmp_path, PRINT, losses="  a.py:f $(exit 3)\n", **more).stdout.split("\n") == [
        "-m", "klgrad", "audit", "a.py:f $(exit 3)", "--expect", "nothing", "--markdown", str(tmp_path / "summary.md"),
        "--expect-off-policy", "climbs k3-token", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", ["--set beta=0.04 --strict", "--set beta=0.04\n--strict\n", "\n --set beta=0.04\n--strict"]
)
def test_the_options_of_the_action_may_be_on_several_lines(options, tmp_path):
    given = action(tmp_path, PRINT, losses="a.py:f", expect="nothing", options=options).stdout.split("\n")
    assert given[-4:] == ["--set", "beta=0.04", "--strict", ""]


def test_the_action_refuses_to_audit_nothing(tmp_path):
    done = action(tmp_path, PRINT, losses="\n \n", expect="nothing")
    assert (done.returncode, done.stdout[:29]) == (2, "expected a loss in the input ")


@pytest.mark.many
def test_the_action_fails_where_a_verdict_differs(tmp_path):
    done = action(tmp_path, sys.executable, losses=f"{LOSSES}:grpo_k3", expect="reverse-kl-token")
    assert done.returncode == 1, done.stderr
    line = LOSSES.read_text().split("def grpo_k3")[0].count("\n") + 1
    at = f"file={os.path.relpath(LOSSES)},line={line},"
    said = "grpo_k3: expected reverse-kl-token on-policy, found forward-kl-token"
    assert re.search(f"^::error {at}title=klgrad::.*{said}$", done.stdout, re.MULTILINE)
    assert "| `examples/losses.py:grpo_k3`" in (tmp_path / "summary.md").read_text().replace(str(ROOT) + "/", "")


def test_no_input_of_the_action_is_part_of_a_script():
    assert not any("${{" in step["run"] for step in ACTION["runs"]["steps"])
