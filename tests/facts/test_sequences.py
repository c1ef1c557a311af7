"""Facts 11 to 15: sequences, y ~ π."""

import math

import pytest
import torch
from oracle import (
    PROBLEMS,
    SEQUENCES,
    SMALL,
    differentiated,
    gradient_of_rows,
    kl_gradients,
    mean_gradient,
    mean_gradient_over_groups,
    whole_space,
)
from tolerances import EXACT

from klgrad import KLTerm, zoo as cells
from klgrad.audit import audit
from klgrad.audit.sentences import divergence
from klgrad.core.credit import future, to_go, whole
from klgrad.core.estimators import k3
from klgrad.enumeration import autoregressive, target_gradients

sequences = pytest.mark.parametrize("problem", [p.on_policy() for p in SEQUENCES.values()], ids=SEQUENCES)


@sequences
def test_fact_11_token_terms_miss_the_future(problem):
    log_ratio = problem.logp - problem.ref_logp
    targets = target_gradients(problem)
    found = mean_gradient(problem, log_ratio)
    EXACT.check_vector(found, targets["reverse-kl-token"])
    # Near ref the future is a second-order effect, but never none.
    assert (found - targets["reverse-kl-sequence"]).norm() > 0.001 * targets["reverse-kl-sequence"].norm()


SAMPLED = {
    "whole": whole,
    "to go": to_go,
    "k1 now, k3 later": lambda l, mask: l + future(k3.value(l), mask),
}


@pytest.mark.parametrize("name", SAMPLED)
@sequences
def test_fact_12_sampled_coefficients_are_unbiased_for_the_sequence(problem, name):
    coefficient = SAMPLED[name](problem.logp - problem.ref_logp, problem.space.mask)
    EXACT.check_vector(mean_gradient(problem, coefficient), target_gradients(problem)["reverse-kl-sequence"])


@sequences
def test_fact_12_exact_present_and_future(problem):
    kl = problem.at_tokens(problem.prefix_kl())
    score = mean_gradient(problem, future(kl, problem.space.mask))
    pathwise = problem.probability @ kl_gradients(problem).sum(1)
    EXACT.check_vector(score + pathwise, target_gradients(problem)["reverse-kl-sequence"])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("estimator", ["k1", "k1_k3", "exact"])
def test_fact_12_leave_one_out_by_step_over_every_group(estimator, size):
    term = KLTerm(estimator=estimator, baseline="leave_one_out")
    found = mean_gradient_over_groups(SMALL, size, lambda r: term(r).loss, on_policy=True)
    EXACT.check_vector(found, target_gradients(SMALL)["reverse-kl-sequence"])


def test_fact_12_leave_one_out_by_sequence_over_every_group():
    found = mean_gradient_over_groups(SMALL, 2, cells.get("k1-reward-leave-one-out"), on_policy=True)
    EXACT.check_vector(found, target_gradients(SMALL)["reverse-kl-sequence"])


@sequences
def test_fact_12_k2_of_the_whole_sequence_and_its_forward_twin(problem):
    total = (problem.logp - problem.ref_logp).sum(-1, keepdim=True).expand_as(problem.logp)
    EXACT.check_vector(mean_gradient(problem, total), target_gradients(problem)["squared-sequence"])
    EXACT.check_vector(mean_gradient(problem, total), target_gradients(problem)["reverse-kl-sequence"])
    EXACT.check_vector(mean_gradient(problem, k3.slope(total)), target_gradients(problem)["forward-kl-sequence"])


def test_fact_12_variance_falls_from_whole_to_exact():
    problem = PROBLEMS["varying"].on_policy()
    l, mask, kl = problem.logp - problem.ref_logp, problem.space.mask, problem.at_tokens(problem.prefix_kl())

    def variance(per_completion):
        mean = problem.probability @ per_completion
        return float(problem.probability @ (per_completion - mean).square().sum(-1))

    score = lambda c: (c[..., None] * problem.scores).sum(1)
    falling = [variance(score(whole(l, mask))), variance(score(to_go(l, mask)))]
    falling.append(variance(score(future(kl, mask)) + kl_gradients(problem).sum(1)))
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.5 * falling[0]


@sequences
def test_fact_13_a_discount_joins_token_to_sequence(problem):
    rollout, targets = whole_space(problem), target_gradients(problem)
    at = lambda g: mean_gradient(problem, KLTerm(discount=g)(rollout).coefficient)
    EXACT.check_vector(at(0.0), targets["reverse-kl-token"])
    EXACT.check_vector(at(1.0), targets["reverse-kl-sequence"])
    gap = lambda g: float((at(g) - targets["reverse-kl-sequence"]).norm())
    assert gap(0.0) > gap(0.5) > gap(0.9) > gap(1.0)


def test_fact_13_a_mean_subtracted_before_discounting_pays_for_length():
    """At ref itself there is nothing to regularise, yet the centred reward moves the policy."""
    problem = PROBLEMS["varying"].on_policy()
    constant = torch.where(problem.space.mask, 0.3, 0.0).double()  # every token's l minus the batch's mean
    found = mean_gradient(problem, to_go(constant, problem.space.mask, 0.9))
    towards_length = differentiated(problem, lambda p: (p.logp.sum(-1).exp() * problem.space.mask.sum(-1)).sum())
    assert torch.cosine_similarity(found, towards_length, dim=0) > 0.9


