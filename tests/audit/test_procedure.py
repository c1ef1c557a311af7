"""The audit on losses as users write them, sound, wrong or degenerate."""

import json
import math
import random
from functools import cache
from html import escape
from pathlib import Path

import pytest
import torch
from oracle import SMALL
from rich.console import Console
from some import first
from tolerances import EXACT

from klgrad import KLTerm, zoo
from klgrad.audit import audit, catalogue, load, load_every
from klgrad.audit.advice import GAPS, LENGTHS, MASKED, SHIFT, differences, findings, is_usual
from klgrad.audit.page import to_html
from klgrad.audit.procedure import variance_problems
from klgrad.audit.subject import as_subject, expected_gradient
from klgrad.audit.terminal import cells_of, in_full, overview, to_json, to_markdown
from klgrad.errors import LossCallError, LossOutputError


def k3_per_token(logp, ref_logp):
    away = ref_logp - logp
    return away.exp() - away - 1


def k2_sum(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum() / len(logp)


def k3_sum(logp, ref_logp, mask):
    return (k3_per_token(logp, ref_logp) * mask).sum(-1).mean()


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
def test_a_stale_kl_is_not_taken_for_a_fresh_one():
    for advantages in ("zero", "random"):
        result = audit(stale, advantages=advantages)
        assert (result.verdict, result.verdict_off_policy) == ("reverse-kl-sequence", "sum-of-targets")
        assert result.anatomy.samples.frozen


def noisy_logits(logits, ref_logits):
    return torch.rand(()) * (logits.softmax(-1) * ref_logits).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [noisy, noisy_logits])
def test_a_random_loss_has_no_verdict_and_no_other_note(loss):
    result = audit(loss)
    assert not result.anatomy.deterministic
    assert str(result.advice).startswith(
        "Descends no divergence that is known: the same batch gives different gradients"
    )
    assert findings(result) == ["not deterministic"]


@pytest.mark.slow
def test_a_division_by_a_spread_of_zero_is_told():
    result = audit(zero_over_zero)
    assert not result.finite
    assert result.anatomy.baseline.spread != "none"
    assert is_usual(result) == "in part"


@pytest.mark.slow
def test_an_audit_under_no_grad_is_an_audit():
    with torch.no_grad():
        assert audit(k2_sum).verdict == "reverse-kl-token"


@pytest.mark.slow
def test_a_wrong_sign_is_called_by_its_name():
    result = audit(climbs)
    assert str(result.advice).startswith("Climbs the reverse KL, token by token: the sign is wrong")
    assert result.anatomy.shares == {"reverse-kl": -1.0}


@pytest.mark.slow
def test_padding_dead_zones_and_overflow_are_seen():
    assert audit(forgets_the_mask).anatomy.leaks
    assert not audit(k2_sum).anatomy.leaks
    assert not audit(overflows).finite
    clamped = audit(zoo.get("k3-loss-clamped"))
    assert (clamped.dead_below, clamped.dead_above) == pytest.approx((-2.6109, 11.0), abs=DEAD_ZONE)
    product = audit(zoo.get("ratio-k3-loss"))
    assert product.float32_wrong_from == -16.0
    assert audit(KLTerm()).dead_below is None


