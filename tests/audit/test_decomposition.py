"""Gradients that are a sum of two targets."""

import pytest
import torch

from klgrad import zoo
from klgrad.audit import audit
from klgrad.audit.procedure import _compare
from klgrad.audit.subject import as_subject

ROUNDING = 1e-9
"""Relative: sums and a fit of two scales in float64."""


def per_completion(coefficient, logp, mask):
    return torch.where(mask, coefficient.detach() * logp, 0).sum(-1).mean()


def two_and_minus_three(logp, ref_logp, mask):
    """Twice the squared log-ratio of each token, and three times minus the forward KL to the sampler."""
    return per_completion(2 * (logp - ref_logp) + 3, logp, mask)


def centred_within_groups(logp, ref_logp, mask, group):
    total = torch.where(mask, logp - ref_logp, 0).sum(-1).detach()
    grouped = total.view(-1, int((group == group[0]).sum()))
    return ((grouped - grouped.mean(1, keepdim=True)).flatten() * torch.where(mask, logp, 0).sum(-1)).mean()


def slope_of_a_fourth_power(logp, ref_logp, mask):
    return per_completion((logp - ref_logp) ** 3, logp, mask)


def parts(found):
    return [part.verdict for part in found.parts]


def test_k3_in_the_reward_is_the_reverse_minus_the_forward_kl():
    """Fact 6."""
    result = audit(zoo.get("k3-reward"))
    assert (result.verdict, result.holds) == ("sum-of-targets", "always")
    assert parts(result.decomposition) == ["reverse-kl-sequence", "climbs forward-kl-token"]
    assert [part.scale for part in result.decomposition.parts] == pytest.approx([1, 1], rel=ROUNDING)
    assert result.decomposition.remainder <= ROUNDING


def test_a_kl_frozen_at_the_sampler_is_a_difference_of_reverse_kls():
    """Fact 19: the KL in the reward of a loss with the sampler's log-probs, times the sequence ratio."""
    result = audit(zoo.get("stale-k1-reward"))
    assert result.verdict_off_policy == "sum-of-targets"
    assert parts(result.decomposition_off_policy) == ["reverse-kl-sequence", "climbs reverse-kl-sampler-sequence"]
    assert result.decomposition_off_policy.remainder <= ROUNDING


def test_the_scales_of_a_sum_are_found():
    result = audit(two_and_minus_three)
    assert (result.verdict, result.verdict_off_policy) == ("reverse-kl-token", "sum-of-targets")
    found = result.decomposition_off_policy
    assert parts(found) == ["squared-token", "climbs forward-kl-sampler-sequence"]
    assert [part.scale for part in found.parts] == pytest.approx([2, 3], rel=ROUNDING)


def test_a_baseline_drifts_on_stale_samples():
    """E_μ[(L - E_μ[L]) s] is the gradient of the squared log-ratio plus E_μ[L] times that of KL(μ‖π)."""
    result = audit(centred_within_groups)
    assert (result.verdict, result.verdict_off_policy) == ("reverse-kl-sequence", "sum-of-targets")
    found = result.decomposition_off_policy
    assert parts(found) == ["squared-sequence", "forward-kl-sampler-sequence"]
    assert found.parts[1].scale is None
    assert found.remainder <= ROUNDING


@pytest.mark.parametrize("on_policy", [True, False])
def test_not_everything_is_a_sum(on_policy):
    found = _compare(as_subject(slope_of_a_fourth_power), "zero", "all", on_policy=on_policy)
    assert found.verdict == "unknown"
    assert found.limit.decomposition is None or found.limit.decomposition.remainder > 0.01
    assert found.small.decomposition is None or found.small.decomposition.remainder > 0.01


def clamped(logp, ref_logp, behavior_logp, mask):
    """k3 times the token ratio, clamped: on stale samples a target except for rare tokens."""
    log_ratio = logp - ref_logp
    value = (torch.expm1(-log_ratio) + log_ratio).clamp(max=10) * (logp - behavior_logp).exp()
    return torch.where(mask, value, 0).sum(-1).mean()


def test_a_clamp_that_is_rarely_active_is_no_part_of_a_sum():
    result = audit(clamped)
    assert (result.verdict, result.verdict_off_policy) == ("unknown", "unknown")


def test_a_single_target_has_no_decomposition():
    result = audit(zoo.get("k2-loss"))
    assert result.decomposition is result.decomposition_off_policy is None
