"""The whole policy losses of TRL, verl, OpenRLHF and SkyRL; those of the last three against formulae written here."""

import pytest
import torch
from tolerances import EXACT, SINGLE

from klgrad.audit.policy import audit_whole
from klgrad.audit.policy_sentences import cells_of
from klgrad.audit.probes import from_problem
from klgrad.audit.subject import as_subject, evaluate
from klgrad.enumeration import autoregressive, every_group
from klgrad.frameworks import FRAMEWORKS, recorded
from klgrad.policy_losses import PolicyParts, Weight

NAMES = [n for n in ("trl", "verl", "openrlhf", "skyrl") if FRAMEWORKS[n].version is not None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NAMES, reason="none of them is installed"),
    pytest.mark.filterwarnings("ignore"),  # of the frameworks, when they are imported
]

FAR = autoregressive(2, 3, ends=True, seed=15, away_from_ref=1.0, off_policy=1.5)


def token_mean(per_token, mask):
    return torch.where(mask, per_token, 0).sum() / mask.sum()


def ppo(logp, old_logp, advantages, mask):
    ratio = (logp - old_logp).exp()
    return -token_mean(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages), mask)


def dual_clip(logp, old_logp, advantages, mask):
    ratio = (logp - old_logp).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -token_mean(torch.where(advantages < 0, torch.maximum(clipped, 3 * advantages), clipped), mask)


def score(weight, logp, advantages, mask):
    return -token_mean(weight.detach() * advantages * logp, mask)


def token_truncated(logp, behavior_logp, advantages, mask):
    return score((logp - behavior_logp).exp().clamp(max=2), logp, advantages, mask)


def sequence_truncated_at(bound):
    def loss(logp, behavior_logp, advantages, mask):
        ratio = torch.where(mask, logp - behavior_logp, 0).sum(-1, keepdim=True).exp()
        return score(ratio.clamp(max=bound), logp, advantages, mask)

    return loss


def token_band(logp, behavior_logp, advantages, mask):
    ratio = (logp - behavior_logp).exp()
    return score(torch.where((ratio >= 0.5) & (ratio <= 5), ratio, 0), logp, advantages, mask)


def token_clamped(logp, behavior_logp, advantages, mask):
    return score((logp - behavior_logp).exp().clamp(0.5, 5), logp, advantages, mask)


