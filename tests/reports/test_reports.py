"""KL reports: their numbers, errors and units."""

from collections.abc import Mapping
from dataclasses import fields

import pytest
import torch
from oracle import PROBLEMS, whole_space
from tolerances import EXACT

from klgrad import KLTerm, Rollout, kl_report, mismatch_report
from klgrad.core.importance import effective_sample_size
from klgrad.reports import KLSums, StreamSample

Z = 5.0
"""Standard errors that a mean over fixed seeds may be off: one in two million."""


def sample(problem, n, seed, *, from_behavior=False):
    table = problem if from_behavior else problem.on_policy()
    rows = torch.multinomial(table.probability, n, replacement=True, generator=torch.Generator().manual_seed(seed))
    whole = whole_space(table)
    return Rollout(**{f.name: x[rows] for f in fields(whole) if (x := getattr(whole, f.name)) is not None})


def test_a_report_is_a_mapping_of_its_metrics_and_reads_the_device_once(monkeypatch):
    report = kl_report(sample(PROBLEMS["varying"].on_policy(), 50, 1))
    metrics, calls = report.metrics(), []
    monkeypatch.setattr(type(report), "metrics", lambda self: calls.append(1) or metrics)
    assert dict(report) == {**report} == metrics
    assert len(calls) == 1
    assert all(type(value) is float for value in dict(report).values())
    assert isinstance(report, Mapping)  # wandb.log and trackio.log ask this
    assert "kl/clusters" in report
    assert len(report) == len(metrics)
    with pytest.raises(KeyError):
        report["kl"]


def test_all_unbiased_estimates_agree_with_the_exact_kl_within_their_errors():
    problem = PROBLEMS["varying"].on_policy()
    kl = float((problem.probability * (problem.logp - problem.ref_logp).sum(-1)).sum())
    per_token = kl / float(problem.probability @ problem.space.mask.sum(-1).double())
    found = kl_report(sample(problem, 20_000, 1)).estimates
    for name in ("k1", "k3", "exact"):
        for unit, truth in (("per_sequence", kl), ("per_token", per_token)):
            mean, error = found[f"kl/reverse/{name}/{unit}"]
            assert abs(float(mean) - truth) < Z * float(error)
            assert float(error) < 0.05 * truth
    exact, k1 = (found[f"kl/reverse/{n}/per_sequence"].standard_error for n in ("exact", "k1"))
    assert exact < k1


@pytest.mark.slow
def test_the_standard_error_is_the_spread_of_the_mean():
    problem = PROBLEMS["varying"].on_policy()
    reports = [kl_report(sample(problem, 200, seed)).estimates["kl/reverse/k1/per_token"] for seed in range(300)]
    spread = torch.stack([r.mean for r in reports]).std()
    claimed = torch.stack([r.standard_error for r in reports]).mean()
    assert float(claimed) == pytest.approx(float(spread), rel=0.15)


@pytest.mark.parametrize("grouped", [True, False])
def test_a_stream_a_batch_and_a_term_have_the_same_errors_and_clusters(grouped):
    """Unequal groups, spread over batches of unequal size."""
    seen = sample(PROBLEMS["varying"], 60, 3)
    sizes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8])
    group = torch.arange(11).repeat_interleave(sizes) if grouped else None
    whole = Rollout(seen.logp, seen.ref_logp, seen.mask, group=group)
    sums, order = KLSums(), torch.randperm(60, generator=torch.Generator().manual_seed(0))
    for rows in order.split([1, 7, 20, 32]):
        part = Rollout(seen.logp[rows], seen.ref_logp[rows], seen.mask[rows])
        sums.add(part, None if group is None else group[rows])
    streamed, at_once = sums.report(), kl_report(whole)
    assert streamed.clusters == at_once.clusters == streamed.metrics()["kl/clusters"] == (11 if grouped else 60)
    for name, expected in at_once.estimates.items():
        found = streamed.estimates[name]
        assert found.interval() == pytest.approx(expected.interval(), rel=EXACT.rtol)
        EXACT.check(found.standard_error, expected.standard_error)
        EXACT.check(found.degrees_of_freedom, expected.degrees_of_freedom)
    assert streamed.intervals(0.9)["kl/reverse/k1/per_token"] == pytest.approx(
        at_once.estimates["kl/reverse/k1/per_token"].interval(0.9), rel=EXACT.rtol
    )
    for reduction in ("sequence", "token"):
        value = KLTerm(reduction=reduction)(whole).value
        expected = at_once.estimates[f"kl/reverse/k1/per_{reduction}"]
        assert (value.clusters, value.interval()) == (expected.clusters, pytest.approx(expected.interval(), rel=1e-9))


