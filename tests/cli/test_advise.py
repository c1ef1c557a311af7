"""`klgrad advise`: lines that can be copied, and what the framework descends by default."""

import dataclasses
import inspect
import re
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.errors import UnknownNameError
from klgrad.frameworks import DEFAULTS, FRAMEWORKS, HOMES, SETTINGS, recorded
from klgrad.frameworks.framework import expresses

RUN = Path(__file__).parents[2] / "examples" / "verl" / "run.sh"


def advised(*arguments):
    shown = CliRunner().invoke(app, ["advise", *arguments])
    assert shown.exit_code == 0, shown.output
    return shown.stdout


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("divergence", "level"), list(product(("reverse", "forward"), ("token", "sequence"))), ids=str)
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_command_gives_lines_or_code_and_the_truth(name, divergence, level, off_policy):
    options = ["--divergence", divergence, "--level", level, *["--off-policy"] * off_policy]
    shown = advised(name.upper(), *options)
    text = " ".join(shown.split())
    setting = SETTINGS[name].get((divergence, level))
    if setting is not None:
        assert set(setting.lines.split("\n")) <= set(shown.split("\n"))  # whole lines, without a frame or padding
        assert f"It descends: {recorded(name).parts_of(setting.subject)}." in text
    if setting is None or not expresses(setting, (divergence, level), off_policy):
        assert "KLTerm(" in shown
    for role, where in HOMES[name].tensors.items():
        assert re.search(rf"^  {role} +{re.escape(where[:30])}", shown, re.MULTILINE)
    assert f"Checked on {name} {FRAMEWORKS[name].tested}." in shown
    default = DEFAULTS[name]
    row = recorded(name).row_of(default.subject)
    assert row
    _, divergence, ahead, *_ = row
    assert f"Defaults: {default.settings}: {divergence}; looks ahead: {ahead}; samples: " in text


def test_a_line_to_change_is_whole_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = advised("--config", str(RUN))
    assert re.search("^actor_rollout_ref.actor.kl_loss_type=.*log π/ref is below -2.61$", shown, re.MULTILINE)


def test_a_meaning_without_a_setting_comes_with_code():
    shown = advised("verl", "--level", "sequence", "--off-policy")
    nearest, code = shown.split("For this meaning on every batch: in")
    assert "No setting has this meaning on every batch. The nearest is" in nearest
    assert 'weighting=ImportanceWeighting("prefix", bound=Truncate(2.0))' in code
    assert "Off-policy Truncate(2.0) bounds the variance and adds bias" in code
    plain = advised("verl", "--divergence", "forward", "--level", "sequence")
    assert "No setting has this meaning: in" in plain
    assert "ImportanceWeighting" not in plain


def test_trl_has_a_trainer_for_every_meaning_and_it_comes_first():
    for options in ((), ("--off-policy",), ("--divergence", "forward"), ("--level", "token")):
        first = advised("trl", *options).split("from trl import")[0].split("The tensors")[0]
        assert "trainer = KLTrainer(model, reward, args, kl=kl, train_dataset=prompts)" in first
        assert "beta=0" not in first  # without a β TRL scores no reference


@pytest.mark.slow
def test_the_defaults_are_those_of_the_installed_frameworks():
    trl, liger = pytest.importorskip("trl"), pytest.importorskip("liger_kernel.chunked_loss")
    fields = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    parameters = inspect.signature(liger.LigerFusedLinearGRPOLoss.__init__).parameters
    for name, defaults in (("trl", fields), ("liger", {key: p.default for key, p in parameters.items()})):
        pairs = [word.split("=") for word in DEFAULTS[name].subject.split() if "=" in word]
        assert {key: str(defaults[key]) for key, _ in pairs} == dict(pairs)
    assert (fields["beta"], parameters["beta"].default) == (0.0, 0.04)


def test_a_framework_that_has_no_advice_or_is_unknown_is_told_so():
    error = str(CliRunner().invoke(app, ["advise", "nemo-rl"]).exception)
    assert "received nemo-rl, without any; remedy: klgrad audit nemo-rl shows what its settings descend" in error
    assert isinstance(CliRunner().invoke(app, ["advise", "tlr"]).exception, UnknownNameError)