@pytest.mark.slow
def test_whether_the_reference_matters():
    assert str(audit(k1_mean).advice).startswith("Regularises nothing: ref has no effect")
    assert not any(audit(loss).depends_on_reference for loss in (k1_mean, zoo.get("k1-loss"), no_grad))
    exact = KLTerm(level="token", estimator="exact")
    assert all(audit(loss).depends_on_reference for loss in (hinge, k3_per_token, exact))


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
    found = {}
    for distance in ("near", "far"):
        found[distance] = []
        for p, _, _ in variance_problems(distance):
            g = ((p.logp - p.ref_logp)[..., None] * p.scores).sum(1)
            mean = p.probability @ g
            found[distance].append(float(p.probability @ (g - mean).square().sum(-1)))
    result = audit(k2_sum)
    EXACT.check(result.variance, sum(found["near"] + found["far"]) / 8)
    EXACT.check(result.variance_near, sum(found["near"]) / 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k2-loss", "k1-reward-leave-one-out", "reverse-sequence-exact-loo"])
def test_groups_in_one_call_give_what_single_groups_give(name):
    none = torch.zeros(len(SMALL.space), dtype=torch.float64)
    a, b = (expected_gradient(catalogue()[name], SMALL, 2, none, at_once=way) for way in (True, False))
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


def returns_logp(logits, labels):
    mask = labels >= 0
    return torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0], mask


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
    returns_logp: (
        LossOutputError,
        "return a loss; received the log-probs of the tokens and a mask; remedy: name the",
    ),
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
        (-5, 5, -5, 5, "-5 < l < 5"),
        (-0.5, 1, -1, 0.5, "-1 < l < 0.5"),
        (None, 2, -2, None, "l > -2"),
        (-18.5, 24, -24, 18.5, "-24 < l < 18.5"),
    ],
)
def test_the_ends_of_a_dead_zone_are_those_of_the_clamp_in_every_report(low, high, below, above, words):
    subject = as_subject(clamped_at(low, high), "clamped")
    result = audit(subject)
    assert (result.dead_below, result.dead_above) == pytest.approx((below, above), abs=DEAD_ZONE)
    (data,) = json.loads(to_json([result]))["results"]
    divergence = data["anatomy"]["divergence"]
    assert (divergence["flat_below"], divergence["flat_above"]) == (result.dead_below, result.dead_above)
    assert f"escends the forward KL where {words}" in str(result.advice)
    assert words in cells_of(result)[1]
    assert escape(f"a gradient only where {words.replace('l', 'log π/ref')}") in to_html([result])


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


# Every loss of `data/losses.py` is audited, and its verdict is right.


FILE = Path(__file__).parent / "data" / "losses.py"

FORWARD, REVERSE = "forward-kl-token", "reverse-kl-token"

OF_FILE = {
    "grpo_k3": (FORWARD, 0.04, {}),
    "grpo_corrected_k3": (REVERSE, 1.0, {}),
    "rloo_reward": ("reverse-kl-sequence", 0.05, {}),
    "jsd": ("unknown", None, {}),
    "forward_jsd": (FORWARD, 1.0, {}),
    "reverse_jsd": (REVERSE, 1.0, {}),
    "kl_penalty": (REVERSE, 1.0, {"kl_penalty": "mse"}),
    "policy_loss": ("nothing", None, {}),
    "update_actor": (REVERSE, 1.0, {}),
    "micro_batch_k1": ("nothing", None, {}),
    "PolicyLoss": ("nothing", None, {"clip_eps": 0.3}),
    "approx_kl": ("nothing", None, {}),
    "KLLoss": (REVERSE, 0.3, {"coef": 0.3}),
    "kl_loss": (REVERSE, 0.1, {}),
    "reverse_kd": (REVERSE, 1.0, {}),
    "forward_kd": (FORWARD, 1.0, {}),
    "forward_kd_per_entry": (FORWARD, 1.0, {}),
    "shifted_kd": (FORWARD, 1.0, {}),
    "top_k_kd": ("unknown", None, {}),
    "uld": ("unknown", None, {}),
    "mse_of_logits": ("unknown", None, {}),
    "cross_entropy": ("nothing", None, {}),
    "k2_from_logits": (REVERSE, 1.0, {}),
    "on_policy_distillation": (REVERSE, 1.0, {}),
    "k2_in_a_dict": (REVERSE, 1.0, {}),
    "k2_per_completion": (REVERSE, 1.0, {}),
    "k2_in_an_object": (REVERSE, 1.0, {}),
    "k3_with_numbers_as_mask": (FORWARD, 1.0, {}),
    "forgot_the_mask": ("unknown", None, {}),
    "forgot_the_mask_of_logits": ("unknown", None, {}),
    "k3_of_keywords": (FORWARD, 1.0, {}),
    "k3_of_attributes": (FORWARD, 1.0, {}),
    "Penalty": (REVERSE, 0.1, {}),
    "Trainer.compute_kl": (FORWARD, 0.1, {}),
    "with_cfg": (REVERSE, 0.2, {"cfg": {"beta": 0.2}}),
}
"""By name: the on-policy verdict, the scale, and the settings."""


@cache
def audited_of_file(name):
    return audit(load(f"{FILE}:{name}", OF_FILE[name][2]))


@pytest.mark.slow
@pytest.mark.parametrize("name", first(OF_FILE, 10))
def test_names_of_the_losses_of_the_file(name):
    verdict, scale, _ = OF_FILE[name]
    result = audited_of_file(name)
    assert result.verdict == verdict, str(result.advice)
    if scale is not None:
        EXACT.check(result.scale, scale)


