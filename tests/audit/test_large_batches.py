"""The limit of large batches: one call of the loss on a batch that holds every group as often as it is likely."""

import math

import pytest
import torch

from klgrad import ImportanceWeighting, KLTerm, Truncate, zoo
from klgrad.audit import audit, audit_in_large_batches
from klgrad.audit.advice import WRONG_SIGN, in_words
from klgrad.audit.batch import advantage_of
from klgrad.audit.gradients import limit_cases, limit_gradient
from klgrad.audit.problems import RATIO_REACH, REACH
from klgrad.audit.subject import as_subject
from klgrad.errors import VerdictError
from klgrad.testing import assert_descends

ROUNDING = 1e-9
"""Relative: sums in float64 of up to 30,000 rows."""


def squared(logp, ref_logp, mask):
    return torch.where(mask, (logp - ref_logp) ** 2 / 2, 0)


def mean_over_tokens(logp, ref_logp, mask):
    return squared(logp, ref_logp, mask).sum() / mask.sum()


def mean_per_completion(logp, ref_logp, mask):
    return (squared(logp, ref_logp, mask).sum(-1) / mask.sum(-1)).mean()


def whitened_over_the_batch(logp, ref_logp, mask):
    total = torch.where(mask, logp - ref_logp, 0).sum(-1).detach()
    return ((total - total.mean()) * torch.where(mask, logp, 0).sum(-1)).mean()


def divided_by_the_spread_of_the_batch(logp, ref_logp, mask):
    total = torch.where(mask, logp - ref_logp, 0).sum(-1).detach()
    centred = (total - total.mean()) / (total.std() + 1e-4)
    return (centred * torch.where(mask, logp, 0).sum(-1)).mean()


def clamped(logp, ref_logp, mask):
    log_ratio = logp - ref_logp
    return torch.where(mask, (torch.expm1(-log_ratio) + log_ratio).clamp(max=10), 0).sum() / mask.sum()


def dead_beyond_the_limit(logp, ref_logp, mask):
    return torch.where(logp - ref_logp > -8, squared(logp, ref_logp, mask), 0).sum() / mask.sum()


def first_three_tokens(logp, ref_logp, mask):
    return squared(logp, ref_logp, mask)[:, :3].sum() / mask.sum()


def grows_with_the_kl(logp, ref_logp, mask):
    total = squared(logp, ref_logp, mask).sum(-1).mean()
    return total.detach() * total


def test_a_rule_for_later_tokens_is_found_in_a_mean_over_tokens():
    assert audit(first_three_tokens).verdict == "unknown"


def test_a_strength_that_grows_with_the_kl_is_no_division_by_a_spread():
    result = audit(grows_with_the_kl)
    assert (result.verdict, result.scale_varies) == ("unknown", False)


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_gradient_of_a_mean_over_tokens_is_the_summed_one_over_the_mean_length(on_policy):
    """Fact 14, from the definition."""
    subject = as_subject(mean_over_tokens)
    for case in limit_cases(on_policy):
        p = case.problem
        found = limit_gradient(subject, case, advantage_of(p, "zero")).mean[: p.logits.numel()]
        summed = torch.einsum("n,nt,ntp->p", p.probability, p.logp - p.ref_logp, p.scores)
        length = p.probability @ p.space.mask.sum(-1).double()
        torch.testing.assert_close(found, summed / length, rtol=ROUNDING, atol=ROUNDING * float(summed.norm()))


def test_a_mean_over_tokens_is_biased_in_small_batches_only():
    result = audit(mean_over_tokens)
    assert (result.verdict, result.holds) == ("reverse-kl-token", "large-batches")
    assert (result.verdict_off_policy, result.holds_off_policy) == ("squared-token", "large-batches")
    assert result.verdict_small_batches == result.verdict_off_policy_small_batches == "unknown"
    assert result.bias_by_batch["2"] > result.bias_by_batch["3"] > 0.01
    assert result.bias_by_batch["limit"] <= ROUNDING
    assert str(result.advice).startswith(
        "Descends the token-level reverse KL (prefixes held fixed) in large batches; small ones are biased (9% off"
    )


