"""Frameworks in `klgrad audit`: single settings, versions, defaults, and what is recorded of those not installed."""

import importlib.metadata
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.cli.audit import matching, recorded_table
from klgrad.errors import NotAuditableError, UnknownNameError
from klgrad.frameworks import FRAMEWORKS, recorded


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *arguments])


def one_line(text):
    return " ".join(text.split())


@pytest.fixture
def nothing_installed(monkeypatch):
    """No framework is found; those with a transcription need none."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("klgrad.frameworks.framework.version", version)


def test_a_setting_by_its_name_is_shown_in_full():
    shown = run("open-instruct kl_estimator=1 loss_denominator=N")
    assert shown.exit_code == 0, shown.output
    assert "looks ahead " in shown.output  # a line of the full report alone
    assert "kl_estimator=3" not in shown.output


def test_some_words_of_a_name_mean_every_setting_that_has_them(tmp_path):
    shown = run("open-instruct   loss_denominator=N", "--markdown", str(tmp_path / "table.md"))
    assert shown.exit_code == 0, shown.output
    names = [line.split("`")[1] for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    assert sorted(names) == [f"open-instruct kl_estimator={number} loss_denominator=N" for number in range(4)]


def test_a_whole_name_means_that_setting_alone():
    known = ["trl rloo a=1", "trl rloo a=1 b=2"]
    assert matching("trl rloo a=1", known) == ["trl rloo a=1"]
    assert matching("trl  a=1", known) == known
    with pytest.raises(UnknownNameError, match=r"setting of trl.*did you mean"):
        matching("trl rloo a=3", known)


def test_a_table_names_the_version_and_marks_the_default():
    shown = run("prime-rl").output
    assert "prime-rl 0.8.0: formulae transcribed from PrimeIntellect-ai/prime-rl, not its own code" in one_line(shown)
    assert shown.count("(default)") == 1
    names = one_line("\n".join(line[: line.find("  ")] for line in shown.splitlines()))  # the first column
    assert "kl_tau (default) prime-rl algorithm=opd" in names


@pytest.mark.parametrize("name", [name for name, framework in FRAMEWORKS.items() if not framework.transcribed])
def test_what_is_not_installed_shows_its_recorded_audit(name, nothing_installed):
    shown, known = run(name), recorded(name)
    assert shown.exit_code == 0, shown.output
    head = f"{name} is not installed here: audited on {known.date} with version {known.version}."
    assert one_line(shown.output).startswith(head)
    assert "Install it to audit your own version: pip install" in shown.output
    assert shown.output.count("(default)") == 1


def test_a_recorded_table_is_not_cut_off_in_a_narrow_terminal(nothing_installed):
    console = Console(width=80, record=True, file=StringIO())
    console.print(recorded_table("ms-swift"))
    assert "…" not in console.export_text()


def test_a_misspelt_framework_is_suggested():
    assert "did you mean 'nemo-rl'" in str(run("nemo-rll").exception)


def test_one_setting_of_what_is_not_installed(nothing_installed):
    shown = run("trl rloo normalize_advantages=True")
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("normalize_advantages") == 1


def test_what_is_not_installed_is_shown_beside_what_is_audited(nothing_installed):
    shown = run("verl", "k1-loss")
    assert "verl is not installed here" in shown.output
    assert "regularises nothing" in shown.output


@pytest.mark.parametrize("option", [["--expect", "reverse-kl-token"], ["--strict"], ["--json", "-"]])
def test_a_record_is_no_answer_to_an_expectation_or_for_a_file(option, nothing_installed):
    shown = run("verl", *option)
    assert isinstance(shown.exception, NotAuditableError)