AVERAGED = {"grpo_whole": ("unknown", "completion-mean"), "KDLoss": (FORWARD, "token-mean")}
"""Losses with a mean over tokens: the verdict and the unit."""


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGED)
def test_means_over_tokens(name):
    result = audit(load(f"{FILE}:{name}"))
    assert (result.verdict, result.anatomy.unit.name) == AVERAGED[name]
    assert result.anatomy.shares.keys() == {"forward-kl"}


OF_THE_SAMPLER = {
    "reverse_kd": "reverse-kl-token-sampler",
    "reverse_jsd": "reverse-kl-token-sampler",
    "forward_kd": "forward-kl-token-sampler",
    "shifted_kd": "forward-kl-token-sampler",
    "cross_entropy": "forward-kl-sampler-sequence",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_SAMPLER)
def test_losses_of_logits_on_the_samplers_prefixes(name):
    assert audited_of_file(name).verdict_off_policy == OF_THE_SAMPLER[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "divergence"), [("forgot_the_mask", "reverse"), ("forgot_the_mask_of_logits", "forward")]
)
def test_a_forgotten_mask_is_named_with_its_remedy(name, divergence):
    result = audited_of_file(name)
    assert result.anatomy.leaks
    assert result.anatomy.shares == {f"{divergence}-kl": 1.0}
    assert result.advice.remedies[0] == MASKED
    assert "* mask" in str(result.advice)
    assert "length of each completion" not in str(result.advice)


@pytest.mark.slow
def test_settings_choose_the_estimator():
    found = {k: audit(load(f"{FILE}:approx_kl", {"kl_estimator": k})).verdict for k in ("k1", "k2", "k3")}
    assert found == {"k1": "nothing", "k2": REVERSE, "k3": FORWARD}
    assert audit(load(f"{FILE}:Penalty", {"kind": "k3", "beta": 2.0})).verdict == FORWARD


def test_every_loss_of_the_file_is_found():
    found = load_every(str(FILE))
    names = [subject.name.removeprefix(f"{FILE}:") for subject in found.subjects]
    assert sorted([*names, *found.skipped]) == sorted({*OF_FILE, *AVERAGED, "Trainer"} - {"Trainer.compute_kl"})
    assert set(found.skipped) == {"kl_penalty", "KLLoss", "Trainer", "with_cfg"}
    assert len(names) >= 30
    assert "kl_penalty is not known" in found.skipped["kl_penalty"]
    assert found.skipped["KLLoss"].startswith("a constructor that needs coef; give them by --set coef=VALUE")
    given = load_every(str(FILE), {"coef": 0.1, "kl_penalty": "kl", "cfg": {"beta": 1.0}})
    assert set(given.skipped) == {"Trainer"}


def reward_to_go_past_the_mask(logp, ref_logp, mask):
    """The KL of masked positions is in the reward of the tokens before them."""
    to_go = (logp - ref_logp).detach().flip(-1).cumsum(-1).flip(-1)
    return (to_go * logp * mask).sum(-1).mean()


def total_past_the_mask(logp, ref_logp, mask):
    return ((logp - ref_logp).detach().sum(-1) * (logp * mask).sum(-1)).mean()


@pytest.mark.parametrize("loss", [reward_to_go_past_the_mask, total_past_the_mask])
def test_a_kl_that_leaks_from_masked_positions_is_told_to_mask_it(loss):
    result = audit(loss)
    assert (result.verdict, result.reads_masked, result.anatomy.leaks) == ("unknown", True, False)
    assert "the values at masked positions change its gradient" in str(result.advice)
    assert result.advice.remedies[0] == MASKED
    assert "length of each completion" not in str(result.advice)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("bound", [0.07, 0.13])
def test_a_clip_of_single_entries_is_not_told_to_change_its_lengths(direction, bound):
    def clipped(logits, ref_logits, mask):
        p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        entries = p.exp() * (p - q) if direction == "reverse" else q.exp() * (q - p)
        return (entries.clamp(max=bound).sum(-1) * mask).sum(-1).mean()

    result = audit(clipped)
    assert result.verdict == "unknown"
    assert not result.anatomy.proved
    assert "length" not in str(result.advice)


def test_a_division_by_lengths_is_told():
    def per_completion(logp, ref_logp, mask, power):
        return ((logp - ref_logp).detach().mul(mask).sum(-1) * (logp * mask).sum(-1) / mask.sum(-1) ** power).mean()

    for power in (1, 2):
        result = audit(per_completion, settings={"power": power})
        assert (result.anatomy.unit.name, result.anatomy.proved) == ("completion-mean", True)
        assert result.advice.remedies[0] == LENGTHS


