"""The report requests no column that it has, proposes no weight that is 1, and explains large numbers."""

import pytest
import torch
from logs.synthetic import sampled, write
from typer.testing import CliRunner

from klgrad.cli import app
from klgrad.logs import examine


def report(tmp_path, data, *cell):
    return examine(write(tmp_path / "log.npz", data), *cell)


@pytest.mark.parametrize("fault", ["temperature", "top-p", "stale"])
def test_no_group_column_is_requested_if_one_was_read(fault, tmp_path):
    data = sampled(fault, 0.8, rows=12, tokens=20)
    data["group"] = torch.arange(12)  # one completion of each prompt
    cause = report(tmp_path, data).cause
    assert cause is not None
    assert "The prompts in the `group` column have too few first tokens in common to show" in cause.description
    assert "column would show" not in cause.description


@pytest.mark.parametrize("noise", [0.0, 1e-5])
def test_no_weight_is_proposed_if_the_sampler_is_the_trainer(noise, tmp_path):
    data = sampled(rows=64, tokens=20)
    wobble = noise * torch.randn(data["logp"].shape, generator=torch.Generator().manual_seed(0))
    data["behavior_logp"] = (data["logp"] + wobble).clamp(max=0)
    found = report(tmp_path, data)
    assert found.comparisons["token"].term == "KLTerm(level='token')"
    assert found.comparisons["sequence"].term == "KLTerm()"


@pytest.mark.parametrize("fault", ["stale", "temperature"])
def test_a_weight_is_proposed_if_the_sampler_is_another_policy(fault, tmp_path):
    found = report(tmp_path, sampled(fault, 0.7, rows=64, tokens=20))
    assert (
        found.comparisons["token"].term == "KLTerm(level='token', weighting=ImportanceWeighting('token', bound=None))"
    )


def test_the_same_ratio_everywhere_is_another_sampler(tmp_path):
    """All completions have the same weight, so that the effective sample size is 100%, but the ratio is not 1."""
    data = sampled(rows=64, tokens=20)
    data["behavior_logp"] = data["logp"] - 0.1
    assert "ImportanceWeighting" in report(tmp_path, data).comparisons["token"].term


def test_a_loss_of_single_tokens_is_explained_against_whole_completions(tmp_path):
    data = sampled(rows=64, tokens=20)
    found = report(tmp_path, data, "k2-loss")
    assert found.comparisons["token"].relative_difference < 1e-6
    assert found.comparisons["sequence"].relative_difference > 0.5
    assert "compare such a loss token by token" in found.explanation
    shown = CliRunner().invoke(app, ["logs", str(tmp_path / "log.npz"), "--cell", "k2-loss"]).stdout
    assert " ".join(found.explanation.split()) in " ".join(shown.split())
    assert report(tmp_path, data, "k1-reward").explanation == ""


@pytest.mark.parametrize(("dead", "mention"), [(1, ""), (30, ", and are zero on 0.03% of the tokens")])
def test_a_tiny_dead_zone_is_not_mentioned(dead, mention, tmp_path):
    logp = torch.full((100, 1000), -5.0)
    ref = logp - torch.linspace(-1, 1, 1000)
    ref.view(-1)[:dead] = -0.5  # log ref/π = 4.5: k3 is beyond its clamp
    (advice,) = report(tmp_path, {"logp": logp, "ref_logp": ref}, "k3-loss-clamped").advice
    assert f"%{mention}. Use" in advice
    assert "0.00%" not in advice


def test_a_loss_that_was_not_named_is_called_assumed(tmp_path):
    data = sampled(rows=12, tokens=20)
    assumed, named = report(tmp_path, data), report(tmp_path, data, "k3-loss")
    assert any("k3-loss is assumed. Name yours by --cell" in note for note in assumed.notes)
    assert assumed.advice[0].startswith("If the KL loss of the run is k3-loss: it descends ")
    assert not any("assumed" in note for note in named.notes)
    assert named.advice[0].startswith("k3-loss descends ")
