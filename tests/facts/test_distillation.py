"""Distillation: a baseline, a teacher near the student, weights of prefixes, and clipped entries, by exact sums."""

import pytest
import torch
from oracle import ON_SEQUENCES, SEQUENCES, differentiated, gradient, mean_gradient, whole_space
from tolerances import EXACT

from klgrad import ImportanceWeighting, KLTerm, divergences
from klgrad.enumeration import target_gradients
from klgrad.errors import MeaningError

BETAS = pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])


# The exact KL of the token as a baseline (vOPD).


@ON_SEQUENCES
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("weighting", [None, ImportanceWeighting("prefix", None)], ids=["fresh", "stale"])
def test_the_baseline_changes_no_expected_gradient(problem, level, weighting):
    problem = problem.on_policy() if weighting is None else problem
    term = KLTerm(level=level, baseline="token_kl", weighting=weighting)
    found = term(whole_space(problem))
    EXACT.check_vector(mean_gradient(problem, found.coefficient), target_gradients(problem)[f"reverse-kl-{level}"])
    plain = KLTerm(level=level, weighting=weighting)(whole_space(problem))
    assert (found.coefficient - plain.coefficient).abs().max() > 1e-4


def variance(problem, baseline):
    """Of one completion's gradient."""
    coefficient = KLTerm(level="token", baseline=baseline)(whole_space(problem)).coefficient
    gradients = (coefficient[..., None] * problem.scores).sum(1)
    mean = mean_gradient(problem, coefficient)
    return float(problem.probability @ (gradients - mean).square().sum(1))


@pytest.mark.parametrize(("name", "ratio"), [("fixed", 0.938), ("near", 1.070), ("varying", 2.110)])
def test_on_a_small_vocabulary_it_may_raise_the_variance(name, ratio):
    problem = SEQUENCES[name].on_policy()
    assert variance(problem, "token_kl") / variance(problem, "none") == pytest.approx(ratio, abs=6e-4)


def test_without_a_ratio_it_is_no_baseline_on_stale_samples():
    problem = SEQUENCES["varying"]
    found, plain = (KLTerm(level="token", baseline=name)(whole_space(problem)) for name in ("token_kl", "none"))
    assert mean_gradient(problem, found.coefficient - plain.coefficient).norm() > 0.01
    assert KLTerm(level="token", baseline="token_kl").descends.off_policy == "unknown"


@pytest.mark.parametrize("other", [{"estimator": "exact"}, {"divergence": "forward", "estimator": "k3"}], ids=str)
def test_it_is_for_sampled_log_ratios(other):
    with pytest.raises(MeaningError, match="baseline='token_kl' with a sampled reverse KL"):
        KLTerm(level="token", baseline="token_kl", **other)


# A teacher near the student: m = β ref + (1 - β) π, held fixed.


def tables():
    generator = torch.Generator().manual_seed(0)
    z, ref = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64) * 2
    return z.requires_grad_(), ref.log_softmax(-1)


@BETAS
def test_the_kl_to_a_mixture_that_is_held_fixed_is_jensen_shannon(beta):
    z, log_q = tables()
    log_p = z.log_softmax(-1)
    proximal = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log().detach()
    kl = (log_p.exp() * (log_p - proximal)).sum(-1)
    js = divergences.jensen_shannon(beta).over(log_p, log_q)
    EXACT.check_vector(gradient(kl, z), gradient(js, z) / (1 - beta))


@BETAS
def test_the_kl_to_a_geometric_mean_that_is_held_fixed_is_a_smaller_step(beta):
    z, log_q = tables()
    log_p = z.log_softmax(-1)
    proximal = (beta * log_q + (1 - beta) * log_p).log_softmax(-1).detach()
    kl, plain = ((log_p.exp() * (log_p - other)).sum(-1) for other in (proximal, log_q))
    EXACT.check_vector(gradient(kl, z), beta * gradient(plain, z))


# Weights that fall along a completion with |l| of the tokens before (IW-OPD).


def falling(problem, gamma=1.0, *, of_the_whole=True):
    """(N, T) 1 + γ (1 - share of |l| before the token); of the whole completion's, or of a constant."""
    size = (problem.logp - problem.ref_logp).abs() * problem.space.mask
    before = size.cumsum(1) - size
    total = size.sum(1, keepdim=True) if of_the_whole else torch.full_like(size[:, :1], 5.0)
    return (1 + gamma * (1 - before / total)) * problem.space.mask


def weighted_target(problem, weights):
    """E[ Σ_t E[w_t | prefix] ∇KL_t ], of exact gradients at each prefix."""
    mass = torch.zeros(problem.space.prefixes, dtype=torch.float64)
    mass.index_add_(0, problem.space.prefix.flatten(), (problem.probability[:, None] * weights).flatten())
    return differentiated(problem, lambda p: mass @ p.prefix_kl())


@ON_SEQUENCES
def test_weights_of_the_prefix_alone_keep_the_gradient_of_each_prefix(problem):
    problem = problem.on_policy()
    weights, log_ratio = falling(problem, of_the_whole=False), (problem.logp - problem.ref_logp) * problem.space.mask
    EXACT.check_vector(mean_gradient(problem, weights * log_ratio), weighted_target(problem, weights))


@ON_SEQUENCES
def test_weights_by_the_share_of_the_whole_completion_look_at_the_token_itself(problem):
    """Sampled log-ratios are then biased; exact gradients have the weight's mean at the prefix, and are not."""
    problem = problem.on_policy()
    weights, log_ratio = falling(problem), (problem.logp - problem.ref_logp) * problem.space.mask
    target = weighted_target(problem, weights)
    off = (mean_gradient(problem, weights * log_ratio) - target).norm() / target.norm()
    assert 0.01 < off < 0.1
    loss = lambda p: problem.probability @ (weights * p.at_tokens(p.prefix_kl())).sum(-1)
    EXACT.check_vector(differentiated(problem, loss), target)


# Clipped entries of a KL.


def test_a_clip_of_the_entries_can_turn_the_gradient_round():
    """The entry that the student lacks most has no gradient of its own, and the others push its logit down."""
    z = torch.tensor([0.02, 0.49, 0.49]).double().log().requires_grad_()
    log_p, log_q = z.log_softmax(-1), torch.tensor([0.9, 0.05, 0.05]).double().log()
    terms = log_q.exp() * (log_q - log_p)
    exact, clipped = gradient(terms, z), gradient(terms.clamp(max=0.05), z)
    assert exact[0] < 0 < clipped[0]
    EXACT.check((exact * clipped).sum() / (exact.norm() * clipped.norm()), -1.0)
