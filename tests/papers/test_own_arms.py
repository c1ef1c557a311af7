"""A user's own estimator beside the arms of the papers."""

import json

import pytest
import torch
from some import first
from tolerances import EXACT, SINGLE
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.core.estimators import k2
from klgrad.errors import KlgradError
from klgrad.papers import Settings
from klgrad.papers.study import load_study, studies
from klgrad.papers.tang_munos import bandits, estimates

FILE = """
import torch
from klgrad import KLTerm, divergences
def bounded(log_ratio):
    return log_ratio.clamp(-1, 1)
huber = divergences.huber(1.0)
def loss(logp, ref_logp, mask):
    l = (logp - ref_logp).clamp(-1, 1).detach()
    return (l * logp * mask).sum(-1).mean()
def k2(logp, ref_logp, mask):
    return ((logp - ref_logp) ** 2 / 2 * mask).sum(-1).mean()
token = KLTerm(level="token")
exact = KLTerm(estimator="exact")
def coupled(logp, ref_logp, mask):
    l = (logp - ref_logp).detach()
    return ((l - l.mean()) * logp * mask).sum(-1).mean()
def summed(logp, ref_logp, mask):
    return ((logp - ref_logp) ** 2 / 2 * mask).sum()
def one_number(log_ratio):
    return log_ratio.sum()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(FILE)
    return path


def weigh(spec):
    generator = torch.Generator().manual_seed(0)
    problems = bandits.draw(3, generator)
    p, log_ratio = problems.logp.exp(), problems.logp - problems.ref_logp
    return bandits.weight_of(spec)(log_ratio, p, p), log_ratio


@pytest.mark.parametrize("name", ["bounded", "huber", "loss"])
def test_a_function_a_divergence_and_a_loss_with_one_coefficient_are_one_arm(file, name):
    weight, log_ratio = weigh(f"{file}:{name}")
    EXACT.check(weight, log_ratio.clamp(-1, 1))


@pytest.mark.parametrize("name", ["k2", "token"])
def test_a_loss_of_the_paper_is_the_papers_arm(file, name):
    weight, log_ratio = weigh(f"{file}:{name}")
    EXACT.check(weight, k2.slope(log_ratio))


@pytest.mark.parametrize("name", ["coupled", "summed", "one_number", "exact"])
def test_what_has_no_coefficient_of_its_own_for_each_completion_is_refused(file, name):
    with pytest.raises(KlgradError, match=f"my.py:{name} to "):
        weigh(f"{file}:{name}")


def test_the_papers_arms_keep_their_numbers(file):
    name = f"{file}:bounded"
    alone, beside = (estimates.Fig2().run(Settings(quick=True, arms=arms)) for arms in ((), (name,)))
    for kind in ("simulated", "exact"):
        mine = beside[kind].pop(name)
        assert mine not in beside[kind].values()
        assert beside[kind] == alone[kind]
    assert estimates.Fig2().check(beside) == estimates.Fig2().check(alone)


@pytest.mark.slow
@pytest.mark.parametrize("study", first([name for name, study in studies().items() if study.compare], 1))
def test_a_study_that_takes_arms_draws_and_tabulates_them(file, study, tmp_path):
    spec = f"{file}:k2"
    found = CliRunner().invoke(app, ["reproduce", study, "--quick", "--with", spec, "--out", str(tmp_path)])
    assert found.exit_code in (0, 1), found.output
    numbers = json.loads((tmp_path / f"{study}.json").read_text())["numbers"]
    comparison = load_study(study).compare(numbers)
    assert len(comparison.rows[spec]) == len(comparison.columns)
    if "k2-loss" in comparison.rows:
        SINGLE.check(torch.tensor(comparison.rows[spec]), torch.tensor(comparison.rows["k2-loss"]))
    assert "my.py:k2" in (tmp_path / f"{study}.svg").read_text()
    output = " ".join(found.output.split())
    assert comparison.caption in output
    assert "sentence measured verdict" in output


def test_other_studies_name_those_that_take_arms(file, tmp_path):
    asked = ["reproduce", "tang-munos/fig6", "--with", f"{file}:k2", "--out", str(tmp_path)]
    error = CliRunner().invoke(app, asked).exception
    assert "tang-munos/fig2, tang-munos/fig3" in str(error)