def reward_on_the_last_token(logp, ref_logp, mask):
    """The place of the last token is taken to be the number of tokens."""
    reward = torch.zeros_like(logp)
    reward[torch.arange(len(logp)), mask.sum(-1) - 1] = ((logp - ref_logp).detach() * mask).sum(-1)
    return (reward.flip(-1).cumsum(-1).flip(-1) * logp * mask).sum(-1).mean()


def test_what_a_mask_with_gaps_changes_is_told():
    result = audit(reward_on_the_last_token)
    assert (result.verdict, result.stumbles_over_gaps, result.leaks_at_gaps) == ("reverse-kl-sequence", True, False)
    assert "masked positions inside a completion, such as the output of a tool, change its gradient" in str(
        result.advice
    )
    assert result.advice.remedies[0] == GAPS


@pytest.mark.parametrize("sign", [1, -1])
def test_a_filter_does_not_hide_a_gradient_on_padding(sign):
    def masked_where_the_log_ratio_has_a_sign(logp, ref_logp, mask):
        log_ratio = logp - ref_logp
        return (log_ratio**2 / 2 * (mask | (sign * log_ratio.detach() < 0))).sum() / len(logp)

    result = audit(masked_where_the_log_ratio_has_a_sign)
    assert result.anatomy.leaks
    assert result.verdict == "unknown"


def per_completion(logp, ref_logp, mask, least=0):
    return (((logp - ref_logp) ** 2 / 2 * mask).sum(-1) / mask.sum(-1).clamp(min=least)).mean()


def test_strict_is_about_gaps_and_empty_completions_too():
    for loss, note in ((reward_on_the_last_token, "change its gradient"), (per_completion, "a completion is empty")):
        result = audit(loss)
        assert not differences(result, result.verdict)
        assert any(note in d.received for d in differences(result, result.verdict, strict=True))


def test_an_empty_completion_is_tried():
    divided, safe = (audit(per_completion, settings={"least": least}) for least in (0, 1))
    assert (divided.finite_if_empty, safe.finite_if_empty) == (False, True)
    assert "NaN or an error if a completion is empty" in str(divided.advice)
    assert "empty" not in str(safe.advice)


@pytest.mark.parametrize("loss", [KLTerm(baseline="leave_one_out"), zoo.get("k1-reward")])
def test_gaps_and_empty_completions_do_not_change_the_losses_of_this_package(loss):
    result = audit(loss)
    assert (result.reads_masked, result.stumbles_over_gaps, result.finite_if_empty) == (False, False, True)


def kl_of_the_most_likely(logits, ref_logits, mask, k=100, of_teacher=False):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    places = (q if of_teacher else p).topk(min(k, p.shape[-1]), -1).indices
    p, q = p.gather(-1, places), q.gather(-1, places)
    return ((p.exp() * (p - q)).sum(-1) * mask).sum() / mask.sum()


def kl_of_likely_samples(logits, logp, ref_logp, labels, k=20):
    """k2 where the sampled token is among the k most likely: the gradient passes through the log-probs alone."""
    mask = labels != -100
    places = logits.topk(min(k, logits.shape[-1]), -1).indices
    return ((logp - ref_logp) ** 2 / 2 * mask * (places == labels.clamp(min=0)[..., None]).any(-1)).sum(-1).mean()


@pytest.mark.parametrize("advantages", ["zero", "random"])
@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (kl_of_the_most_likely, {}),
        (kl_of_the_most_likely, {"k": 500}),
        (kl_of_the_most_likely, {"of_teacher": True}),
        (kl_of_likely_samples, {}),
    ],
)
def test_a_list_of_the_most_likely_tokens_is_not_the_kl_of_all(loss, settings, advantages):
    result = audit(loss, settings=settings, advantages=advantages)
    assert (result.verdict, result.verdict_off_policy) == ("unknown", "unknown")
    top = result.anatomy.top
    if loss is kl_of_the_most_likely:
        assert top is not None
        assert (top.size, top.of) == (settings.get("k", 100), "ref" if "of_teacher" in settings else "policy")
    else:
        assert result.anatomy.unexplained["a vocabulary of 512"] > result.anatomy.allowed


def sampled_from_logits(logits, ref_logits, labels):
    mask, places = labels != -100, labels.clamp(min=0)[..., None]
    p, q = (x.log_softmax(-1).gather(-1, places)[..., 0] for x in (logits, ref_logits))
    return ((p - q) ** 2 / 2 * mask).sum(-1).mean()