def test_a_mean_per_completion_is_biased_in_every_batch():
    result = audit(mean_per_completion)
    assert (result.verdict, result.holds) == ("unknown", None)
    two, three, limit = (result.bias_by_batch[size] for size in ("2", "3", "limit"))
    assert limit > 0.1
    assert two == pytest.approx(limit, rel=ROUNDING)
    assert three == pytest.approx(limit, rel=ROUNDING)


def test_a_mean_of_the_batch_as_baseline_is_unbiased_in_large_batches():
    """In a batch of n it shrinks the gradient by 1 - 1/n (fact 10), which is a scale, so it holds always."""
    result = audit(whitened_over_the_batch)
    assert (result.verdict, result.holds) == ("reverse-kl-sequence", "always")


def test_the_spread_of_a_large_batch_changes_the_scale_and_not_the_direction():
    result = audit(divided_by_the_spread_of_the_batch)
    assert (result.verdict, result.holds, result.scale_varies) == ("reverse-kl-sequence", "large-batches", True)
    assert "at a scale that depends on the spread of the batch" in str(result.advice)
    assert "shape of the batch" not in str(result.advice)
    assert result.bias_by_batch == audit_in_large_batches(divided_by_the_spread_of_the_batch).bias_by_batch == {}


def test_the_spread_of_small_groups_changes_the_direction():
    result = audit(zoo.get("k1-reward-group-std"))
    assert (result.verdict, result.scale_varies) == ("unknown", False)


def test_a_clamped_loss_is_described_by_what_it_is_near_ref():
    result = audit(clamped)
    assert (result.verdict, result.verdict_near) == ("unknown", "forward-kl-token")
    assert in_words(result) == (
        "forward KL, token by token, near ref only "
        "(28% off far from it; no gradient where log π/ref is below -2.61 or above 11)"
    )


def test_a_clamped_mean_over_tokens_is_told_its_clamp_and_not_its_lengths():
    def loss(logp, ref_logp, mask):
        return torch.where(mask, (logp - ref_logp).clamp(-9, 9) ** 2 / 2, 0).sum() / mask.sum()

    result = audit(loss)
    assert result.length_sensitive
    assert (result.verdict, result.verdict_standard) == ("unknown", "reverse-kl-token")
    assert in_words(result) == "reverse KL, token by token, but not with log-ratios of +12 and log-ratios of -12"
    assert "not by the length of each completion" not in str(result.advice)


def test_a_clamped_mean_per_completion_is_told_its_lengths_too():
    def loss(logp, ref_logp, mask):
        away = ref_logp - logp
        per_token = torch.where(mask, (away.exp() - away - 1).clamp(-10, 10), 0)
        return (per_token.sum(-1) / mask.sum(-1)).mean()

    result = audit(loss)
    assert (result.verdict_near, result.verdict_near_fixed_lengths) == ("unknown", "forward-kl-token")
    assert in_words(result).startswith("forward KL, token by token, near ref and at equal lengths only (14% off near")
    assert "not by the length of each completion" in str(result.advice)


def test_a_clamped_k1_is_nothing_on_most_problems():
    def loss(logp, ref_logp, mask):
        return torch.where(mask, (logp - ref_logp).clamp(-10, 10), 0).sum() / mask.sum()

    result = audit(loss)
    assert (result.verdict, result.verdict_standard) == ("unknown", "nothing")
    assert in_words(result) == "nothing, but not with log-ratios of +12"


def test_a_clamped_token_mean_with_the_wrong_sign_is_told_its_sign():
    result = audit(
        lambda logp, ref_logp, mask: -torch.where(mask, (logp - ref_logp).clamp(-9, 9) ** 2, 0).sum() / mask.sum()
    )
    assert (result.verdict, result.verdict_standard) == ("unknown", "climbs reverse-kl-token")
    assert result.advice.remedies == (WRONG_SIGN,)


def test_a_mean_of_k1_per_completion_is_no_kl():
    result = audit(lambda logp, ref_logp, mask: (torch.where(mask, logp - ref_logp, 0).sum(-1) / mask.sum(-1)).mean())
    assert (result.verdict, result.depends_on_reference) == ("unknown", False)
    assert in_words(result) == "no KL: its gradient is the same for every ref"


