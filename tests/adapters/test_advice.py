"""Advice is held against the audited settings, and its code is run."""

import pytest
import torch
from adapters.verdicts import ALL
from typer.testing import CliRunner

from klgrad.adapters import FRAMEWORKS
from klgrad.adapters.recommendation import SETTINGS, WHERE, code, expresses
from klgrad.cli import app
from klgrad.errors import UnknownNameError

CASES = [(name, meaning) for name, settings in SETTINGS.items() for meaning in settings]
MEANINGS = [(d, level) for d in ("reverse", "forward") for level in ("token", "sequence")]


@pytest.mark.parametrize(("name", "meaning"), CASES, ids=str)
def test_a_setting_descends_what_the_audit_of_it_finds(name, meaning):
    setting = SETTINGS[name][meaning]
    on, off, _ = ALL[name][setting.subject]
    assert setting.descends == (on, off)


@pytest.mark.parametrize("meaning", MEANINGS, ids=str)
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_code_runs_and_means_it(meaning, off_policy):
    logp = -torch.rand(2, 3, requires_grad=True)
    names = {
        "logp": logp,
        "ref_logp": logp.detach() - 1,
        "mask": torch.ones(2, 3),
        "behavior_logp": logp.detach() - 0.1,
        "group": torch.zeros(2, dtype=torch.long),
        "loss": logp.sum(),
        "beta": 0.1,
    }
    exec(code(meaning, off_policy), names)
    term = names["term"]
    assert (term.divergence, term.level) == meaning
    assert (term.weighting is not None) == off_policy
    assert term.descends.on_policy == f"{meaning[0]}-kl-{meaning[1]}"


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
        assert f"It descends {setting.descends.on_policy} on-policy" in shown.output
    if setting is None or not expresses(setting, meaning, off_policy):
        assert "KLTerm(" in shown.output
    assert set(SETTINGS) == set(WHERE) <= set(FRAMEWORKS)


def test_an_unknown_framework_is_told_so():
    assert isinstance(CliRunner().invoke(app, ["advise", "tlr"]).exception, UnknownNameError)
