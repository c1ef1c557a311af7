"""The audit of whole losses: the catalogue's declared verdicts, and losses of other kinds."""

import json
import math
from functools import cache, partial
from io import StringIO

import pytest
import torch
from rich.console import Console

from klgrad.audit import audit
from klgrad.audit.advice import in_words
from klgrad.audit.match import MATCH
from klgrad.audit.render.terminal import (
    whole_in_full as in_full,
    whole_to_json as to_json,
    whole_to_markdown as to_markdown,
)
from klgrad.audit.whole import audit_whole, drifts_in_words, row_of, update_in_words, weighting_in_words
from klgrad.policy_losses import POLICY_LOSSES


@cache
def published(name):
    return audit_whole(POLICY_LOSSES[name])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_published_loss_does_what_its_entry_declares(name):
    r, entry = published(name), POLICY_LOSSES[name]
    for side, declared in ((r.on_policy, entry.on_policy), (r.off_policy, entry.off_policy)):
        assert side.kl == "nothing"
        assert (side.positive.verdict, side.negative.verdict, side.update.verdict) == declared
    assert r.summary
    assert r.source


def token_sum(x, mask):
    return torch.where(mask, x, 0).sum(-1).mean()


def reinforce_with_k2(logp, ref_logp, mask, advantages):
    return token_sum(-advantages * logp + 0.1 * (logp - ref_logp) ** 2 / 2, mask)


def test_the_kl_is_found_beside_the_policy_loss():
    r = audit_whole(reinforce_with_k2)
    assert (r.on_policy.kl, r.off_policy.kl) == ("reverse-kl-token", "squared-token")
    assert r.off_policy.positive.verdict == "forward-kl-sampler-sequence"
    assert r.off_policy.update.verdict == "policy-gradient-uncorrected"


def test_the_sign_is_part_of_the_verdict():
    r = audit_whole(lambda logp, mask, advantages: token_sum(advantages * logp, mask))
    assert r.on_policy.update.verdict == "climbs policy-gradient"
    assert r.off_policy.positive.verdict == "climbs forward-kl-sampler-sequence"
    assert r.off_policy.negative.verdict == "forward-kl-sampler-sequence"


def test_a_loss_that_uses_the_size_of_the_advantage_alone_is_unknown():
    r = audit_whole(lambda logp, mask, advantages: token_sum(-advantages.abs() * logp, mask))
    assert r.on_policy.update.verdict == "unknown"
    assert r.on_policy.update.weighting is None


def test_a_loss_that_ignores_the_mask_matches_nothing():
    r = audit_whole(lambda logp, advantages: (-advantages * logp).sum(-1).mean())
    assert r.on_policy.positive.verdict == "unknown"
    assert r.on_policy.update.verdict == "unknown"


def test_a_loss_without_advantages_has_no_policy_gradient():
    r = audit_whole(lambda logp, mask: token_sum(logp, mask))
    assert (r.on_policy.kl, r.off_policy.kl) == ("nothing", "climbs forward-kl-sampler-sequence")
    assert r.on_policy.update.verdict == r.off_policy.positive.verdict == "nothing"


@pytest.mark.parametrize(
    ("name", "baseline", "by_length", "divided"),
    [
        ("reinforce", "none", (1, 1, 1, 1, 1), False),
        ("rloo", "group", (1, 1, 1, 1, 1), False),
        ("dapo", "group", (1, 1, 1, 1, 1), True),
        ("grpo", "group", (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5), True),
    ],
)
def test_the_weights_of_the_advantages_are_told(name, baseline, by_length, divided):
    for side in (published(name).on_policy, published(name).off_policy):
        weighting = side.update.weighting
        assert weighting is not None
        assert weighting.baseline == baseline
        assert tuple(weighting.by_length.values()) == pytest.approx(by_length, rel=1e-3)  # GRPO adds 1e-4
        assert weighting.divided_by_deviation == divided


def whitened(logp, mask, rewards):
    return token_sum(-((rewards - rewards.mean()) / (rewards.std() + 1e-8))[:, None] * logp, mask)


def test_rewards_that_are_bent_are_not_the_advantages():
    def bent(logp, mask, rewards):
        return whitened(logp, mask, rewards + 0.01 * rewards**2)

    side = audit_whole(bent).on_policy
    assert side.update.weighting is None
    assert side.update.verdict == "unknown"


def test_a_batch_mean_is_told():
    side = audit_whole(whitened).off_policy
    assert side.update.weighting is not None
    assert side.update.weighting.baseline == "batch"
    assert (side.positive.verdict, side.update.verdict) == ("nothing", "policy-gradient-uncorrected")