def test_what_only_follows_the_sampler_is_said():
    result = audit(lambda logp, mask: -torch.where(mask, logp, 0).sum(-1).mean(), name="imitation")
    assert (result.verdict, result.verdict_off_policy) == ("nothing", "forward-kl-sampler-sequence")
    assert "on stale samples it descends the forward KL between the completions of the sampler" in str(result.advice)


def test_a_dead_zone_beyond_the_log_ratios_of_the_limit_is_found():
    assert audit(dead_beyond_the_limit).verdict == "unknown"


def test_the_problems_of_the_limit_pass_every_clamp_in_common_use():
    low = min(float((c.problem.logp - c.problem.ref_logp).min()) for c in limit_cases(on_policy=True))
    high = max(float((c.problem.logp - c.problem.ref_logp).max()) for c in limit_cases(on_policy=True))
    assert low < REACH[0]
    assert high > REACH[1]
    ratios = [c.problem.logp - c.problem.behavior_logp for c in limit_cases(on_policy=False)]
    assert min(float(x.min()) for x in ratios) < math.log(RATIO_REACH[0])
    assert max(float(x.max()) for x in ratios) > math.log(RATIO_REACH[1])


def clipped_at_the_limit(logp, ref_logp, behavior_logp, mask):
    """No gradient where the ratio is that of some token of the limit's problems, all of which are out of bounds."""
    ratio = (logp - behavior_logp).exp()
    ours = torch.cat([(c.problem.logp - c.problem.behavior_logp).exp().flatten() for c in limit_cases(on_policy=False)])
    known = torch.isclose(ratio.double()[..., None], ours, rtol=ROUNDING).any(-1)
    return torch.where(mask & ~known, ratio.detach() * squared(logp, ref_logp, mask), 0).sum(-1).mean()


def test_a_loss_whose_gradient_is_clipped_on_all_problems_of_the_limit_is_not_nothing():
    result = audit(clipped_at_the_limit)
    assert result.verdict_off_policy_small_batches != "nothing"
    assert result.verdict_off_policy == "unknown"


def test_on_policy_the_sampler_is_the_policy():
    for case in limit_cases(on_policy=True):
        assert torch.equal(case.problem.logits, case.problem.behavior_logits)


def score_sum(logp, mask):
    return torch.where(mask, logp, 0).sum() / mask.sum()


@pytest.mark.parametrize("loss", [mean_over_tokens, mean_per_completion, squared, score_sum])
def test_the_short_audit_agrees_with_the_whole_one(loss):
    """On-policy a sum of scores is nothing, and off-policy it climbs: neither has a distance to a target."""
    whole, fresh, stale = audit(loss), audit_in_large_batches(loss), audit_in_large_batches(loss, on_policy=False)
    assert (fresh.verdict, fresh.holds) == (whole.verdict, whole.holds)
    assert (stale.verdict, stale.holds) == (whole.verdict_off_policy, whole.holds_off_policy)
    assert fresh.nearest == whole.nearest
    assert fresh.bias_by_batch == pytest.approx(whole.bias_by_batch, rel=ROUNDING, abs=ROUNDING)
    assert (stale.bias_by_batch == {}) == (loss is score_sum)


def k2(logp, ref_logp, mask):
    return ((logp - ref_logp) ** 2 / 2 * mask).sum(-1)


def unsure_tokens_only(logp, ref_logp, mask):
    """Leaves out what π is sure of."""
    return k2(logp, ref_logp, mask * (logp.detach() < math.log(0.6))).mean()


def by_entropy(logits, logp, ref_logp, mask):
    table = logits.detach().log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    return k2(logp, ref_logp, mask * entropy).mean()


def by_the_largest_probability(logits, logp, ref_logp, mask):
    return k2(logp, ref_logp, mask * (1 - logits.detach().softmax(-1).amax(-1))).mean()


def reward_with_a_floor(logp, ref_logp, mask):
    total = ((logp - ref_logp).detach() * mask).sum(-1).clamp(min=-3.3)
    return (total * (logp * mask).sum(-1)).mean()


def scores_of_unsure_tokens(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask * (logp.detach() < math.log(0.6))).sum(-1).mean()


def even_batches_only(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).mean() * (len(logp) % 2 == 0)