def rejected(logp, behavior_logp, advantages, mask):
    """Divided by all tokens, rejected ones too."""
    mean = torch.where(mask, logp - behavior_logp, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return score(((mean > -0.01005) & (mean < 0.00995)).expand_as(logp).to(logp.dtype), logp, advantages, mask)


def token_ratio(logp, old_logp, advantages, mask):
    return score((logp - old_logp).exp(), logp, advantages, mask)


def uncorrected(logp, advantages, mask):
    return score(torch.ones_like(logp), logp, advantages, mask)


READ = {
    # verl's default has the dual clip, which the other two frameworks have by an option.
    "verl loss_mode=vanilla": dual_clip,
    "verl loss_mode=gpg": uncorrected,
    "verl rollout_correction rollout_is=token": token_truncated,
    "verl rollout_correction rollout_is=sequence": sequence_truncated_at(2),
    "verl rollout_correction rollout_is=token rollout_is_threshold=0.5_5.0": token_band,
    "verl rollout_correction rollout_rs=seq_mean_k1 rollout_rs_threshold=0.99_1.01": rejected,
    "verl loss_mode=bypass_mode loss_type=ppo_clip": dual_clip,
    "verl loss_mode=bypass_mode loss_type=reinforce rollout_is=sequence": sequence_truncated_at(2),
    "openrlhf policy_loss_type=ppo": ppo,
    "openrlhf dual_clip=3.0": dual_clip,
    "openrlhf is_correction_level=token is_correction_mode=clip": token_clamped,
    "openrlhf is_correction_level=token is_correction_mode=mask": token_band,
    "skyrl policy_loss_type=regular": ppo,
    "skyrl policy_loss_type=dual_clip": dual_clip,
    "skyrl policy_loss_type=importance_sampling": token_ratio,
    "skyrl policy_loss_type=regular tis_ratio_type=token": token_truncated,
    "skyrl policy_loss_type=regular tis_ratio_type=sequence": sequence_truncated_at(5),
}


@pytest.fixture(scope="module")
def subjects():
    return {s.name: s for name in NAMES for s in FRAMEWORKS[name].policy_losses()}


def derivative(subject):
    members, _ = every_group(FAR, 2)
    advantage = torch.linspace(-1, 2, len(FAR.space), dtype=torch.float64)
    return evaluate(subject, from_problem(FAR, members, advantage))[1].logp


@pytest.mark.parametrize("name", READ)
def test_its_gradient_is_that_of_the_formula(name, subjects):
    if name not in subjects:
        pytest.skip("not installed")
    # SkyRL computes ratios in float32.
    (SINGLE if name.startswith("skyrl") else EXACT).check_vector(
        derivative(subjects[name]), derivative(as_subject(READ[name]))
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_has_its_own_name_and_is_recorded(name):
    names = [subject.name for subject in FRAMEWORKS[name].policy_losses()]
    assert names == [row[0] for row in recorded(name).policy_losses]
    assert len(set(names)) == len(names)


def test_what_the_defaults_do_on_stale_samples(subjects):
    for name in ("verl loss_mode=vanilla", "openrlhf policy_loss_type=ppo", "skyrl policy_loss_type=regular"):
        if name in subjects:
            found = audit_whole(subjects[name]).policy
            assert found.proved
            assert (found.parts.ratio, found.parts.positive) == ("token", Weight(high=1.2))
            assert found.parts.negative == Weight(low=0.8, high=3.0 if name.startswith("verl") else None)
            assert [d.towards_sampler > 0.2 for d in found.drift] == [True, True]


UNPROVED = {
    "verl loss_mode=dppo_tv": "probability",
    "verl loss_mode=dppo_kl": "probability",
    "verl loss_mode=geo_mean": "several ratios",
    "openrlhf is_correction_level=seq is_correction_mode=mask": "several ratios",
    "openrlhf is_correction_level=seq is_correction_gating=binary_kl "
    "is_correction_threshold=(0.0, 0.05)": "probability",
    "skyrl policy_loss_type=dppo": "probability",
}
"""Those that are no function of one ratio and the advantage."""


@pytest.mark.many
@pytest.mark.parametrize("name", NAMES)
def test_every_loss_is_proved_or_told_as_what_it_depends_on(name, subjects):
    rows = {row[0]: row for row in recorded(name).policy_losses}
    for each in (n for n in subjects if n.startswith(name)):
        result = audit_whole(subjects[each])
        assert result.policy.proved == (each not in UNPROVED), each
        assert result.policy.parts.depends_on == UNPROVED.get(each, ""), each
        assert rows[each] == list(cells_of(result)), each


VLLM = "trl grpo loss_type=dr_grpo scale_rewards=none use_vllm=True vllm_importance_sampling_correction=False"
OF_TRL = {
    "trl grpo loss_type=dapo": PolicyParts(
        "token", Weight(high=1.2), Weight(low=0.8), "group-mean", "group", "token-mean"
    ),
    VLLM: PolicyParts(baseline="group-mean", unit="fixed-length"),
}


@pytest.mark.many
@pytest.mark.parametrize("name", OF_TRL)
def test_the_default_of_trl_divides_by_the_deviation_and_an_uncorrected_sampler_has_no_ratio(name, subjects):
    if name not in subjects:
        pytest.skip("not installed")
    r = audit_whole(subjects[name])
    assert r.policy.parts == OF_TRL[name]
    assert r.kl_verdict == "nothing"
    if name != VLLM:
        assert r.policy.epsilon == pytest.approx(1e-4, rel=1e-3)  # rewards are in float32
