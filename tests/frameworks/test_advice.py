"""Advice is held against the audited settings, and its code is run."""

import re

import pytest
from framework_verdicts import ALL
from typer.testing import CliRunner

from klgrad import KLTerm
from klgrad.cli import app
from klgrad.errors import UnknownNameError
from klgrad.frameworks import FRAMEWORKS, HOMES, SETTINGS, recorded
from klgrad.frameworks.framework import TARGET_OF, expresses

CASES = [(name, meaning) for name, settings in SETTINGS.items() for meaning in settings]
MEANINGS = [(d, level) for d in ("reverse", "forward") for level in ("token", "sequence")]


@pytest.mark.parametrize(("name", "meaning"), CASES, ids=str)
def test_a_setting_descends_what_the_audit_of_it_finds(name, meaning):
    setting = SETTINGS[name][meaning]
    on, off, _ = ALL[name][setting.subject]
    assert setting.descends == (on, off)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("meaning", MEANINGS, ids=str)
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_command_gives_lines_or_code_and_the_truth(name, meaning, off_policy):
    options = ["--divergence", meaning[0], "--level", meaning[1], *(["--off-policy"] if off_policy else [])]
    shown = CliRunner().invoke(app, ["advise", name, *options])
    assert shown.exit_code == 0, shown.output
    setting = SETTINGS[name].get(meaning)
    if setting is not None:
        assert setting.lines.split("\n")[0][:40] in shown.output
        assert f"It descends: {recorded(name).parts_of(setting.subject)}." in " ".join(shown.output.split())
    if setting is None or not expresses(setting, meaning, off_policy):
        assert "KLTerm(" in shown.output
    for role, where in HOMES[name].tensors.items():
        assert re.search(rf"^  {role} +{re.escape(where[:30])}", shown.output, re.MULTILINE)
    assert f"Checked on {name} {FRAMEWORKS[name].tested}." in shown.output
    assert set(SETTINGS) == set(HOMES) <= set(FRAMEWORKS)


def test_each_meaning_has_the_target_of_its_term():
    for (divergence, level), target in TARGET_OF.items():
        estimator = "k1" if divergence == "reverse" else "k3"
        assert KLTerm(divergence=divergence, level=level, estimator=estimator).descends.on_policy == target
    assert set(TARGET_OF) == set(MEANINGS)


def test_an_unknown_framework_is_told_so():
    assert isinstance(CliRunner().invoke(app, ["advise", "tlr"]).exception, UnknownNameError)
