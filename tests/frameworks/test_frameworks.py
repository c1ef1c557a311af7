"""The installed frameworks' own code, audited; those that are not installed here are skipped by name."""

from dataclasses import replace

import pytest
import torch
from framework_verdicts import ALL
from oracle import mean_gradient_over_groups
from some import first
from tolerances import EXACT, SINGLE
from typer.testing import CliRunner

from klgrad.audit import audit
from klgrad.audit.parts import Unit
from klgrad.audit.procedure import fresh_name
from klgrad.audit.subject import Subject, expected_gradient
from klgrad.audit.terminal import cells_of
from klgrad.cli import app
from klgrad.enumeration import autoregressive
from klgrad.errors import NotAuditableError
from klgrad.frameworks import DEFAULTS, FRAMEWORKS, recorded

# The frameworks and what they import warn of their own affairs.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

SLOW = (
    "trl rloo normalize_advantages=True",
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=reinforce_plus_plus",
    "verl use_kl_in_reward kl_penalty=low_var_kl adv_estimator=reinforce_plus_plus",
    "verl use_kl_in_reward kl_penalty=low_var_kl adv_estimator=gae",
    "skyrl use_kl_in_reward estimator=k1 advantage=reinforce++",
    "openrlhf algo.kl in reward estimator=k1 advantage=group_norm",
    "openrlhf algo.kl.use_loss estimator=k1 unbiased_gradient=True",
    "openrlhf algo.kl.use_loss estimator=k2 unbiased_gradient=True",
)
"""Settings that must be called group by group, at seconds each, and say nothing that another does not.

Of verl, SkyRL and OpenRLHF, all but `low_var_kl` are held to the same formula as that other, by test.
"""

FIRST = {DEFAULTS[name].subject for name in ("trl", "verl", "liger", "nemo-rl", "slime", "open-instruct")} | {
    "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=False",
    "trl grpo loss_type=grpo importance_sampling_level=token use_bias_correction_kl=True",
    "trl rloo normalize_advantages=False",
}
"""Settings that `make test` audits; the others are marked `many`."""


def settings():
    for name, framework in FRAMEWORKS.items():
        if framework.version is None:
            yield pytest.param(name, None, marks=pytest.mark.skip(reason=f"{name} is not installed"))
            continue
        for setting in ALL[name]:
            if not setting.startswith(SLOW):
                yield pytest.param(name, setting, id=setting, marks=() if setting in FIRST else pytest.mark.many)


@pytest.fixture(scope="module")
def subjects():
    return {s.name: s for f in FRAMEWORKS.values() if f.version for s in f.subjects()}


@pytest.mark.parametrize(("name", "setting"), list(settings()))
def test_verdict(name, setting, subjects):
    result = audit(subjects[setting])
    parts = result.anatomy
    at_equal_lengths = fresh_name(replace(parts, unit=Unit("sum")))  # where every mean is a sum up to its scale
    assert (result.verdict, result.verdict_off_policy, at_equal_lengths) == ALL[name][setting], str(result.advice)
    assert list(cells_of(result)) in recorded(name).rows
    assert parts.deterministic
    assert not parts.leaks


def test_every_setting_of_an_installed_framework_is_expected(subjects):
    expected = {s for name, claims in ALL.items() if FRAMEWORKS[name].version for s in claims}
    assert set(subjects) == expected


SMALL = autoregressive(2, 3, ends=True, seed=8, away_from_ref=1.0)
FAR = autoregressive(2, 3, ends=True, seed=15, away_from_ref=4.0, off_policy=1.5)
"""Passes the bounds of those frameworks whose formulae have them: 10 on a value of k3, 2 on a ratio."""


def trl_default(rollout):
    """Ratio times k3, averaged over the batch's tokens: an independent reading of TRL's default."""
    away = rollout.ref_logp - rollout.logp
    per_token = (rollout.logp - rollout.behavior_logp).exp() * (away.exp() - away - 1)
    return (per_token * rollout.mask).sum() / rollout.mask.sum()


def rloo(rollout):
    """k1 of the sampler in the reward, leave-one-out, under the clipped sequence ratio."""
    reward = -((rollout.behavior_logp - rollout.ref_logp) * rollout.mask).sum(-1)
    advantage = reward - (reward.sum() - reward) / (len(reward) - 1)
    ratio = ((rollout.logp - rollout.behavior_logp) * rollout.mask).sum(-1).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def clamped_k3(rollout):
    """k3 with its value clamped at 10, per token."""
    away = (rollout.ref_logp - rollout.logp).clamp(-20, 20)
    return (away.exp() - away - 1).clamp(-10, 10) * rollout.mask


def verl_default(rollout):
    return clamped_k3(rollout).sum() / rollout.mask.sum()


def skyrl_default(rollout):
    return (clamped_k3(rollout).sum(-1) / rollout.mask.sum(-1)).mean()