@pytest.mark.parametrize(("loss", "settings"), [(kl_of_the_most_likely, {"k": 512}), (sampled_from_logits, {})])
def test_a_kl_of_all_tokens_keeps_its_verdict_in_a_large_vocabulary(loss, settings):
    result = audit(loss, settings=settings)
    assert (result.verdict, result.anatomy.top) == ("reverse-kl-token", None)


def test_the_error_of_too_many_tokens_says_how_many_there_are():
    def top(logits, ref_logits, mask, k=600):
        p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        return ((p.topk(k, -1).values - q.topk(k, -1).values).sum(-1) * mask).sum(-1).mean()

    with pytest.raises(LossCallError) as raised:
        audit(top)
    assert "logits of shape (3, 3, 4), and of 512 tokens, which a k cannot exceed" in str(raised.value)


def test_a_mask_that_leaks_at_the_output_of_a_tool_is_told_to_mask_it():
    def of_what_comes_before_the_end(logp, ref_logp, mask):
        end = mask.flip(-1).cumsum(-1).flip(-1) > 0
        return ((logp - ref_logp) ** 2 / 2 * end).sum(-1).mean()

    result = audit(of_what_comes_before_the_end)
    assert (result.anatomy.leaks, result.leaks_at_gaps) == (False, True)
    assert result.to_dict()["anatomy"]["masked_tokens_leak"]
    assert "masked positions inside a completion, such as the output of a tool, have a gradient" in findings(result)
    assert result.advice.remedies[0] == MASKED


def test_a_late_reference_is_not_told_to_mask():
    def shifted(logp, ref_logp, mask):
        return ((logp[:, 1:] - ref_logp[:, :-1]) ** 2 / 2 * mask[:, 1:]).sum(-1).mean()

    result = audit(shifted)
    assert findings(result) == []
    assert "token t is compared with ref's log-prob of token t-1" in cells_of(result)[1]
    assert [remedy for remedy in result.advice.remedies if not remedy.use] == [SHIFT]


# Losses that are zero, infinite, huge, tiny or random, on some batches or on all: an answer, never a crash.


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_without_gradient_for_one_batch_shape_the_verdict_does_not_hold_always(rows):
    result = audit(lambda logp, ref_logp, mask: k2_sum(logp, ref_logp, mask) * (len(logp) != rows))
    assert not result.anatomy.proved
    assert "always" not in (result.holds, result.holds_off_policy)


@pytest.mark.slow
def test_another_target_for_one_batch_shape_is_seen_at_any_scale():
    """A scale per shape is free; a shape where the loss is small must not be lost beside the others."""

    def loss(logp, ref_logp, mask):
        return k3_sum(logp, ref_logp, mask) if len(logp) == 3 else 1e9 * k2_sum(logp, ref_logp, mask)

    result = audit(loss)
    assert (result.verdict, result.anatomy.proved) == ("unknown", False)


@pytest.mark.slow
def test_with_random_advantages_a_reference_that_acts_through_them_is_seen():
    def loss(logp, ref_logp, mask, advantages):
        return (0.5 * (logp - ref_logp) ** 2 * (advantages > 0) * mask).sum(-1).mean()

    result = audit(loss, advantages="random")
    assert result.depends_on_reference
    assert not audit(loss).depends_on_reference  # without advantages it has no gradient at all


@pytest.mark.slow
@pytest.mark.parametrize("scale", first([1e200, 1e-200, 40.0, 1e-6, 1e6], 3))
@pytest.mark.parametrize("advantages", first(["zero", "random"], 1))
def test_a_scale_of_any_size_is_a_scale(scale, advantages):
    result = audit(lambda logp, ref_logp, mask: scale * k2_sum(logp, ref_logp, mask), advantages=advantages)
    assert result.verdict == "reverse-kl-token"
    assert result.scale == pytest.approx(scale, rel=1e-9)
    assert result.variance == pytest.approx(audit(k2_sum).variance, rel=1e-9)
    assert ("NaN or infinite in float32" in str(result.advice)) == (not result.finite) == (scale == 1e200)


@pytest.mark.slow
def test_a_gradient_without_mean_is_nothing_at_any_scale():
    for scale in (1e200, 1e-200):
        result = audit(lambda logp, mask, scale=scale: scale * (logp * mask).sum(-1).mean())
        assert result.verdict == "nothing"
        assert str(result.advice).startswith("Regularises nothing: ref has no effect")


