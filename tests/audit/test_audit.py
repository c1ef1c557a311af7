"""The audit on losses as users write them."""

import json
from dataclasses import replace

import pytest
import torch
from some import first
from tolerances import EXACT

from klgrad import KLTerm, zoo as cells
from klgrad.audit import audit, catalogue
from klgrad.audit.advice import notes, standing
from klgrad.audit.batch import advantage_of, cases
from klgrad.audit.page import to_html
from klgrad.audit.subject import as_subject, expected_gradient
from klgrad.audit.terminal import to_json
from klgrad.enumeration import OBJECTIVES
from klgrad.errors import LossCallError, LossOutputError
from klgrad.targets import TARGETS


def k3_per_token(logp, ref_logp):
    away = ref_logp - logp
    return away.exp() - away - 1


def k2_sum(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum() / len(logp)


def k2_token_mean(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum() / mask.sum()


def climbs(logp, ref_logp, mask):
    return -k2_sum(logp, ref_logp, mask)


def forgets_the_mask(logp, ref_logp):
    return (0.5 * (logp - ref_logp) ** 2).sum(-1).mean()


def no_grad(logp, ref_logp, mask):
    with torch.no_grad():
        return k2_sum(logp, ref_logp, mask)


def not_differentiable(ref_logp, mask):
    return (ref_logp * mask).sum()


def casts_to_float32(logp, ref_logp, mask):
    return k2_sum(logp.float(), ref_logp.float(), mask)


def overflows(logp, ref_logp, mask):
    return (torch.where(mask, k3_per_token(logp, ref_logp), 0)).sum()


def zero_over_zero(logp, ref_logp, mask):
    total = ((logp - ref_logp) * mask).sum(-1).detach()
    return ((total - total.mean()) / total.std() * (logp * mask).sum(-1)).mean()


def clipped_policy_loss_with_kl(logp, old_logp, ref_logp, advantages, mask):
    ratio = (logp - old_logp).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((policy + 0.1 * 0.5 * (logp - ref_logp) ** 2) * mask).sum() / len(logp)


def writes_in_place(logp, ref_logp, mask):
    logp[~mask] = 0
    ref_logp[~mask] = 0
    return (0.5 * (logp - ref_logp) ** 2).sum() / len(logp)


def truncates_its_ratio(logp, ref_logp, behavior_logp, mask):
    weight = (logp - behavior_logp).exp().clamp(max=10).detach()
    return (weight * 0.5 * (logp - ref_logp) ** 2 * mask).sum() / len(logp)


def hinge(logp, ref_logp, mask):
    return torch.relu(k2_sum(logp, ref_logp, mask) - 1)


def k1_mean(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum() / mask.sum()


def stale(logp, old_logp, ref_logp, advantages, mask):
    ratio = ((logp - old_logp) * mask).sum(-1, keepdim=True).exp()
    reward = advantages[:, :1] - ((old_logp - ref_logp) * mask).sum(-1, keepdim=True)
    return -(ratio * reward).mean()


def noisy(logp, ref_logp, mask):
    return k2_sum(logp, ref_logp, mask) * torch.rand(())


VERDICTS = {
    k3_per_token: ("forward-kl-token", "k3-token"),
    k2_sum: ("reverse-kl-token", "squared-token"),
    casts_to_float32: ("reverse-kl-token", "squared-token"),
    forgets_the_mask: ("unknown", "unknown"),
    writes_in_place: ("reverse-kl-token", "squared-token"),
    truncates_its_ratio: ("reverse-kl-token", "unknown"),
    hinge: ("unknown", "unknown"),
    k1_mean: ("nothing", "climbs forward-kl-sampler-sequence"),
    no_grad: ("nothing", "nothing"),
    not_differentiable: ("nothing", "nothing"),
    climbs: ("climbs reverse-kl-token", "climbs squared-token"),
    zero_over_zero: ("reverse-kl-sequence", "sum-of-targets"),
    clipped_policy_loss_with_kl: ("reverse-kl-token", "squared-token"),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", VERDICTS, ids=lambda f: f.__name__)
def test_verdicts(loss):
    result = audit(loss)
    assert (result.verdict, result.verdict_off_policy) == VERDICTS[loss], str(result.advice)
    assert result.name == loss.__name__
    assert result.kind == "function"


@pytest.mark.slow
def test_what_ignores_the_reference_is_told_so_first():
    assert not audit(k1_mean).depends_on_reference
    assert str(audit(k1_mean).advice).startswith("Regularises nothing: ref has no effect")
    assert audit(hinge).depends_on_reference


@pytest.mark.slow
def test_a_stale_kl_is_not_taken_for_a_fresh_one():
    for advantages in ("zero", "random"):
        result = audit(stale, advantages=advantages)
        assert (result.verdict, result.verdict_off_policy) == ("reverse-kl-sequence", "sum-of-targets")
        assert result.anatomy.samples.frozen


@pytest.mark.slow
def test_a_random_loss_has_no_verdict():
    result = audit(noisy)
    assert not result.anatomy.deterministic
    assert str(result.advice).startswith("Is not deterministic")


@pytest.mark.slow
def test_a_division_by_a_spread_of_zero_is_told():
    result = audit(zero_over_zero)
    assert not result.finite
    assert result.anatomy.baseline.spread != "none"
    assert standing(result) == "large"


@pytest.mark.slow
def test_an_audit_under_no_grad_is_an_audit():
    with torch.no_grad():
        assert audit(k2_sum).verdict == "reverse-kl-token"


@pytest.mark.slow
def test_a_wrong_sign_is_called_by_its_name():
    result = audit(climbs)
    assert str(result.advice).startswith("Climbs the token-level reverse KL")
    assert result.anatomy.shares == {"reverse-kl": -1.0}


@pytest.mark.slow
def test_padding_dead_zones_and_overflow_are_seen():
    assert audit(forgets_the_mask).anatomy.leaks
    assert not audit(k2_sum).anatomy.leaks
    assert not audit(overflows).finite
    assert not audit(zero_over_zero).finite
    clamped = audit(cells.get("k3-loss-clamped"))
    assert (clamped.dead_below, clamped.dead_above) == pytest.approx((-2.6109, 11.0), abs=DEAD_ZONE)
    product = audit(cells.get("ratio-k3-loss"))
    assert product.float32_wrong_from == -16.0
    assert audit(KLTerm()).dead_below is None


@pytest.mark.slow
def test_whether_the_reference_matters():
    assert not audit(cells.get("k1-loss")).depends_on_reference
    assert not audit(no_grad).depends_on_reference
    assert audit(k3_per_token).depends_on_reference
    assert audit(KLTerm(level="token", estimator="exact")).depends_on_reference


@pytest.mark.slow
@pytest.mark.parametrize("scale", first([40.0, 0.01, 1.0], 1))
def test_the_scale_is_found(scale):
    result = audit(lambda logp, ref_logp, mask: scale * k2_sum(logp, ref_logp, mask), name="scaled")
    assert result.verdict == "reverse-kl-token"
    EXACT.check(result.scale or 0.0, scale)
    EXACT.check(result.variance, audit(cells.get("k2-loss")).variance)


@pytest.mark.slow
def test_with_random_advantages_it_is_what_the_reference_adds():
    result = audit(clipped_policy_loss_with_kl, advantages="random")
    assert result.verdict == "reverse-kl-token"
    EXACT.check(result.scale or 0.0, 0.1)
    blind = audit(lambda logp, advantages, mask: -(advantages * logp * mask).sum(), name="no KL", advantages="random")
    assert blind.verdict == "nothing"
    assert not blind.depends_on_reference


@pytest.mark.slow
def test_the_variance_is_that_of_one_completion():
    """Against the definition, on single completions: group size must not matter for a loss without groups."""
    found = []
    standard = cases(on_policy=True)
    for case in standard:
        p = case.problem
        g = ((p.logp - p.ref_logp)[..., None] * p.scores).sum(1)
        mean = p.probability @ g
        found.append(float(p.probability @ (g - mean).square().sum(-1)))
    EXACT.check(audit(k2_sum).variance, sum(found) / len(found))
    near = [v for v, case in zip(found, standard, strict=True) if case.distance == "near"]
    EXACT.check(audit(k2_sum).variance_near, sum(near) / len(near))


REACH, RATIO_REACH = (-2.8, 4.6), (1 / 12, 12.0)
"""k3 and k2, clamped at 10, have no gradient beyond log π/ref of -2.61 and ±4.47; ratios are truncated at 2 to 10."""


def test_far_problems_pass_every_clamp_in_common_use():
    for case in cases(on_policy=False):
        if case.distance == "far":
            log_ratio = case.problem.logp - case.problem.ref_logp
            assert float(log_ratio.min()) < REACH[0]
            assert float(log_ratio.max()) > REACH[1]
            ratio = (case.problem.logp - case.problem.behavior_logp).exp()
            assert float(ratio.min()) < RATIO_REACH[0]
            assert float(ratio.max()) > RATIO_REACH[1]


@pytest.mark.parametrize("on_policy", [True, False])
def test_distinct_targets_are_far_apart_on_the_problems(on_policy):
    problems = cases(on_policy)
    simplest = lambda n: TARGETS[n].anchor == "ref" and TARGETS[n].same_on_policy is None
    names = [n for n in OBJECTIVES if not on_policy or simplest(n)]
    for a in names:
        for b in names:
            if a != b:
                sines = [1 - torch.cosine_similarity(c.targets[a], c.targets[b], dim=0).item() ** 2 for c in problems]
                assert max(sines) ** 0.5 > 0.01


@pytest.mark.slow
def test_stacked_groups_give_what_single_groups_give():
    """The shortcut taken for this package's own losses, against the group-by-group calls."""
    stacked = [s for s in catalogue().values() if s.stacks]
    assert len(stacked) > 60
    for subject in stacked[::12]:
        single = replace(subject, stacks=False)
        for case in cases(on_policy=False)[::3]:
            advantage = advantage_of(case.problem, "zero")
            a, b = (expected_gradient(x, case.problem, case.group_size, advantage) for x in (subject, single))
            EXACT.check(a.mean, b.mean)
            EXACT.check(a.deviation, b.deviation)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        raise ValueError("no backward pass")


def test_an_error_of_the_backward_pass_is_named():
    with pytest.raises(LossCallError, match="no backward pass"):
        audit(lambda logp, mask: (FailsBackward.apply(logp) * mask).sum())


def raises(logp, mask):
    raise KeyError("no such setting")


def returns_a_number(logp, mask):
    return logp.sum().item()


def returns_metrics_only(logp, mask):
    return {"kl": logp.sum()}


def returns_per_step(logp, mask):
    return (logp * mask).sum(0)


def wants_the_moon(logp, moon):
    return logp.sum()


def calls_backward(logp, ref_logp, mask):
    loss = k2_sum(logp, ref_logp, mask)
    loss.backward()
    return loss


def wants_nothing():
    return torch.zeros(())


BAD = {
    raises: (
        LossCallError,
        r"raises to return a differentiable loss; received KeyError: 'no such setting'; remedy: look at .*line \d+",
    ),
    returns_a_number: (LossOutputError, r"received the number -\d.*without `.item\(\)`.*remedy: return the loss as a"),
    returns_metrics_only: (LossOutputError, "received a dictionary with the keys kl; remedy: return the loss"),
    returns_per_step: (LossOutputError, r"received a tensor of shape \(10,\)"),
    wants_the_moon: (
        LossCallError,
        "logp, moon, of which moon is not known; remedy: if moon is a tensor, .*--name moon=ROLE.*--set moon=VALUE",
    ),
    calls_backward: (LossCallError, r"received RuntimeError: .*backward through the graph a second time"),
    wants_nothing: (LossCallError, r"received parameters \(none\)"),
}


@pytest.mark.parametrize("loss", BAD, ids=lambda f: f.__name__)
def test_a_loss_that_cannot_be_audited_says_why(loss):
    error, text = BAD[loss]
    with pytest.raises(error, match=text):
        audit(loss)


DEAD_ZONE = 1e-4
"""The ends of a dead zone are found by halving, and rounded to four places; float32 log-ratios are accurate to 1e-6."""


def clamped_at(low, high):
    def loss(logp, ref_logp, mask):
        away = (ref_logp - logp).clamp(low, high)
        return ((away.exp() - 1 - away) * mask).sum(-1).mean()

    return loss


@pytest.mark.parametrize(
    ("low", "high", "below", "above", "words"),
    [
        (-5, 5, -5, 5, "below -5 or above 5"),
        (-0.5, 1, -1, 0.5, "below -1 or above 0.5"),
        (None, 2, -2, None, "below -2"),
        (-18.5, 24, -24, 18.5, "below -24 or above 18.5"),
    ],
)
def test_the_ends_of_a_dead_zone_are_those_of_the_clamp_in_every_report(low, high, below, above, words):
    subject = as_subject(clamped_at(low, high), "clamped")
    result = audit(subject)
    assert (result.dead_below, result.dead_above) == pytest.approx((below, above), abs=DEAD_ZONE)
    (data,) = json.loads(to_json([result]))["results"]
    divergence = data["anatomy"]["divergence"]
    assert (divergence["flat_below"], divergence["flat_above"]) == (result.dead_below, result.dead_above)
    assert f"no gradient where log π/ref is {words}" in str(result.advice)
    assert f"dead for l {words}" in notes(result)
    page = to_html([result])
    assert f"no gradient {words.replace('-', '−')}" in page


@pytest.mark.parametrize("power", [1, 2])
def test_a_coefficient_that_is_small_where_it_should_be_is_not_dead(power):
    """exp(-l), that of the forward KL, and exp(-2l): tiny far above 0, and right."""
    result = audit(
        lambda logp, ref_logp, mask: -((power * (ref_logp - logp)).exp().detach() * logp * mask).sum(-1).mean()
    )
    assert (result.dead_below, result.dead_above) == (None, None)
    assert "no gradient" not in str(result.advice)


def test_a_loss_that_refuses_to_overflow_has_a_verdict_and_is_not_finite():
    def checked(logp, ref_logp, mask):
        away = ref_logp - logp
        kl = torch.where(mask, away.exp() - 1 - away, 0)
        if not kl.isfinite().all():
            raise ValueError("the KL overflows")
        return kl.sum(-1).mean()

    result = audit(checked)
    assert (result.verdict, result.finite) == ("forward-kl-token", False)
