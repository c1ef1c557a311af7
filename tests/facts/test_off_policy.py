"""Facts 16 to 20: samples from μ, not π; and what happens to a KL before normalisation."""

import pytest
import torch
from oracle import (
    ON_SEQUENCES,
    SEQUENCES,
    SMALL,
    differentiated,
    kl_gradients,
    mean_gradient,
    mean_gradient_over_groups,
    whole_space,
)
from tolerances import EXACT

from klgrad import (
    Clip,
    ImportanceWeighting,
    KLTerm,
    Mask,
    Truncate,
    consistency_loss,
    squared_sequence,
    zoo as cells,
)
from klgrad.core.credit import to_go
from klgrad.core.importance import effective_sample_size, prefix_ratio, sequence_ratio, token_ratio
from klgrad.enumeration import autoregressive, target_gradients


@ON_SEQUENCES
def test_fact_16_the_prefix_ratio_gives_the_token_target_and_the_token_ratio_the_samplers(problem):
    rollout, targets = whole_space(problem), target_gradients(problem)
    l = rollout.log_ratio
    EXACT.check_vector(mean_gradient(problem, prefix_ratio(rollout) * l), targets["reverse-kl-token"])
    EXACT.check_vector(mean_gradient(problem, token_ratio(rollout) * l), targets["reverse-kl-token-sampler"])
    unweighted = mean_gradient(problem, l)
    for name in ("reverse-kl-token", "reverse-kl-token-sampler"):
        assert (unweighted - targets[name]).norm() > 0.01 * targets[name].norm()


@ON_SEQUENCES
def test_fact_16_the_exact_form_needs_no_ratio_for_the_present_token(problem):
    rollout, targets = whole_space(problem), target_gradients(problem)
    w = prefix_ratio(rollout)
    before = torch.cat([torch.ones_like(w[:, :1]), w[:, :-1]], -1)
    pathwise = problem.probability @ (before[..., None] * kl_gradients(problem)).sum(1)
    EXACT.check_vector(pathwise, targets["reverse-kl-token"])
    unweighted = problem.probability @ kl_gradients(problem).sum(1)
    EXACT.check_vector(unweighted, targets["reverse-kl-token-sampler"])


@ON_SEQUENCES
def test_fact_17_per_decision_and_whole_sequence_weights(problem):
    rollout, target = whole_space(problem), target_gradients(problem)["reverse-kl-sequence"]
    l, mask = rollout.log_ratio, rollout.mask
    EXACT.check_vector(mean_gradient(problem, to_go(prefix_ratio(rollout) * l, mask)), target)
    EXACT.check_vector(mean_gradient(problem, sequence_ratio(rollout) * to_go(l, mask)), target)


TOKEN, PREFIX, SEQUENCE = (ImportanceWeighting(ratio, bound=None) for ratio in ("token", "prefix", "sequence"))
OFF_POLICY = [
    KLTerm(weighting=PREFIX),
    KLTerm(weighting=SEQUENCE, baseline="leave_one_out"),
    KLTerm(weighting=PREFIX, estimator="k1_k3", baseline="leave_one_out"),
    KLTerm(weighting=PREFIX, estimator="exact", baseline="leave_one_out"),
    KLTerm(weighting=SEQUENCE, estimator="exact"),
]


@pytest.mark.parametrize("term", OFF_POLICY, ids=lambda t: t.name)
def test_fact_17_terms_over_every_group_of_stale_samples(term):
    found = mean_gradient_over_groups(SMALL, 2, lambda r: term(r).loss, on_policy=False)
    EXACT.check_vector(found, target_gradients(SMALL)["reverse-kl-sequence"])


@pytest.mark.parametrize("bound", [Truncate(1.1), Clip(0.9, 1.1), Mask(0.5, 1.5)], ids=str)
def test_fact_18_bounds_add_bias_and_report_what_they_cost(bound):
    problem = SEQUENCES["varying"]
    rollout, target = whole_space(problem), target_gradients(problem)["reverse-kl-sequence"]
    result = KLTerm(weighting=ImportanceWeighting("prefix", bound=bound))(rollout)
    assert (mean_gradient(problem, result.coefficient) - target).norm() > 0.01 * target.norm()
    raw = prefix_ratio(rollout)[rollout.mask]
    EXACT.check(result.diagnostics["ratio/share_bounded"], (bound(raw) != raw).double().mean())
    EXACT.check(result.diagnostics["ratio/effective_sample_size"], effective_sample_size(bound(raw)))
    assert 0 < float(result.diagnostics["ratio/share_bounded"]) < 1