@pytest.mark.slow
def test_what_is_off_by_little_is_not_off_by_nothing():
    def loss(logp, ref_logp, mask):
        return k2_sum(logp, ref_logp, mask) + 2e-4 * k3_sum(logp, ref_logp, mask)

    result = audit(loss)
    assert result.verdict == "sum-of-targets"
    assert result.anatomy.shares == pytest.approx({"reverse-kl": 1.0, "forward-kl": 2e-4})


# What random losses are composed of. Each part is a function of the batch and of a seeded generator.
VALUES = {
    "k1": lambda b: b["logp"] - b["ref_logp"],
    "k2": lambda b: 0.5 * (b["logp"] - b["ref_logp"]) ** 2,
    "k3": lambda b: (b["ref_logp"] - b["logp"]).exp() - 1 + b["logp"] - b["ref_logp"],
    "detached": lambda b: (b["logp"] - b["ref_logp"]).detach(),
    "integers": lambda b: (b["logp"] - b["ref_logp"]).round().long(),
    "constant": lambda b: torch.ones_like(b["logp"]),
    "reward": lambda b: (b["logp"] - b["ref_logp"]).detach() * b["logp"],
    "advantages": lambda b: b["advantages"] * b["logp"],
    "whitened": lambda b: _whitened(b["logp"] - b["ref_logp"]).detach() * b["logp"],
    "root": lambda b: (b["logp"] - b["ref_logp"]).abs().sqrt(),
    "quotient": lambda b: b["logp"] / (b["logp"] - b["ref_logp"]),
    "step": lambda b: (b["logp"] > b["ref_logp"]).double(),
    "random": lambda b: b["logp"] * torch.rand(()),
    "exact": lambda b: b["token_reverse_kl"],
}
WHERE = {
    "live": lambda b: b["mask"],
    "padding": lambda b: ~b["mask"],
    "everywhere": lambda b: torch.ones_like(b["mask"]),
    "first token": lambda b: torch.arange(b["mask"].shape[1]) == 0,
    "first row": lambda b: (torch.arange(len(b["mask"])) == 0)[:, None].expand_as(b["mask"]),
    "never": lambda b: torch.zeros_like(b["mask"]),
    "far": lambda b: (b["logp"] - b["ref_logp"]).abs() > 6,
}
FACTORS = (1.0, -1.0, 0.0, 1e200, 1e-200, 1e300, 1e-310, math.inf, math.nan, 3)
WHEN = {
    "always": lambda b: True,
    "pairs": lambda b: len(b["mask"]) == 2,
    "not pairs": lambda b: len(b["mask"]) != 2,
    "long": lambda b: b["mask"].shape[1] > 3,
    "full": lambda b: bool(b["mask"].all()),
    "single": lambda b: b["logp"].dtype == torch.float32,
    "seldom": lambda b: float(b["logp"].detach().sum()) < -6,
}


def _whitened(x):
    return (x - x.mean()) / x.std()


def composed(seed):
    """A random loss of one to three parts, and its recipe."""
    choose = random.Random(seed)
    pick = lambda options: choose.choice(list(options))
    parts = [(pick(VALUES), pick(WHERE), pick(WHEN), pick(FACTORS), pick(FACTORS)) for _ in range(choose.randint(1, 3))]
    scalar = choose.random() < 0.5

    def loss(**b):
        total = torch.zeros_like(b["logp"])
        for value, where, when, then, otherwise in parts:
            factor = then if WHEN[when](b) else otherwise
            total = total + factor * torch.where(WHERE[where](b), VALUES[value](b), 0)
        return total.sum() / len(total) if scalar else total

    return loss, f"{seed}: {parts}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(range(24), 4))
def test_a_random_loss_has_an_answer(seed):
    loss, recipe = composed(seed)
    subject = as_subject(loss, "composed")
    torch.manual_seed(seed)
    check(subject, "random" if seed % 3 == 0 else "zero", recipe)


def check(subject, advantages, recipe):
    result = audit(subject, advantages=advantages)
    assert result.anatomy.proved_fresh or result.verdict == "unknown", recipe
    assert result.anatomy.proved or result.verdict_off_policy == "unknown", recipe
    # Whatever was found can be shown.
    to_json([result])
    to_markdown([result])
    to_html([result])
    console = Console(file=None, quiet=True, width=150)
    console.print(in_full(result, subject), overview([result]))
