"""TRL's settings one by one: formulae written down independently, and what is left out of the audit, and why."""

import pytest
import torch
from oracle import mean_gradient_over_groups
from some import first
from tolerances import EXACT

from klgrad.audit.batch import from_problem
from klgrad.audit.subject import Subject, evaluate, expected_gradient
from klgrad.enumeration import autoregressive, every_group
from klgrad.frameworks import FRAMEWORKS
from klgrad.frameworks.trl import grpo, rloo

pytestmark = [
    pytest.mark.skipif(FRAMEWORKS["trl"].installed is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # it warns of its own affairs
    pytest.mark.slow,
]

SMALL = autoregressive(2, 3, ends=True, seed=24, away_from_ref=1.0, off_policy=1.0)
"""Its ratios pass every bound that is tried here: tokens have 0.46 to 3.98, completions 0.48 to 4.59."""


def k3(rollout):
    away = rollout.ref_logp - rollout.logp
    return away.exp() - away - 1


def stale_ratio(rollout):
    return (rollout.logp - rollout.behavior_logp).exp()


def own_ratio(x):
    """1, differentiable: of the policy to itself, just before the update."""
    return (x.logp - x.logp.detach()).exp()


def batch_token_mean(rollout):
    per_token = stale_ratio(rollout) * k3(rollout)
    return (per_token * rollout.mask).sum() / rollout.mask.sum()


def completion_token_mean(rollout):
    per_token = stale_ratio(rollout) * k3(rollout)
    return ((per_token * rollout.mask).sum(-1) / rollout.mask.sum(-1)).mean()


def gspo(rollout):
    """k3 of each token times one ratio per completion, (B, 1): the geometric mean of its tokens' ratios."""
    log_ratio = (rollout.logp - rollout.behavior_logp) * rollout.mask
    ratio = (log_ratio.sum(-1, keepdim=True) / rollout.mask.sum(-1, keepdim=True)).exp()
    return ratio * k3(rollout) * rollout.mask


def gspo_length_mean(rollout):
    return (gspo(rollout).sum(-1) / rollout.mask.sum(-1)).mean()


def gspo_sum(rollout):
    return gspo(rollout).sum() / rollout.mask.numel()


def without_the_cut_off(rollout):
    ended = ~rollout.mask.all(-1, keepdim=True)
    return (stale_ratio(rollout) * k3(rollout) * (rollout.mask & ended)).sum() / rollout.mask.numel()


def uncorrected_for_vllm(rollout):
    return (own_ratio(rollout) * k3(rollout) * rollout.mask).sum() / rollout.mask.numel()


def leave_one_out(reward):
    return reward - (reward.sum() - reward) / (len(reward) - 1)


def rloo_without_the_cut_off(rollout):
    mask = rollout.mask & ~rollout.mask.all(-1, keepdim=True)
    advantage = leave_one_out(-((rollout.behavior_logp - rollout.ref_logp) * mask).sum(-1))
    ratio = ((rollout.logp - rollout.behavior_logp) * mask).sum(-1).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def rloo_uncorrected_for_vllm(rollout):
    log_ratio = ((rollout.logp - rollout.ref_logp) * rollout.mask).sum(-1).detach()
    return -(leave_one_out(-log_ratio) * (rollout.logp * rollout.mask).sum(-1)).mean()


DR_GRPO, VLLM = {"loss_type": "dr_grpo"}, {"loss_type": "dr_grpo", "use_vllm": True}
MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
INDEPENDENT = [
    *((grpo(loss_type=kind), batch_token_mean) for kind in ("bnpo", "cispo", "vespo")),
    (grpo(loss_type="sapo"), completion_token_mean),
    (grpo(loss_type="grpo", importance_sampling_level="sequence"), gspo_length_mean),
    (grpo(loss_type="dr_grpo", importance_sampling_level="sequence"), gspo_sum),
    (grpo(**DR_GRPO, mask_truncated_completions=True), without_the_cut_off),
    *((grpo(**VLLM, vllm_importance_sampling_mode=mode), uncorrected_for_vllm) for mode in MODES),
    (grpo(**VLLM, vllm_importance_sampling_correction=False), uncorrected_for_vllm),
    (rloo(normalize_advantages=False, mask_truncated_completions=True), rloo_without_the_cut_off),
    (rloo(normalize_advantages=False, use_vllm=True), rloo_uncorrected_for_vllm),
]


def expected(subject, problem, size=2):
    found = expected_gradient(subject, problem, size, torch.zeros(len(problem.space)).double())
    return found.mean[: problem.logits.numel()]


def group_by_group(subject):
    """Every order of every group in a call of its own."""
    return Subject(subject.name, "framework", subject.loss)


@pytest.mark.parametrize("on_policy", first([False, True], 1))
@pytest.mark.parametrize(("subject", "formula"), INDEPENDENT, ids=lambda x: getattr(x, "name", ""))
def test_the_exact_gradient_is_that_of_the_formula_written_down(subject, formula, on_policy):
    found = expected(group_by_group(subject), SMALL.on_policy() if on_policy else SMALL)
    EXACT.check_vector(found, mean_gradient_over_groups(SMALL, 2, formula, on_policy=on_policy))


def test_rloo_with_another_sampler_descends_the_variance_of_the_log_ratio():
    """Its leave-one-out mean is no baseline where the policy did not sample: it turns the square into a variance."""
    logits = SMALL.logits.clone().requires_grad_()
    log_ratio = (SMALL.with_logits(logits).logp - SMALL.ref_logp).sum(-1)
    variance = SMALL.probability @ log_ratio.square() - (SMALL.probability @ log_ratio).square()
    (half,) = torch.autograd.grad(variance / 2, logits)
    EXACT.check_vector(expected(rloo(normalize_advantages=False, use_vllm=True), SMALL), half.flatten())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("subject", [grpo(loss_type="dapo"), rloo(normalize_advantages=True)], ids=lambda s: s.name)
def test_the_order_within_a_group_does_not_matter(subject, size):
    assert subject.exchangeable
    EXACT.check_vector(expected(subject, SMALL, size), expected(group_by_group(subject), SMALL, size))


def every_pair():
    """All pairs of completions off-policy, as one batch, each completion with a reward of its own."""
    members, _ = every_group(SMALL, 2)
    return from_problem(SMALL, members, torch.tensor([0.3, -1.1, 0.7, 2.0]).double())


@pytest.mark.parametrize("mode", MODES)
def test_the_ratio_for_vllm_weighs_the_policy_and_not_the_kl(mode):
    """The whole loss, rewards and all, with a bound that bites."""
    cap, batch = 1.2, every_pair()
    reward = batch.advantages[:, 0].view(-1, 2)
    advantage = (reward - reward.mean(-1, keepdim=True)).flatten()[:, None]
    log_ratio = (batch.logp.detach() - batch.behavior_logp) * batch.mask
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    ratio = ratio.clamp(max=cap) if mode.endswith("truncate") else torch.where(ratio > cap, 0, ratio)
    assert bool((log_ratio.exp() > cap).any())
    per_token = own_ratio(batch) * (k3(batch) - advantage * ratio)
    formula = (per_token * batch.mask).sum() / batch.mask.numel()
    bound = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": cap}
    loss, (gradient, *_) = evaluate(grpo(**VLLM, scale_rewards="none", **bound), batch)
    EXACT.check(loss, formula)
    EXACT.check_vector(gradient, torch.autograd.grad(formula, batch.logp)[0])


PLAIN_K3 = {**DR_GRPO, "use_bias_correction_kl": False}
LEFT_OUT = {
    "epsilon": (DR_GRPO, {"epsilon": 0.05}),
    "epsilon_high": (DR_GRPO, {"epsilon_high": 2.5}),
    "delta": (DR_GRPO, {"delta": 1.3}),
    "off_policy_mask_threshold": (DR_GRPO, {"off_policy_mask_threshold": 0.1}),
    "top_entropy_quantile": (DR_GRPO, {"top_entropy_quantile": 0.5}),
    "scale_rewards none": (DR_GRPO, {"scale_rewards": "none"}),
    "scale_rewards batch": (DR_GRPO, {"scale_rewards": "batch"}),
    "sapo": ({"loss_type": "sapo"}, {"sapo_temperature_pos": 2.0}),
    "vespo": ({"loss_type": "vespo"}, {"vespo_k_pos": 1.0}),
    "vllm clip_max": (VLLM, {"vllm_importance_sampling_clip_max": 1.2}),
    "vllm clip_min": (VLLM, {"vllm_importance_sampling_clip_min": 0.8}),
    "vllm mode": (VLLM, {"vllm_importance_sampling_mode": "token_mask"}),
    "level without correction": (PLAIN_K3, {"importance_sampling_level": "sequence"}),
}


@pytest.mark.parametrize("setting", LEFT_OUT)
def test_a_setting_that_is_left_out_moves_the_policy_and_leaves_the_kl(setting):
    common, changed = LEFT_OUT[setting]
    batch = every_pair()
    total, added = [], []
    for subject in (grpo(**common), grpo(**common, **changed)):
        _, (whole, *_) = evaluate(subject, batch)
        _, (without, *_) = evaluate(subject, batch.at_reference().fresh())
        total.append(whole)
        added.append(whole - without)
    assert float((total[0] - total[1]).norm()) > 0.01 * float(total[0].norm()), "the setting does not bite"
    assert float(added[0].norm()) > 0.01 * float(total[0].norm()), "there is no KL to leave"
    EXACT.check_vector(added[1], added[0])


def test_rloo_clips_rewards_before_the_kl():
    batch = every_pair()
    plain, clipped = rloo(normalize_advantages=False), rloo(normalize_advantages=False, reward_clip_range=(-0.5, 0.5))
    loss, clipped_loss = (float(evaluate(s, batch)[0]) for s in (plain, clipped))
    assert abs(loss - clipped_loss) > 0.01
    EXACT.check_vector(expected(clipped, SMALL), expected(plain, SMALL))


def test_the_environment_is_as_before_an_audit(monkeypatch):
    """What comes after in the same process may well ask the hub."""
    import os

    from huggingface_hub import constants

    from klgrad.frameworks.trl import subjects

    for name in ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    evaluate(subjects()[0], every_pair())
    assert not {"HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"} & set(os.environ)
    assert constants.HF_HUB_OFFLINE is False
