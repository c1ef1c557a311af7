"""Facts 1 to 10: one token, y ~ π, every outcome summed."""

import pytest
import torch
from oracle import PROBLEMS, mean_gradient, whole_space
from tolerances import EXACT

from klgrad import zoo as cells
from klgrad.core.credit import leave_one_out
from klgrad.core.estimators import k1, k2, k3, k_lambda
from klgrad.enumeration import bandit, target_gradients

BANDIT = PROBLEMS["bandit"].on_policy()
LOG_RATIO = BANDIT.logp - BANDIT.ref_logp
REVERSE, FORWARD = (target_gradients(BANDIT)[name] for name in ("reverse-kl-sequence", "forward-kl-sequence"))


def expect(coefficient, target):
    EXACT.check_vector(mean_gradient(BANDIT, coefficient), target)


def test_fact_1_k1_as_loss_is_nothing_whatever_ref_is():
    expect(k1.slope(LOG_RATIO), 0 * REVERSE)
    elsewhere = bandit(5, seed=99, away_from_ref=3.0)
    assert torch.equal(k1.slope(elsewhere.logp - elsewhere.ref_logp), k1.slope(LOG_RATIO))


def test_fact_2_k1_in_reward_is_the_reverse_kl():
    expect(k1.value(LOG_RATIO), REVERSE)


def test_fact_3_k2_as_loss_is_the_reverse_kl_with_the_same_coefficient():
    expect(k2.slope(LOG_RATIO), REVERSE)
    assert torch.equal(k2.slope(LOG_RATIO), k1.value(LOG_RATIO))


def test_fact_4_k3_as_loss_is_the_forward_kl():
    expect(k3.slope(LOG_RATIO), FORWARD)


def test_fact_4_the_variance_of_k3s_slope_is_the_chi_square():
    p, q = BANDIT.probability, BANDIT.ref_logp.sum(-1).exp()
    slope = k3.slope(LOG_RATIO).sum(-1)
    variance = (p * slope.square()).sum() - (p * slope).sum().square()
    EXACT.check(variance, ((q - p).square() / p).sum())


@pytest.mark.parametrize("lam", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_fact_5_k_lambda_as_loss_is_lambda_times_forward_kl(lam):
    expect(k_lambda(lam).slope(LOG_RATIO), lam * FORWARD)


def test_fact_6_k3_in_reward_is_reverse_minus_forward():
    expect(k3.value(LOG_RATIO), REVERSE - FORWARD)


def test_fact_6_near_ref_it_cancels_and_far_from_it_can_point_uphill():
    near = bandit(5, seed=3, away_from_ref=0.01).on_policy()
    gradient = mean_gradient(near, k3.value(near.logp - near.ref_logp))
    assert gradient.norm() < 0.02 * target_gradients(near)["reverse-kl-sequence"].norm()
    uphill = [bandit(3, seed=s, away_from_ref=3.0).on_policy() for s in range(40)]
    cosines = [
        torch.cosine_similarity(
            mean_gradient(p, k3.value(p.logp - p.ref_logp)), target_gradients(p)["reverse-kl-sequence"], dim=0
        )
        for p in uphill
    ]
    assert min(cosines) < -0.1


def test_fact_7_k2_in_reward_is_wrong_and_so_is_the_differentiated_product():
    for coefficient in (k2.value(LOG_RATIO), LOG_RATIO + k2.value(LOG_RATIO)):
        off = mean_gradient(BANDIT, coefficient) - REVERSE
        assert off.norm() > 0.1 * REVERSE.norm()


def coefficient_of(cell_name):
    logp = BANDIT.logp.clone().requires_grad_()
    rollout = whole_space(BANDIT.with_logits(BANDIT.logits))
    rollout = type(rollout)(logp, rollout.ref_logp, rollout.mask, behavior_logp=BANDIT.logp)
    (c,) = torch.autograd.grad(cells.get(cell_name)(rollout), logp)
    return c * len(logp)


@pytest.mark.parametrize("name", ["k3-both-token", "k3-both", "ratio-k3-loss", "stopped-ratio-k2-loss", "k2-loss"])
def test_fact_8_five_ways_to_write_one_coefficient(name):
    EXACT.check(coefficient_of(name), LOG_RATIO)


def test_fact_9_ratio_times_k1_is_right_in_the_mean_with_more_variance():
    coefficient = coefficient_of("ratio-k1-loss")
    EXACT.check(coefficient, LOG_RATIO + 1)
    expect(coefficient, REVERSE)
    square = lambda c: BANDIT.probability @ (c[..., None] * BANDIT.scores).sum(1).square().sum(-1)
    assert square(LOG_RATIO + 1) > square(LOG_RATIO)


@pytest.mark.parametrize("constant", [-2.0, 7.0])
def test_fact_10_a_constant_may_be_subtracted(constant):
    expect(LOG_RATIO - constant, REVERSE)


@pytest.mark.parametrize("n", [2, 3])
def test_fact_10_leave_one_out_is_unbiased_and_the_batch_mean_shrinks(n):
    p, l, s = BANDIT.probability, LOG_RATIO.sum(-1), BANDIT.scores.sum(1)
    arms = torch.cartesian_prod(*[torch.arange(len(p))] * n)
    weight = p[arms].prod(-1)
    out = torch.stack([leave_one_out(l[row], torch.zeros(n, dtype=torch.long)) for row in arms])
    loo = torch.einsum("m,mi,mip->p", weight, l[arms] - out, s[arms]) / n
    EXACT.check_vector(loo, REVERSE)
    centred = l[arms] - l[arms].mean(-1, keepdim=True)
    EXACT.check_vector(torch.einsum("m,mi,mip->p", weight, centred, s[arms]) / n, (1 - 1 / n) * REVERSE)


def test_values_are_what_the_table_says():
    p = BANDIT.probability[:, None]
    kl = (p * LOG_RATIO).sum()
    for lam in (0.0, 0.3, 1.0):
        EXACT.check((p * k_lambda(lam).value(LOG_RATIO)).sum(), kl)
    EXACT.check((p * k3.value(LOG_RATIO)).sum(), kl)
    EXACT.check(BANDIT.prefix_kl()[0], kl)
    assert (p * k2.value(LOG_RATIO)).sum() != pytest.approx(float(kl), rel=0.01)
    assert bool((k3.value(LOG_RATIO) >= 0).all())