def test_unequal_groups_have_fewer_degrees_of_freedom_than_clusters():
    seen = sample(PROBLEMS["varying"], 32, 4)
    of = lambda group: kl_report(Rollout(seen.logp, seen.ref_logp, seen.mask, group=group)).estimates
    equal = of(torch.arange(32) // 4)["kl/reverse/k1/per_sequence"]
    EXACT.check(equal.degrees_of_freedom, 7.0)
    unequal = of(torch.tensor([0] * 25 + list(range(1, 8))))["kl/reverse/k1/per_sequence"]
    assert unequal.clusters == equal.clusters == 8
    assert 1 <= float(unequal.degrees_of_freedom) < 4


def test_shares_beyond_clamps_are_counted_on_the_side_that_is_clamped():
    logp = torch.tensor([[-3.0, -5.0, -0.5, -0.5, -0.6, -0.5]])
    ref = torch.tensor([[-0.1, -0.1, -3.5, -5.5, -5.6, -25.0]])
    found = kl_report(Rollout(logp, ref, torch.ones(1, 6))).scalars
    assert found["clamp/share_beyond_k3_value_10"].item() == 3 / 6  # exact, though the log-probs are float32
    assert found["clamp/share_beyond_k2_value_10"].item() == 4 / 6
    assert found["clamp/share_beyond_input_20"].item() == 1 / 6


def test_mismatch_estimates_the_kl_of_the_sampler_to_the_trainer():
    problem = PROBLEMS["varying"]
    seen = sample(problem, 20_000, 2, from_behavior=True)
    report = mismatch_report(seen.logp, seen.behavior_logp, seen.mask)
    of_sampler = float(problem.probability @ (problem.behavior_logp - problem.logp).sum(-1))
    # The other direction is weighted token by token: KL(π‖μ) of the next token, at the sampler's prefixes.
    p, q = (torch.log_softmax(x, -1) for x in (problem.logits, problem.behavior_logits))
    of_trainer = float(problem.prefix_probability(problem.behavior_logits) @ (p.exp() * (p - q)).sum(-1))
    truths = {"mismatch/k1": of_sampler, "mismatch/k3": of_sampler, "mismatch_of_trainer/k3": of_trainer}
    for name, truth in truths.items():
        mean, error = report.estimates[f"kl/{name}/per_sequence"]
        assert abs(float(mean) - truth) < Z * float(error)
        assert float(error) < 0.1 * truth
    EXACT.check(report.scalars["ratio/token/mean"], (seen.logp - seen.behavior_logp)[seen.mask].exp().mean())


def test_a_matching_sampler_has_ratio_one_and_no_mismatch_and_a_report_prints_a_line_per_number():
    logp = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    found = mismatch_report(logp, logp, torch.ones(3, 4))
    assert found["kl/mismatch/k3/per_token"] == 0
    assert found["ratio/token/max"] == found["ratio/sequence/effective_sample_size"] == 1
    assert found["ratio/token/share_outside_band"] == 0
    text = str(kl_report(Rollout(logp, logp - 0.1, torch.ones(3, 4))))
    assert "kl/reverse/k1/per_token     " in text
    assert "±" in text


def test_shares_and_means_of_lengths_are_exact():
    """A count divided by a count is float32 in torch, and loses every third digit of a share of a million tokens."""
    mask = torch.ones(3, 7)
    mask[0, 4:] = 0
    logp = torch.full((3, 7), -0.5)
    found = mismatch_report(logp, logp - torch.tensor([3.0] + 6 * [0.0]), mask).metrics()
    assert found["ratio/token/share_outside_band"] == 3 / 18
    assert found["length/mean"] == 18 / 3
    assert (found["length/min"], found["length/max"]) == (4, 7)


def test_effective_sample_size_counts_what_is_left():
    EXACT.check(effective_sample_size(torch.ones(7).double()), 1.0)
    EXACT.check(effective_sample_size(torch.tensor([1.0, 0, 0, 0]).double()), 0.25)
    assert float(effective_sample_size(torch.zeros(3))) == 0
    assert float(effective_sample_size(torch.tensor([1e30, 1e30]))) == 1


def test_everything_is_kept_until_the_limit():
    kept, stream = StreamSample(1000), torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    for part in stream.split(37, -1):
        kept.add(part)
    assert torch.equal(kept.values(), stream)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 13, 64, 100, 1024])
def test_a_longer_stream_is_thinned_without_favouring_a_position(tokens):
    """Every 2nd, 4th, 8th value of completions of 8 tokens would be their first alone."""
    kept, n = StreamSample(4096), 2**17 // tokens * tokens
    for part in torch.arange(n).split(999):
        kept.add(part)
    values = kept.values()
    assert 2000 <= len(values) <= 4096
    assert torch.equal(values, values.sort().values)
    bins = min(tokens, 32)
    seen = torch.bincount(values % tokens * bins // tokens, minlength=bins).double()
    expected = torch.bincount(torch.arange(tokens) * bins // tokens).double() * len(values) / tokens
    assert float((seen / expected - 1).abs().max()) < 0.25
    halves = torch.bincount(values * 8 // n, minlength=8).double() / (len(values) / 8)
    assert float((halves - 1).abs().max()) < 0.05