def verl_rloo(rollout):
    """As `rloo`, but with a clipped ratio per token, and PPO's second clip where the advantage is negative."""
    reward = -((rollout.behavior_logp - rollout.ref_logp) * rollout.mask).sum(-1)
    advantage = (reward - (reward.sum() - reward) / (len(reward) - 1))[:, None]
    ratio = (rollout.logp - rollout.behavior_logp).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    loss = torch.where(advantage < 0, torch.minimum(-advantage * 3.0, loss), loss)
    return (loss * rollout.mask).sum(-1).mean()


def openrlhf_unbiased(rollout):
    """The truncated, detached token ratio times k2, averaged over the batch's tokens."""
    weight = (rollout.logp - rollout.behavior_logp).exp().clamp(max=10).detach()
    return (weight * (rollout.logp - rollout.ref_logp) ** 2 / 2 * rollout.mask).sum() / rollout.mask.sum()


def swift_reward(rollout):
    """The sampler's log-ratio of a completion as its reward, leave-one-out, clipped per token."""
    reward = -((rollout.behavior_logp - rollout.ref_logp) * rollout.mask).sum(-1)
    advantage = (reward - (reward.sum() - reward) / (len(reward) - 1))[:, None]
    ratio = (rollout.logp - rollout.behavior_logp).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return (loss * rollout.mask).sum() / rollout.mask.numel()


def swift_truncated(rollout):
    """The clamped k3 times the token's ratio to the sampler, truncated at 2, without gradient."""
    weight = (rollout.logp - rollout.behavior_logp).exp().clamp(max=2).detach()
    return (weight * clamped_k3(rollout)).sum() / rollout.mask.numel()


def unsloth_default(rollout):
    """The ratio times k3, then clamped, averaged over the batch's tokens."""
    away = (rollout.ref_logp - rollout.logp).clamp(-20, 20)
    ratio = (rollout.logp - rollout.behavior_logp).exp()
    return ((ratio * (away.exp() - away - 1)).clamp(max=10) * rollout.mask).sum() / rollout.mask.sum()


def trinity_corrected(rollout):
    """k3 times the ratio, whose gradient stops where it is clamped at 2."""
    away = rollout.ref_logp - rollout.logp
    ratio = (rollout.logp - rollout.behavior_logp).exp().clamp(0, 2)
    return (ratio * (away.exp() - away - 1) * rollout.mask).sum(-1).mean()


def ppo(rollout, cost):
    """PPO's terms for a cost per token."""
    ratio = (rollout.logp - rollout.behavior_logp).exp()
    return torch.maximum(cost * ratio, cost * ratio.clamp(0.8, 1.2)) * rollout.mask


def over_tokens(rollout, terms):
    return (terms * rollout.mask).sum() / rollout.mask.sum()


def areal_default(rollout):
    """k1 at sampling, clamped at 10 and summed to go, under PPO's clip."""
    kl = (rollout.behavior_logp - rollout.ref_logp).clamp(-10, 10) * rollout.mask
    return over_tokens(rollout, ppo(rollout, kl.flip(-1).cumsum(-1).flip(-1)))


def areal_distilled(rollout):
    """The ratio times the detached log-ratio to the teacher."""
    away = (rollout.logp - rollout.ref_logp).detach()
    return over_tokens(rollout, (rollout.logp - rollout.behavior_logp).exp() * away)


def swapped_k3(rollout):
    """k3 of the log-ratio in the other direction, with its value clamped at 10."""
    away = rollout.logp - rollout.ref_logp
    return over_tokens(rollout, (away.exp() - away - 1).clamp(max=10))


def k3(rollout):
    away = rollout.ref_logp - rollout.logp
    return (away.exp() - away - 1) * rollout.mask


def cosmos_unbiased(rollout):
    """The ratio times k3, then clamped at 10."""
    ratio = (rollout.logp - rollout.behavior_logp).exp()
    return over_tokens(rollout, (ratio * k3(rollout)).clamp(max=10))


def art_default(rollout):
    """The log-ratio less its mean over the batch, times the ratio up to 5, on the score."""
    away = ((rollout.logp - rollout.ref_logp) * rollout.mask).detach()
    weight = (rollout.logp - rollout.behavior_logp).exp().detach().clamp(max=5)
    return over_tokens(rollout, weight * (away - away.sum() / rollout.mask.sum()) * rollout.logp)


