"""`klgrad convert`: after the conversion the gradients of both losses agree near ref, summed over every outcome."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from some import first
from tolerances import NEAR_REF
from typer.testing import CliRunner

from klgrad.audit import audit, catalogue
from klgrad.audit.subject import as_subject, expected_gradient
from klgrad.cli import app
from klgrad.cli.convert import _choose
from klgrad.core.term import KLTerm
from klgrad.enumeration import autoregressive
from klgrad.errors import KlgradError
from klgrad.frameworks import FRAMEWORKS, recorded
from klgrad.frameworks.conversion import BatchSizes, Pull, differences_of, factor_of, pull_of

pytestmark = pytest.mark.slow

LENGTH, GROUP = 3, 2
SIZES = BatchSizes(length=LENGTH, completions=GROUP, group=GROUP, width=LENGTH)


def swapped(logp, ref_logp):
    return (logp - ref_logp).expm1() - (logp - ref_logp)


def summed_over_rows(logp, ref_logp, mask):
    return 3 * ((logp - ref_logp) ** 2 * mask).sum() / 2


def over_a_fixed_length(logp, ref_logp, mask):
    return ((logp - ref_logp) ** 2 * mask).sum() / mask.numel()


def bounded(logp, ref_logp):
    away = (logp - ref_logp).clamp(-0.5, 0.5)
    return (away.detach() * logp).where(logp == logp, 0)


def token(divergence, **settings):
    return as_subject(KLTerm(divergence=divergence, level="token", **settings))


def listed(framework, *words):
    every = {subject.name: subject for subject in FRAMEWORKS[framework].subjects()}
    return every[_choose([framework, *words], list(every))]


SLIME, NEMO = ("slime", "low_var_kl", "--use-unbiased-kl"), ("nemo-rl", "k3", "token_level_loss=False")
PAIRS = {
    "another divergence": lambda: ("k3-loss", "k2-loss"),
    "half the scale": lambda: ("k-half-loss", "k3-loss"),
    "a mean per completion": lambda: ("k3-loss", "k2-loss-length-mean"),
    "a mean over tokens": lambda: ("k2-loss-token-mean", "k3-loss"),
    "chi-square": lambda: (swapped, "k2-loss-length-mean"),
    "a sum over rows": lambda: (summed_over_rows, "k3-loss"),
    "a fixed length": lambda: (over_a_fixed_length, "k2-loss"),
    "clamped": lambda: ("k3-loss-clamped", bounded),
    "Hellinger and Jensen-Shannon": lambda: (token("hellinger"), token("jensen-shannon(0.1)")),
    "alpha and forward": lambda: (token("alpha(0.3)"), token("forward", estimator="exact")),
    "whole completions": lambda: ("k1-reward", "reverse-sequence-k1-k3"),
    "a group's mean": lambda: ("k1-reward-group-mean", "k1-reward-leave-one-out"),
    "frameworks": lambda: (listed(*SLIME), listed(*NEMO)),
    "of TRL": lambda: (listed("trl", "grpo", "loss_type=dr_grpo"), "k2-loss"),
}
"""Names of the catalogue, functions, and losses to audit."""


def gradient(subject):
    problem = autoregressive(2, LENGTH, ends=False, seed=0, away_from_ref=1e-7).on_policy()
    return expected_gradient(subject, problem, GROUP, torch.zeros(len(problem.space)).double()).mean


@pytest.mark.parametrize("name", first(PAIRS, 5))
def test_the_gradients_agree_near_ref(name):
    first, second = (catalogue()[x] if isinstance(x, str) else as_subject(x) for x in PAIRS[name]())
    factor = factor_of(pull_of(audit(first)), pull_of(audit(second)), SIZES)
    NEAR_REF.check_vector(factor * gradient(second), gradient(first))


def converted(*arguments):
    shown = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert shown.exit_code == 0, shown.output
    return shown.stdout


def test_what_differs_beyond():
    shown = " ".join(converted("k3-loss beta=0.1", "k2-loss-length-mean", "--length", 100).split())
    assert "β = 0.1 of the first is β = 10 of the second" in shown
    assert "pull of the first -53.6 -6.39 -1.72 0.632 0.865 0.982" in shown
    assert "pull of the second -4 -2 -1 1 2 4" in shown
    assert "divergence forward KL reverse KL" in shown
    assert "They are alike in every part." in converted("k2-loss beta=0.1", "k2-loss")


def test_a_term_with_settings_and_json(tmp_path):
    path = tmp_path / "a.json"
    converted('KLTerm(level="token", divergence="forward", estimator="k3") beta=0.2', "k-half-loss", "--json", path)
    data = json.loads(path.read_text())
    assert data["beta"] == pytest.approx(0.4, rel=1e-9)
    assert data["differs"] == []
    assert data["second"]["scale"] == 0.5


def test_a_loss_of_ones_own_with_its_beta(tmp_path):
    path = tmp_path / "losses.py"
    path.write_text("def mine(logp, ref_logp, beta=0.7):\n    return beta * (logp - ref_logp) ** 2\n")
    assert "β = 0.1 of the first is β = 0.05" in converted("k2-loss beta=0.1", f"{path}:mine")


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("k3-loss", "k1-loss", "the second, but ref has no effect"),
        ("abs-loss", "k3-loss", "the first, but its pull jumps at ref"),
        ("k1-reward-group-std", "k3-loss", "divides by the standard deviation of the group"),
        ("k3-reward", "k3-loss", "no pull near ref"),
        ("k3-loss", "k2-loss-length-mean", "--length"),
        ("k1-reward-group-mean", "k1-reward", "--group"),
        ("k3-loss", "k2-loss beta=0.1", "leave it out"),
        ("k3-loss beta=-1", "k2-loss", "a positive number"),
        ("KLTerm(level=3+x)", "k2-loss", "literal settings"),
        ("k3-loss", "trl distillation", "add words"),
        ("trl distillation beta=0.5", "k3-loss", "--length"),
        ("k3-loss", "no-such-loss", "no-such-loss"),
        ("k3-loss", "losses.py", "write losses.py:NAME"),
    ],
)
def test_a_refusal_has_its_reason(first, second, reason):
    shown = CliRunner().invoke(app, ["convert", first, second])
    assert isinstance(shown.exception, KlgradError)
    assert reason in str(shown.exception)


def test_opposite_signs_are_refused():
    up = Pull(-1.0, "sum", True, "none", (), ("",) * 4)
    with pytest.raises(KlgradError, match="one that climbs"):
        factor_of(up, replace(up, scale=1.0), BatchSizes())


def test_a_framework_that_is_not_installed_is_converted_by_its_record(monkeypatch):
    arguments = ("slime k3 --use-unbiased-kl --calculate-per-token-loss beta=.1", "k3-loss", "--length", 8)
    live = converted(*arguments)
    monkeypatch.setattr(type(FRAMEWORKS["slime"]), "version", None)
    stored = converted(*arguments)
    assert "audited on 20" in stored
    assert stored.split("second:")[1] == live.split("second:")[1]


def test_what_the_words_leave_open_is_as_in_the_default():
    names = [row[0] for row in recorded("trl").rows]
    ratio = "importance_sampling_level=token use_bias_correction_kl=True"
    for words, setting in {
        "grpo loss_type=dapo": f"trl grpo loss_type=dapo {ratio}",
        "grpo dr_grpo": f"trl grpo loss_type=dr_grpo {ratio}",
        "dr_grpo use_vllm=True": "trl grpo loss_type=dr_grpo use_vllm=True",
        "token_mask": "trl grpo loss_type=dr_grpo use_vllm=True vllm_importance_sampling_mode=token_mask",
    }.items():
        assert _choose(["trl", *words.split()], names) == setting


def test_a_pull_survives_json():
    pull = pull_of(audit(catalogue()["k3-loss"]))
    assert Pull.from_dict(json.loads(json.dumps(asdict(pull)))) == pull
    assert differences_of(pull, pull) == []