def unsure_tokens_per_token_of_the_batch(logp, ref_logp, mask):
    return unsure_tokens_only(logp, ref_logp, mask) * len(logp) / mask.sum()


def climbs_on_unsure_tokens(logp, ref_logp, mask):
    return -unsure_tokens_only(logp, ref_logp, mask)


def unsure_tokens_over_the_spread_of_the_batch(logp, ref_logp, mask):
    """The right direction in the limit only if no token is sure."""
    total = ((logp - ref_logp) * mask * (logp < math.log(0.6))).sum(-1).detach()
    return ((total - total.mean()) / (total.std() + 1e-4) * (logp * mask).sum(-1)).mean()


NARROW = [
    unsure_tokens_only,
    by_entropy,
    by_the_largest_probability,
    reward_with_a_floor,
    scores_of_unsure_tokens,
    even_batches_only,
    unsure_tokens_per_token_of_the_batch,
    climbs_on_unsure_tokens,
    unsure_tokens_over_the_spread_of_the_batch,
]


@pytest.mark.parametrize("loss", NARROW)
def test_what_batches_of_every_size_lack_is_not_found_in_large_ones(loss):
    """Each matches a target on the limit's own problems, and on other problems in no batch of any size."""
    result = audit(loss)
    assert (result.verdict, result.holds) == ("unknown", None)
    assert "in large batches" not in in_words(result)
    assert ("near ref only" in in_words(result)) == (loss is reward_with_a_floor)  # near ref no sum is below the floor
    assert "e-1" not in str(result.advice)  # no distance that is a rounding error


def truncated_ratio(logp, ref_logp, old_logp, mask):
    ratio = (logp.detach() - old_logp).exp().clamp(max=25)
    return (ratio * (logp - ref_logp).detach() * logp * mask).sum(-1).mean()


def bounded_exact_kl(token_reverse_kl, mask):
    return (token_reverse_kl.clamp(max=5) * mask).sum(-1).mean()


def prefix_ratio(bound):
    return KLTerm(weighting=ImportanceWeighting("prefix", bound=Truncate(bound)))


@pytest.mark.parametrize("loss", [truncated_ratio, bounded_exact_kl, *(prefix_ratio(b) for b in (23, 1000))])
def test_a_bound_beyond_the_ratios_of_the_limit_is_found_on_stale_samples(loss):
    result = audit(loss)
    assert (result.verdict_off_policy, result.holds_off_policy) == ("unknown", None)


def test_expect_does_not_pass_what_no_batch_has(tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(
        "def sure(logp, ref_logp, mask):\n"
        "    return ((logp - ref_logp) ** 2 / 2 * mask * (logp.detach().exp() < 0.6)).sum(-1).mean()\n"
    )
    with pytest.raises(VerdictError):
        assert_descends(f"{file}:sure", "reverse-kl-token")


def baseline_of_the_other_half(logp, ref_logp, mask):
    """Exactly the reverse KL of completions in every batch."""
    total = ((logp - ref_logp).detach() * mask).sum(-1)
    half = len(total) // 2
    baseline = torch.cat([total[half:].mean().expand(half), total[:half].mean().expand(len(total) - half)])
    return ((total - baseline) * (logp * mask).sum(-1)).mean()


def two_micro_batches(logp, ref_logp, mask):
    half = len(logp) // 2
    parts = (slice(0, half), slice(half, None))
    return sum(mean_over_tokens(logp[rows], ref_logp[rows], mask[rows]) for rows in parts) / 2


def test_where_the_order_of_rows_matters_small_batches_decide():
    result = audit(baseline_of_the_other_half)
    assert (result.verdict, result.holds, result.order_matters) == ("reverse-kl-sequence", "small-batches", True)
    assert in_words(result) == "reverse KL, whole completions, in batches of 2, 3 or 4 completions"
    assert "the order of the rows changes its gradient" in str(result.advice)
    halves = audit(two_micro_batches)
    assert (halves.verdict, halves.order_matters, halves.bias_by_batch) == ("unknown", True, {})
    assert "said of batches of 2, 3 or 4 completions only" in str(halves.advice)
    assert "not by the length of each completion" not in str(halves.advice)
    assert not audit(mean_over_tokens).order_matters