def test_fact_18_a_wide_bound_changes_nothing():
    rollout = whole_space(SEQUENCES["varying"])
    free, wide = (KLTerm(weighting=x)(rollout) for x in (PREFIX, ImportanceWeighting("prefix", Truncate(1e6))))
    assert torch.equal(free.coefficient, wide.coefficient)


def test_fact_18_a_sequence_ratio_on_token_terms_must_be_asked_for():
    """The (B, 1) ratio reaches the tokens only through ratio='sequence'; every other weight is per token."""
    rollout = whole_space(SEQUENCES["varying"])
    assert sequence_ratio(rollout).shape == (len(rollout.logp), 1)
    for weighting in (TOKEN, PREFIX):
        weight = KLTerm(level="token", weighting=weighting)(rollout).coefficient / rollout.log_ratio
        live = weight[rollout.mask.all(-1)]
        assert not torch.allclose(live[:, 0], live[:, 1])


@ON_SEQUENCES
def test_fact_19_freezing_the_log_ratio_at_the_old_policy_is_another_target(problem):
    rollout, target = whole_space(problem), target_gradients(problem)["reverse-kl-sequence"]
    frozen = (problem.behavior_logp - problem.ref_logp).sum(-1, keepdim=True).expand_as(problem.logp)
    fresh = rollout.log_ratio.sum(-1, keepdim=True).expand_as(problem.logp)
    weight = sequence_ratio(rollout)
    EXACT.check_vector(mean_gradient(problem, weight * fresh), target)
    assert (mean_gradient(problem, weight * frozen) - target).norm() > 0.01 * target.norm()


def test_fact_20_a_standard_deviation_rescales_beta_by_prompt():
    """KL in the reward before the division: doubling β leaves the gradient as it was; after it, doubles it."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0]).double()
    kl = torch.tensor([0.3, -0.2, 0.4, 0.1]).double()
    normalise = lambda x: (x - x.mean()) / x.std()
    before = [normalise(rewards - beta * kl) - normalise(rewards) for beta in (1.0, 2.0)]
    assert not torch.allclose(before[1], 2 * before[0], rtol=0.05)
    far = [normalise(-beta * kl) for beta in (1.0, 2.0)]
    EXACT.check(far[1], far[0])
    after = [-beta * kl for beta in (1.0, 2.0)]
    EXACT.check(after[1], 2 * after[0])


def test_fact_20_the_group_std_cell_depends_on_ref_not_through_its_distance():
    """Twice as far from ref, the divided gradient is no stronger: β has lost its meaning."""
    norms = []
    for spread in (0.1, 0.2):
        problem = autoregressive(2, 2, ends=True, seed=2, away_from_ref=spread)
        cell, plain = (
            mean_gradient_over_groups(problem, 3, cells.get(n), on_policy=True).norm()
            for n in ("k1-reward-group-std", "k1-reward")
        )
        norms.append((float(cell), float(plain)))
    assert norms[1][1] > 1.5 * norms[0][1]
    assert norms[1][0] < 1.2 * norms[0][0]


@ON_SEQUENCES
def test_the_squared_sequence_log_ratio_needs_no_weights(problem):
    coefficient = squared_sequence(whole_space(problem)).coefficient
    EXACT.check_vector(mean_gradient(problem, coefficient), target_gradients(problem)["squared-sequence"])


def test_the_consistency_loss_is_half_the_variance_and_its_gradient():
    reward, beta = torch.tensor([0.4, -0.3, 1.0, 0.2]).double(), 0.7
    gap = lambda p: reward - beta * (p.logp - p.ref_logp).sum(-1)
    mu = SMALL.probability
    target = differentiated(SMALL, lambda p: mu @ (gap(p) - mu @ gap(p)).square() / 2)
    # The reward of a completion is read off its length and last token: here, off its index.
    index = {tuple(r): n for n, r in enumerate(SMALL.logp.tolist())}
    rewards = lambda rollout: reward[[index[tuple(r)] for r in rollout.logp.detach().tolist()]]
    for size in (2, 3):
        loss = lambda rollout: consistency_loss(rollout, rewards(rollout), beta)
        EXACT.check_vector(mean_gradient_over_groups(SMALL, size, loss, on_policy=False), target)