BOUNDED = ("ms-swift", "unsloth", "trinity", "areal", "rlinf", "cosmos", "art")
"""Frameworks with bounds that `FAR` passes."""
IN_FLOAT32 = ("openrlhf", "areal", "rlinf")
"""They compute in float32, whatever they are given."""
INDEPENDENT = {
    "areal kl_ctl kl_estimator=k1": areal_default,
    "areal teacher.rl_loss_weight=1": lambda r: over_tokens(r, r.logp - r.ref_logp),
    "areal teacher.rl_loss_weight=0": areal_distilled,
    "rlinf actor=fsdp kl_penalty_type=low_var_kl loss_agg_func=token-mean": swapped_k3,
    "rlinf actor=megatron kl_penalty_type=low_var_kl loss_agg_func=seq-mean-token-sum": lambda r: (
        clamped_k3(r).sum(-1).mean()
    ),
    "cosmos-rl kl_beta loss_type=token-mean unbiased_kl_estimate=False": lambda r: over_tokens(r, clamped_k3(r)),
    "cosmos-rl kl_beta loss_type=token-mean unbiased_kl_estimate=True": cosmos_unbiased,
    "torchrl GRPOLoss kl_to_ref_coeff": lambda r: k3(r).mean(),
    "torchrl DistillationLoss kl_direction=reverse normalize_by_seq_length=True": lambda r: (
        k3(r).sum(-1) / r.mask.sum(-1)
    ).mean(),
    "axolotl async loss_type=dapo use_bias_correction_kl=False": lambda r: over_tokens(r, k3(r)),
    "axolotl async loss_type=dapo use_bias_correction_kl=True": trl_default,
    "art kl_penalty_coef kl_penalty_source=current_learner ppo=False reduction=mean": art_default,
    "twinkle GRPOLoss beta": lambda r: (k3(r).sum(-1) / r.mask.sum(-1)).mean(),
    "ms-swift loss_type=grpo": skyrl_default,
    "ms-swift loss_type=dapo": verl_default,
    "ms-swift loss_type=dr_grpo rollout_importance_sampling_mode=token_truncate": swift_truncated,
    "ms-swift kl_in_reward advantage_estimator=rloo loss_type=dr_grpo": swift_reward,
    "unsloth grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True": unsloth_default,
    "trinity kl_loss_fn=low_var_kl loss_agg_mode=seq-mean-token-sum": lambda r: clamped_k3(r).sum(-1).mean(),
    "trinity kl_loss_fn=corrected_k3 loss_agg_mode=seq-mean-token-sum": trinity_corrected,
    "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean": verl_default,
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=rloo": verl_rloo,
    "skyrl use_kl_loss kl_estimator_type=k3": skyrl_default,
    **{
        f"openrlhf algo.kl.use_loss estimator={k} unbiased_gradient=True": openrlhf_unbiased for k in ("k1", "k2", "k3")
    },
    "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True": trl_default,
    "liger grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True": trl_default,
    "trl rloo normalize_advantages=False": rloo,
}


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("setting", INDEPENDENT)
def test_the_exact_gradient_is_that_of_the_formula_written_down(setting, on_policy, subjects):
    if setting not in subjects:
        pytest.skip("not installed")
    full = FAR if setting.startswith(BOUNDED) else SMALL
    problem = full.on_policy() if on_policy else full
    none = torch.zeros(len(problem.space)).double()
    single = Subject(setting, "framework", subjects[setting].loss, stacks=False)
    found = expected_gradient(single, problem, 2, none).mean[: problem.logits.numel()]
    independent = mean_gradient_over_groups(full, 2, INDEPENDENT[setting], on_policy=on_policy)
    (SINGLE if setting.startswith(IN_FLOAT32) else EXACT).check_vector(found, independent)


@pytest.mark.parametrize("setting", first([s for claims in ALL.values() for s in claims], FIRST & set(ALL["trl"])))
def test_stacked_groups_give_what_single_groups_give(setting, subjects):
    subject = subjects.get(setting)
    if subject is None or not subject.stacks:
        pytest.skip("not installed, or called group by group anyway")
    none = torch.zeros(len(SMALL.space)).double()
    for size in (2, 3):
        stacked = expected_gradient(subject, SMALL, size, none)
        single = expected_gradient(Subject(setting, "framework", subject.loss, stacks=False), SMALL, size, none)
        assert float((stacked.mean - single.mean).norm()) <= 1e-6 * single.typical


def test_what_is_not_installed_is_a_line_with_the_remedy():
    absent = replace(FRAMEWORKS["trl"], name="nosuch", distribution="no-such-trainer", tested="1.2.3")
    assert absent.remark == "nosuch is not installed: pip install 'no-such-trainer==1.2.3'"
    with pytest.raises(NotAuditableError, match=r"pip install .no-such-trainer==1\.2\.3."):
        absent.subjects()


def test_an_untested_version_is_audited_and_says_so():
    other = replace(FRAMEWORKS["trl"], name="torch", distribution="torch", tested="0.0.1")
    assert other.remark.startswith("torch 2.")
    assert other.remark.endswith("is not the tested version (0.0.1); it is audited anyway")


@pytest.mark.many
@pytest.mark.skipif(FRAMEWORKS["liger"].installed is None, reason="liger is not installed")
def test_the_command_audits_a_framework_by_name(tmp_path):
    result = CliRunner().invoke(app, ["audit", "liger", "--markdown", str(tmp_path / "liger.md")])
    assert result.exit_code == 0, result.output
    assert "use_bias_correction_kl=True" in result.output
    assert len((tmp_path / "liger.md").read_text().splitlines()) == 2 + len(ALL["liger"])