@pytest.mark.parametrize("name", ["k2-loss-length-mean", "k2-loss-token-mean"])
def test_fact_14_dividing_by_length_changes_the_objective_only_when_lengths_vary(name):
    for problem, matches in ((autoregressive(2, 2, ends=False, seed=1, away_from_ref=1.0), True), (SMALL, False)):
        found = mean_gradient_over_groups(problem, 2, cells.get(name), on_policy=True)
        target = target_gradients(problem)["reverse-kl-token"]
        bias = (found - (found @ target / target.square().sum()) * target).norm() / found.norm()
        assert (bias < EXACT.rtol) == matches


QUARTERS = autoregressive(2, 3, ends=True, seed=0, away_from_ref=1.0)
QUARTERS = QUARTERS.with_logits(torch.tensor([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]]).double().log()).on_policy()
"""Probabilities that are multiples of 1/4, so that 64 rows can hold every completion as often as it is likely."""

POPULATION = torch.repeat_interleave(torch.arange(4), (64 * QUARTERS.probability).round().long())


def summed_over_mean_length(problem):
    return target_gradients(problem)["reverse-kl-token"] / (problem.probability @ problem.space.mask.sum(-1).double())


def test_fact_14_in_the_limit_the_token_mean_is_the_summed_gradient_over_the_mean_length():
    counted = torch.bincount(POPULATION, minlength=4).double() / 64
    EXACT.check(counted, QUARTERS.probability)  # the batch is the population, so that one call is the limit
    found = gradient_of_rows(QUARTERS, POPULATION, cells.get("k2-loss-token-mean"), on_policy=True)
    EXACT.check_vector(found, summed_over_mean_length(QUARTERS))


def test_fact_14_in_small_batches_it_is_biased_and_the_bias_falls_as_1_over_b():
    limit = summed_over_mean_length(QUARTERS)

    def bias(size):
        members = torch.combinations(torch.arange(len(QUARTERS.space)), size, with_replacement=True)
        alike = (members[:, :, None] == members[:, None, :]).tril().sum(-1).prod(-1)  # Π of the factorials of counts
        probability = QUARTERS.probability[members].prod(-1) * math.factorial(size) / alike
        gradients = [
            gradient_of_rows(QUARTERS, rows, cells.get("k2-loss-token-mean"), on_policy=True) for rows in members
        ]
        return float((probability @ torch.stack(gradients) - limit).norm() / limit.norm())

    off = {size: bias(size) for size in (1, 2, 4, 8)}
    assert off[1] > 0.1
    assert off[8] > 0.001
    # bias = a/B + b/B² + ...: doubling the batch halves it, ever more exactly
    halved = [off[2 * size] / off[size] for size in (2, 4)]
    assert 0.4 < halved[0] < 0.6
    assert abs(halved[1] - 0.5) < abs(halved[0] - 0.5)


def test_fact_14_the_mean_per_completion_stays_biased_in_any_batch():
    """Each completion has a weight of its own, whatever the others are: a batch of one shows all of the bias."""
    loss = cells.get("k2-loss-length-mean")
    limit = gradient_of_rows(QUARTERS, POPULATION, loss, on_policy=True)
    alone = torch.stack([gradient_of_rows(QUARTERS, torch.tensor([n]), loss, on_policy=True) for n in range(4)])
    EXACT.check_vector(QUARTERS.probability @ alone, limit)
    target = summed_over_mean_length(QUARTERS)
    nearest = (limit @ target / target.square().sum()) * target  # whatever scale it is given
    assert (limit - nearest).norm() > 0.05 * limit.norm()


def test_fact_15_the_sequence_target_shortens_completions_to_save_kl():
    """Equal KL at every prefix: descending the sequence KL raises the end token, the token KL does not."""
    problem = autoregressive(2, 3, ends=True, seed=0, away_from_ref=0.0)
    logits = torch.zeros_like(problem.logits)
    ref = torch.tensor([0.0, 1.0]).double().expand_as(logits)  # ref prefers to continue, equally at every prefix
    problem = type(problem)(problem.space, logits, ref, logits)
    targets = target_gradients(problem)
    end = lambda g: float(g.view_as(logits)[0, 0])
    assert end(targets["reverse-kl-sequence"]) < end(targets["reverse-kl-token"])


def test_k1_as_a_loss_over_all_tokens_of_a_batch_asks_for_longer_completions():
    """Its update descends the mean of 1/tokens of the batch, which is not constant where lengths vary."""
    found = mean_gradient_over_groups(
        SMALL, 2, lambda r: ((r.logp - r.ref_logp) * r.mask).sum() / r.mask.sum(), on_policy=True
    )
    tokens = SMALL.space.mask.sum(-1).double()
    chance = lambda p: p.logp.sum(-1).exp()
    mean = lambda p: (chance(p)[:, None] * chance(p) / (tokens[:, None] + tokens)).sum()
    EXACT.check_vector(found, differentiated(SMALL, mean))
    assert found.norm() > 0.01
    words = audit(lambda logp, ref_logp, mask: ((logp - ref_logp) * mask).sum() / mask.sum(), name="mean").anatomy
    assert "it lowers E[1/tokens of the batch], which asks for longer completions" in divergence(words)
