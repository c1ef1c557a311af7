"""What has changed since a framework was recorded: newer releases, and parts of its losses."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import NotAuditableError, UnknownNameError
from klgrad.frameworks import FRAMEWORKS, Recorded, record, recorded
from klgrad.frameworks.record import PartChange, compare, newest_release

SLIME = FRAMEWORKS["slime"]
AS_CODE = replace(SLIME, name="slime", distribution="torch", files=())
"""Its formulae as if they were the code of an installed package."""


def answers(monkeypatch, text):
    done = subprocess.CompletedProcess([], 0 if text else 1, stdout=text, stderr="ERROR" if not text else "")
    monkeypatch.setattr(record.subprocess, "run", lambda *_, **__: done)


def test_the_answer_of_the_index(monkeypatch):
    answers(monkeypatch, "trl (1.17.0)\nAvailable versions: 1.17.0, 1.16.0\n")
    assert newest_release("trl") == "1.17.0"
    answers(monkeypatch, "")
    assert newest_release("no-such-package") is None


def test_cells_are_compared_by_part():
    known = Recorded(
        "mine", "1", "2026-01-01", ["loss", "divergence", "unit"], [["a", "x", "sum"], ["b", "y", "sum"]], {}, {}
    )
    assert compare(known, [["a", "x", "mean"], ["c", "y", "sum"]]) == [
        PartChange("b", "setting", "b", ""),
        PartChange("c", "setting", "", "c"),
        PartChange("a", "unit", "sum", "mean"),
    ]


def test_a_release_is_newer_by_its_number(monkeypatch):
    answers(monkeypatch, "torch (0.10.0)\n")
    known = replace(recorded("slime"), version="0.9.1")
    monkeypatch.setattr(record, "audit_again", lambda framework, known, found: found)
    assert record.check(AS_CODE, known).has_newer
    assert not record.check(AS_CODE, replace(known, version="0.10.0")).has_changed


@pytest.mark.slow
def test_another_version_is_audited_again(monkeypatch):
    answers(monkeypatch, "")
    known = recorded("slime")
    again = record.check(AS_CODE, known)
    assert (again.audited, again.differences) == (True, [])
    row = known.rows[0]
    changed = replace(known, rows=[[row[0], "another divergence", *row[2:]], *known.rows[1:]])
    assert record.check(AS_CODE, changed).differences == [
        PartChange(row[0], "divergence", "another divergence", row[1])
    ]


@pytest.mark.parametrize("error", [NotAuditableError("a", "b", "c"), AttributeError("renamed")])
def test_code_that_does_not_run_is_reported(monkeypatch, error):
    def fail():
        raise error

    answers(monkeypatch, "")
    found = record.check(replace(AS_CODE, losses=fail), recorded("slime"))
    assert found.failure
    assert found.has_changed


def test_the_command_lists_the_records_without_asking(monkeypatch):
    monkeypatch.setattr(record.subprocess, "run", None)
    shown = CliRunner().invoke(app, ["frameworks"])
    assert shown.exit_code == 0
    for name in FRAMEWORKS:
        assert name in shown.stdout


def test_a_newer_release_ends_with_status_1(monkeypatch, tmp_path):
    answers(monkeypatch, "skyrl (99.0)\n")
    path = tmp_path / "drift.json"
    shown = CliRunner().invoke(app, ["frameworks", "skyrl", "slime", "--check", "--json", str(path)])
    assert shown.exit_code == 1
    first, second = json.loads(path.read_text())["frameworks"]
    assert (first["newest"], first["has_newer"]) == ("99.0", True)
    assert second["newest"] is None
    assert CliRunner().invoke(app, ["frameworks", "slime", "--check"]).exit_code == 0


def test_an_unknown_framework():
    assert isinstance(CliRunner().invoke(app, ["frameworks", "nothing"]).exception, UnknownNameError)


def test_a_record_keeps_the_versions_before_it():
    known = recorded("slime")
    default = known.row_of("slime --use-kl-loss --kl-loss-type k1")
    entry = (known.version, known.date, default)
    assert known.history_before("99.0") == [*known.history, entry]
    assert known.history_before(known.version) == known.history
    assert replace(known, history=[("0.1", "2026-01-01", default)]).history_before("99.0")[0][0] == "0.1"


def test_the_scheduled_check_installs_every_framework_of_which_the_code_is_audited():
    workflow = (Path(__file__).parents[2] / ".github" / "workflows" / "frameworks.yml").read_text(encoding="utf-8")
    audited = {name for line in workflow.splitlines() if "names:" in line for name in re.findall(r"[\w-]+", line)}
    assert {name for name, framework in FRAMEWORKS.items() if not framework.transcribed} <= audited
