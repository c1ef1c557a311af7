"""What is on record of every framework: its audit, what has changed since, and what is to be reported to it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from framework_verdicts import ALL
from some import first
from typer.testing import CliRunner

from klgrad.audit.policy_sentences import COLUMNS
from klgrad.cli import app
from klgrad.errors import NotAuditableError, UnknownNameError
from klgrad.frameworks import DEFAULTS, FRAMEWORKS, Recorded, record, recorded
from klgrad.frameworks.record import PartChange, compare, findings, newest_release


def run(*arguments):
    return CliRunner().invoke(app, [*arguments])


UNPROVED = re.compile("not (proved|known|told)")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_is_recorded_at_its_tested_version(name):
    known = recorded(name)
    assert (known.framework, known.version) == (name, FRAMEWORKS[name].tested)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", known.date)
    assert {row[0] for row in known.rows} == set(known.verdicts) == set(ALL[name])
    for setting, (verdict, off_policy, _) in known.verdicts.items():
        assert (verdict, off_policy) == ALL[name][setting][:2], setting
    assert {len(row) for row in known.rows} == {len(known.columns)}
    assert set(known.words) == set(known.verdicts)
    assert DEFAULTS[name].subject in ALL[name]
    assert {len(row) for row in known.policy_losses} <= {len(COLUMNS)}
    assert (len(known.policy_losses) >= 6) == bool(FRAMEWORKS[name].whole_losses)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_parts_of_every_setting_are_proved(name):
    open_cells = [(row[0], cell) for row in recorded(name).rows for cell in row[1:] if UNPROVED.search(cell)]
    assert open_cells == []


def test_there_is_no_record_of_anything_else():
    names = {path.name for path in (files("klgrad.frameworks") / "records").iterdir() if path.name.endswith(".json")}
    assert names == {f"{name}.json" for name in FRAMEWORKS}
    assert recorded("no-such-trainer") is None


def test_what_is_written_is_read_again(tmp_path, monkeypatch):
    verdicts = {"mine π": ("nothing", "unknown", "always")}
    words = {"mine π": ("nothing", "not told")}
    known = Recorded("mine", "1.2", "2026-01-02", ["loss", "notes"], [["mine π", "none"]], verdicts, words)
    (tmp_path / "records").mkdir()
    known.write(tmp_path / "records")
    monkeypatch.setattr("klgrad.frameworks.record.files", lambda _: tmp_path)
    assert recorded("mine") == known


# What was said before by the match with a list of targets, and the parts that imply it.

BEFORE = json.loads((Path(__file__).parent / "verdicts_before.json").read_text())
"""By phrase, the settings of all frameworks of which it was recorded."""

ROWS = {row[0]: row for name in FRAMEWORKS for row in recorded(name).rows}


def is_implied(phrase, row):
    """Whether the parts of a row say what a phrase said, or why it could not be said."""
    _, divergence, ahead, samples, unit, scale, *rest = row
    notes = rest[0] if rest else ""
    divergence, _, centred = divergence.partition(", centred")
    bare, *edges = re.split(r" where |, constant ", divergence)
    bounded = bool(edges)
    batch = unit == "mean over tokens" or scale == "spread" or bool(centred) or "mean per completion" in unit
    if phrase.startswith("no known divergence"):  # the parts have a name that the list had not
        by_length = unit == "mean per completion" or "fill the batch" in notes or "last token" in notes
        other = bare not in ("reverse KL", "forward KL") or samples.startswith("mean") or bounded
        return other or by_length or scale == "spread" or "truncated" in row[0]
    if phrase.startswith(("nothing", "no KL")):
        is_far = "but not with" in phrase  # a coefficient that is 0 near ref only
        return divergence.startswith("nothing") or "to the sampler" in divergence or (is_far and bounded)
    kind, level, *conditions = phrase.split(", ")
    said = [bare == kind, ahead == {"token by token": "no", "whole completions": "all"}[level]]
    text = ", ".join(conditions)
    batch = batch or row[0].startswith("tinker-cookbook")  # which subtracts the mean of the batch's tokens
    said += [batch] if "in large batches" in text or "scale that depends" in text else []
    if "equal lengths" in text:
        said.append(unit == "mean per completion" or row[0].startswith("tinker-cookbook"))  # which centres tokens
    if ("near ref" in text and "equal lengths" not in text) or "but not with" in text:
        said.append(bounded)
    return all(said)


@pytest.mark.parametrize("phrase", BEFORE)
def test_what_was_said_before_is_implied_by_the_parts(phrase):
    assert [name for name in BEFORE[phrase] if not is_implied(phrase, ROWS[name])] == []


def test_a_phrase_is_not_implied_by_other_parts():
    row = ["x", "reverse KL", "no", "fresh", "sum", "1", ""]
    assert is_implied("reverse KL, token by token", row)
    for i, text in ((1, "forward KL"), (2, "all")):
        assert not is_implied("reverse KL, token by token", [*row[:i], text, *row[i + 1 :]])
    assert not is_implied("reverse KL, token by token, at equal lengths only", row)
    assert not is_implied("no known divergence", row)


# What has changed since: newer releases, and parts of the losses.

AS_CODE = replace(FRAMEWORKS["slime"], distribution="torch", files=())
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
    shown = run("frameworks")
    assert shown.exit_code == 0
    for name in FRAMEWORKS:
        assert name in shown.stdout


def test_a_newer_release_ends_with_status_1(monkeypatch, tmp_path):
    answers(monkeypatch, "skyrl (99.0)\n")
    path = tmp_path / "drift.json"
    shown = run("frameworks", "skyrl", "slime", "--check", "--json", str(path))
    assert shown.exit_code == 1
    first, second = json.loads(path.read_text())["frameworks"]
    assert (first["newest"], first["has_newer"]) == ("99.0", True)
    assert second["newest"] is None
    assert run("frameworks", "slime", "--check").exit_code == 0


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


# The findings about other projects: each program prints what its text says, where the project is installed.

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
        shown = run("report", finding.framework, finding.name)
        assert shown.stdout == finding.text


def test_without_a_name_all_are_listed():
    shown = run("report").stdout
    for finding in FINDINGS.values():
        assert finding.framework in shown
        assert finding.title.replace("`", "") in shown


@pytest.mark.parametrize("words", ["report no-such-project", "report rlinf no-such-finding", "frameworks nothing"])
def test_an_unknown_name(words):
    assert isinstance(run(*words.split()).exception, UnknownNameError)