def test_the_size_and_the_direction_of_the_drift():
    bare, clipped = (published(name).off_policy for name in ("reinforce", "ppo-clip"))
    assert (bare.positive.size, bare.positive.towards_sampler) == pytest.approx((1.0, 1.0))
    assert (bare.negative.size, bare.negative.towards_sampler) == pytest.approx((1.0, -1.0))
    assert 0 < clipped.positive.size < 1
    assert clipped.positive.towards_sampler > 0.5 < clipped.negative.towards_sampler  # the clip pulls back both times


def test_json_has_four_verdicts_for_each_kind_of_samples():
    r = published("token-is")
    (found,) = json.loads(to_json([r]))["results"]
    assert found["name"] == "token-is"
    for side in ("on_policy", "off_policy"):
        assert {"kl", "drift_positive", "drift_negative", "policy_gradient"} <= set(found["whole"][side])
    assert found["whole"]["off_policy"]["policy_gradient"] == "policy-gradient-sampler-prefixes"
    assert found["whole"]["off_policy"]["details"]["policy_gradient"]["weighting"]["baseline"] == "none"


def test_words():
    r = published("reinforce")
    assert drifts_in_words(r.off_policy) == "pulls π to the sampler; the opposite if A < 0"
    assert update_in_words(r.off_policy) == "the policy gradient, uncorrected"
    assert weighting_in_words(r.off_policy.update.weighting) == ""
    grpo = published("grpo")
    weights = weighting_in_words(grpo.on_policy.update.weighting)
    assert "weighted 1, 1/2, 1/3, 1/4, 1/5 for 1, 2, 3, 4 and 5 tokens" in weights
    assert to_markdown([r, grpo]).count("\n") == 4


def unsure_tokens_only(logp, mask, advantages):
    return token_sum(-advantages * logp * (logp.detach() < math.log(0.6)), mask)


@pytest.mark.parametrize("bound", [25, 1000])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_bound_beyond_the_ratios_of_the_limit_is_found(level, bound):
    def masked_ratio(logp, old_logp, mask, advantages):
        log_ratio = (logp.detach() - old_logp) * mask
        ratio = (log_ratio if level == "token" else log_ratio.sum(-1, keepdim=True)).exp()
        return token_sum(-ratio * (ratio < bound) * advantages * logp, mask)

    stale = audit_whole(masked_ratio).off_policy
    assert (stale.positive.verdict, stale.negative.verdict, stale.update.verdict) == ("unknown",) * 3
    assert stale.positive.size > MATCH


def test_tokens_that_are_left_out_where_the_policy_is_sure_are_missed():
    fresh = audit_whole(unsure_tokens_only).on_policy
    assert (fresh.positive.verdict, fresh.update.verdict) == ("unknown", "unknown")


def squared_kl(logp, ref_logp, mask, advantages):
    return token_sum((logp - ref_logp) ** 2 / 2, mask) ** 2 + token_sum(-advantages * logp, mask)


def k3_per_completion(logp, ref_logp, mask, advantages):
    away = ref_logp - logp
    return (torch.where(mask, away.exp() - 1 - away, 0).sum(-1) / mask.sum(-1)).mean() + token_sum(
        -advantages * logp, mask
    )


@pytest.mark.parametrize("loss", [squared_kl, k3_per_completion, reinforce_with_k2])
def test_the_kl_of_a_whole_loss_is_that_of_its_audit_in_the_same_words(loss):
    whole, alone = audit_whole(loss), audit(loss)
    assert (whole.on_policy.kl, whole.off_policy.kl) == (alone.verdict, alone.verdict_off_policy)
    with Console(width=400, record=True, file=StringIO()) as console:
        console.print(in_full(whole))
    text = console.export_text()
    assert in_words(alone) in text
    assert in_words(alone, on_policy=False) in text
    (fresh, stale) = row_of(whole)[1], row_of(whole)[3]
    assert f"KL: {in_words(alone)}" in fresh
    assert f"KL: {in_words(alone, on_policy=False)}" in stale


def dro(logp, old_logp, mask, advantages):
    return token_sum(-advantages * logp + (logp - old_logp) ** 2 / 2, mask)


def test_a_pull_to_the_sampler_at_every_advantage_is_in_the_table():
    """Its gradient without advantages is that of the mean of (log π/μ)²/2, which is no target."""
    bare, pulled = (row_of(audit_whole(loss)) for loss in (POLICY_LOSSES["reinforce"], dro))
    assert "KL" not in bare[3]
    assert "; KL: a divergence to the sampler" in pulled[3]


def test_a_higher_clip_is_told_from_a_lower_one():
    def clipped(logp, old_logp, mask, advantages, high):
        ratio = (logp - old_logp).exp()
        return token_sum(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1 + high) * advantages), mask)

    low, high = (audit_whole(partial(clipped, high=high)).off_policy for high in (0.2, 0.28))
    assert abs(low.positive.size - high.positive.size) > 1e-3
    assert abs(low.update.cosine["policy-gradient"] - high.update.cosine["policy-gradient"]) > 1e-3
