"""The installed frameworks' own code, audited; those that are not installed here are skipped by name."""

import importlib
from dataclasses import replace

import pytest
import torch
from framework_verdicts import ALL
from oracle import mean_gradient, mean_gradient_over_groups
from tolerances import EXACT, SINGLE
from typer.testing import CliRunner

from klgrad.audit import audit
from klgrad.audit.parts import Unit
from klgrad.audit.probes import from_problem
from klgrad.audit.procedure import fresh_name
from klgrad.audit.subject import evaluate, expected_gradient
from klgrad.audit.terminal import cells_of
from klgrad.cli import app
from klgrad.enumeration import autoregressive, target_gradients
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


SMALL = autoregressive(2, 3, ends=True, seed=24, away_from_ref=1.0, off_policy=1.0)
"""Its ratios pass every bound that TRL has: tokens have 0.46 to 3.98, completions 0.48 to 4.59."""
FAR = autoregressive(2, 3, ends=True, seed=15, away_from_ref=4.0, off_policy=1.5)
"""Passes the bounds of those frameworks whose formulae have them: 10 on a value of k3, 2 on a ratio."""


def ratio(rollout):
    return (rollout.logp - rollout.behavior_logp).exp()


def k3(rollout):
    away = rollout.ref_logp - rollout.logp
    return (away.exp() - away - 1) * rollout.mask


def clamped_k3(rollout):
    """k3 with its value clamped at 10, per token."""
    return k3(rollout).clamp(max=10)


def k1(rollout):
    """At sampling."""
    return (rollout.behavior_logp - rollout.ref_logp) * rollout.mask


def to_go(per_token):
    return per_token.flip(-1).cumsum(-1).flip(-1)


def leave_one_out(reward):
    return (reward - (reward.sum() - reward) / (len(reward) - 1))[:, None]


def whitened(values, mask, *, bessel):
    live = values[mask.bool()]
    return (values - live.mean()) / (live.var(correction=int(bessel)) + 1e-8).sqrt()


def clipped(rollout, advantage, *, dual=False):
    """PPO's objective as a loss per token; the second clip where the advantage is negative."""
    loss = torch.maximum(-advantage * ratio(rollout), -advantage * ratio(rollout).clamp(0.8, 1.2))
    if dual:
        loss = torch.where(advantage < 0, torch.minimum(-advantage * 3.0, loss), loss)
    return loss * rollout.mask


def over_tokens(rollout, terms):
    return (terms * rollout.mask).sum() / rollout.mask.sum()


def per_completion(rollout, terms):
    return ((terms * rollout.mask).sum(-1) / rollout.mask.sum(-1)).mean()


def summed(terms):
    return terms.sum(-1).mean()


def trl_default(rollout):
    """Ratio times k3, averaged over the batch's tokens: an independent reading of TRL's default."""
    return over_tokens(rollout, ratio(rollout) * k3(rollout))


def gspo(rollout):
    """k3 of each token times one ratio per completion, (B, 1): the geometric mean of its tokens' ratios."""
    log_ratio = (rollout.logp - rollout.behavior_logp) * rollout.mask
    return (log_ratio.sum(-1, keepdim=True) / rollout.mask.sum(-1, keepdim=True)).exp() * k3(rollout)


def at_constant_length(rollout, terms):
    return (terms * rollout.mask).sum() / rollout.mask.numel()


def ended(rollout):
    """(B, 1) whether a completion is not cut off."""
    return ~rollout.mask.bool().all(-1, keepdim=True)


def uncorrected_for_vllm(rollout):
    """The ratio of the policy to itself, just before the update, is 1 and has a gradient."""
    return at_constant_length(rollout, (rollout.logp - rollout.logp.detach()).exp() * k3(rollout))


def rloo(rollout, *, kept=True):
    """k1 of the sampler in the reward, leave-one-out, under the clipped sequence ratio, of the completions kept."""
    advantage = leave_one_out(-(k1(rollout) * kept).sum(-1))[:, 0]
    of_completion = ((rollout.logp - rollout.behavior_logp) * rollout.mask * kept).sum(-1).exp()
    return -torch.minimum(of_completion * advantage, of_completion.clamp(0.8, 1.2) * advantage).mean()


def rloo_uncorrected_for_vllm(rollout):
    log_ratio = ((rollout.logp - rollout.ref_logp) * rollout.mask).sum(-1).detach()
    return -(leave_one_out(-log_ratio)[:, 0] * (rollout.logp * rollout.mask).sum(-1)).mean()


def token_rloo(rollout, *, dual=False):
    """As `rloo`, but with a clipped ratio per token, and PPO's second clip where the advantage is negative."""
    return clipped(rollout, leave_one_out(-k1(rollout).sum(-1)), dual=dual)


def openrlhf_unbiased(rollout):
    """The truncated, detached token ratio times k2, averaged over the batch's tokens."""
    weight = ratio(rollout).clamp(max=10).detach()
    return over_tokens(rollout, weight * (rollout.logp - rollout.ref_logp) ** 2 / 2)


def swift_truncated(rollout):
    """The clamped k3 times the token's ratio to the sampler, truncated at 2, without gradient."""
    return (ratio(rollout).clamp(max=2).detach() * clamped_k3(rollout)).sum() / rollout.mask.numel()


def ratio_times_k3_clamped(rollout):
    """The ratio times k3, then clamped, averaged over the batch's tokens."""
    return over_tokens(rollout, (ratio(rollout) * k3(rollout)).clamp(max=10))


def trinity_corrected(rollout):
    """k3 times the ratio, whose gradient stops where it is clamped at 2."""
    return summed(ratio(rollout).clamp(0, 2) * k3(rollout))


def areal_default(rollout):
    """k1 at sampling, clamped at 10 and summed to go, under PPO's clip."""
    return over_tokens(rollout, clipped(rollout, -to_go(k1(rollout).clamp(-10, 10))))


def areal_distilled(rollout):
    """The ratio times the detached log-ratio to the teacher."""
    return over_tokens(rollout, ratio(rollout) * (rollout.logp - rollout.ref_logp).detach())


def swapped_k3(rollout):
    """k3 of the log-ratio in the other direction, with its value clamped at 10."""
    away = rollout.logp - rollout.ref_logp
    return over_tokens(rollout, (away.exp() - away - 1).clamp(max=10))


def art_default(rollout):
    """The log-ratio less its mean over the batch, times the ratio up to 5, on the score."""
    away = ((rollout.logp - rollout.ref_logp) * rollout.mask).detach()
    weight = ratio(rollout).detach().clamp(max=5)
    return over_tokens(rollout, weight * (away - away.sum() / rollout.mask.sum()) * rollout.logp)


def skyrl_default_reward(rollout):
    """k3 clamped at 10, less the group's mean, over its deviation."""
    away = rollout.ref_logp - rollout.behavior_logp
    reward = -((away.exp() - away - 1).clamp(max=10) * rollout.mask).sum(-1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    return over_tokens(rollout, clipped(rollout, advantage[:, None]))


def skyrl_maxrl(rollout):
    reward = -k1(rollout).sum(-1)
    return summed(clipped(rollout, ((reward - reward.mean()) / (reward.mean() + 1e-6))[:, None]))


def gae(rollout, *, dual=False):
    return clipped(rollout, whitened(-to_go(k1(rollout)), rollout.mask, bessel=True), dual=dual)


def skyrl_corrected(level, cap):
    """The policy's own KL, weighted by π/μ of each token or of the completion; the ratio to itself is 1."""

    def loss(rollout):
        here = rollout.logp.detach()
        advantage = leave_one_out(-((here - rollout.ref_logp) * rollout.mask).sum(-1))
        log_ratio = (here - rollout.behavior_logp) * rollout.mask
        weight = (log_ratio.sum(-1, keepdim=True) if level == "sequence" else log_ratio).exp().clamp(max=cap)
        return summed(-weight * advantage * rollout.logp * rollout.mask)

    return loss


def openrlhf_gae(rollout):
    return over_tokens(rollout, clipped(rollout, whitened(-to_go(k1(rollout)), rollout.mask, bessel=False)))


def openrlhf_rloo(rollout):
    return over_tokens(rollout, clipped(rollout, -to_go(k1(rollout))))


def openrlhf_gae_without_std(rollout):
    returns = -to_go(k1(rollout))
    return over_tokens(rollout, clipped(rollout, returns - returns[rollout.mask.bool()].mean()))


BOUNDED = ("ms-swift", "unsloth", "trinity", "areal", "rlinf", "cosmos", "art")
"""Frameworks with bounds that `FAR` passes."""
IN_FLOAT32 = (
    *("openrlhf", "areal", "rlinf", "skyrl use_kl_in_reward", "verl use_kl_in_reward kl_penalty=kl adv_estimator=gae"),
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=reinforce_plus_plus",
)
"""They compute in float32, whatever they are given, or add a constant to a deviation."""
SUMMED = "loss_agg_mode=seq-mean-token-sum"
DR_GRPO, BY_COMPLETION = "trl grpo loss_type=dr_grpo", "importance_sampling_level=sequence use_bias_correction_kl=True"
INDEPENDENT = {
    "areal kl_ctl kl_estimator=k1": areal_default,
    "areal teacher.rl_loss_weight=1": lambda r: over_tokens(r, r.logp - r.ref_logp),
    "areal teacher.rl_loss_weight=0": areal_distilled,
    "rlinf actor=fsdp kl_penalty_type=low_var_kl loss_agg_func=token-mean": swapped_k3,
    "rlinf actor=megatron kl_penalty_type=low_var_kl loss_agg_func=seq-mean-token-sum": lambda r: summed(clamped_k3(r)),
    "cosmos-rl kl_beta loss_type=token-mean unbiased_kl_estimate=False": lambda r: over_tokens(r, clamped_k3(r)),
    "cosmos-rl kl_beta loss_type=token-mean unbiased_kl_estimate=True": ratio_times_k3_clamped,
    "torchrl GRPOLoss kl_to_ref_coeff": lambda r: k3(r).mean(),
    "torchrl DistillationLoss kl_direction=reverse normalize_by_seq_length=True": lambda r: per_completion(r, k3(r)),
    "axolotl async loss_type=dapo use_bias_correction_kl=False": lambda r: over_tokens(r, k3(r)),
    "axolotl async loss_type=dapo use_bias_correction_kl=True": trl_default,
    "art kl_penalty_coef kl_penalty_source=current_learner ppo=False reduction=mean": art_default,
    "twinkle GRPOLoss beta": lambda r: per_completion(r, k3(r)),
    "ms-swift loss_type=grpo": lambda r: per_completion(r, clamped_k3(r)),
    "ms-swift loss_type=dapo": lambda r: over_tokens(r, clamped_k3(r)),
    "ms-swift loss_type=dr_grpo rollout_importance_sampling_mode=token_truncate": swift_truncated,
    "ms-swift kl_in_reward advantage_estimator=rloo loss_type=dr_grpo": lambda r: token_rloo(r).sum() / r.mask.numel(),
    "unsloth grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True": ratio_times_k3_clamped,
    f"trinity kl_loss_fn=low_var_kl {SUMMED}": lambda r: summed(clamped_k3(r)),
    f"trinity kl_loss_fn=corrected_k3 {SUMMED}": trinity_corrected,
    "verl use_kl_loss kl_loss_type=low_var_kl loss_agg_mode=token-mean": lambda r: over_tokens(r, clamped_k3(r)),
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=rloo": lambda r: summed(token_rloo(r, dual=True)),
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=gae critic=0": lambda r: summed(gae(r, dual=True)),
    "verl use_kl_in_reward kl_penalty=kl adv_estimator=reinforce_plus_plus": lambda r: summed(gae(r, dual=True)),
    "skyrl use_kl_loss kl_estimator_type=k3": lambda r: per_completion(r, clamped_k3(r)),
    "skyrl use_kl_in_reward estimator=k1 advantage=rloo": lambda r: summed(token_rloo(r)),
    "skyrl use_kl_in_reward estimator=k3 advantage=grpo token_mean": skyrl_default_reward,
    "skyrl use_kl_in_reward estimator=k1 advantage=maxrl": skyrl_maxrl,
    "skyrl use_kl_in_reward estimator=k1 advantage=gae critic=0": lambda r: summed(gae(r)),
    "skyrl use_kl_in_reward estimator=k1 advantage=reinforce++": lambda r: summed(gae(r)),
    "skyrl use_kl_in_reward estimator=k1 advantage=rloo tis=token": skyrl_corrected("token", 2.0),
    "skyrl use_kl_in_reward estimator=k1 advantage=rloo tis=sequence": skyrl_corrected("sequence", 5.0),
    "skyrl use_kl_in_reward estimator=k1 advantage=rloo tis=sequence uncapped": skyrl_corrected("sequence", 1e9),
    **{
        f"openrlhf algo.kl.use_loss estimator={k} unbiased_gradient=True": openrlhf_unbiased for k in ("k1", "k2", "k3")
    },
    "openrlhf algo.kl in reward estimator=k1 advantage=rloo": openrlhf_rloo,
    "openrlhf algo.kl in reward estimator=k1 advantage=group_norm": openrlhf_rloo,
    "openrlhf algo.kl in reward estimator=k1 advantage=gae critic=0": openrlhf_gae,
    "openrlhf algo.kl in reward estimator=k1 advantage=gae critic=0 no_std_norm": openrlhf_gae_without_std,
    "trl grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True": trl_default,
    "liger grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True": trl_default,
    **{f"trl grpo loss_type={kind}": trl_default for kind in ("bnpo", "cispo", "vespo")},
    "trl grpo loss_type=sapo": lambda r: per_completion(r, ratio(r) * k3(r)),
    f"trl grpo loss_type=grpo {BY_COMPLETION}": lambda r: per_completion(r, gspo(r)),
    f"trl grpo loss_type=dr_grpo {BY_COMPLETION}": lambda r: at_constant_length(r, gspo(r)),
    f"{DR_GRPO} mask_truncated_completions=True": lambda r: at_constant_length(r, ratio(r) * k3(r) * ended(r)),
    f"{DR_GRPO} use_vllm=True": uncorrected_for_vllm,
    **{
        f"{DR_GRPO} use_vllm=True vllm_importance_sampling_{setting}": uncorrected_for_vllm
        for setting in ("mode=sequence_truncate", "mode=token_mask", "mode=token_truncate", "correction=False")
    },
    "trl rloo normalize_advantages=False": rloo,
    "trl rloo normalize_advantages=False mask_truncated_completions=True": lambda r: rloo(r, kept=ended(r)),
    "trl rloo normalize_advantages=False use_vllm=True": rloo_uncorrected_for_vllm,
}


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("setting", INDEPENDENT)
def test_the_exact_gradient_is_that_of_the_formula_written_down(setting, on_policy, subjects):
    if setting not in subjects:
        pytest.skip("not installed")
    full = FAR if setting.startswith(BOUNDED) else SMALL
    problem = full.on_policy() if on_policy else full
    none = torch.zeros(len(problem.space)).double()
    found = expected_gradient(subjects[setting], problem, 2, none).mean[: problem.logits.numel()]
    independent = mean_gradient_over_groups(full, 2, INDEPENDENT[setting], on_policy=on_policy)
    (SINGLE if setting.startswith(IN_FLOAT32) else EXACT).check_vector(found, independent)


def test_what_is_not_installed_or_not_tested_is_a_line_with_the_remedy():
    absent = replace(FRAMEWORKS["trl"], name="nosuch", distribution="no-such-trainer", tested="1.2.3")
    assert absent.remark == "nosuch is not installed: pip install 'no-such-trainer==1.2.3'"
    with pytest.raises(NotAuditableError, match=r"pip install .no-such-trainer==1\.2\.3."):
        absent.subjects()
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


# The KL in the reward in a large batch, from the log-probs at sampling to the policy loss.


def adapter(framework):
    if FRAMEWORKS[framework].installed is None:
        pytest.skip(f"{framework} is not installed")
    return importlib.import_module(f"klgrad.frameworks.{framework}")


def proportional(ends):
    """A problem where π is uniform, and a batch that holds every completion exactly as often as it is likely.

    Its means are expectations: what a loss does to it, it does to a large batch.
    """
    problem = autoregressive(2, 3, ends=ends, seed=5, away_from_ref=1.0)
    problem = replace(problem, logits=torch.zeros_like(problem.logits)).on_policy()
    rows = torch.arange(len(problem.space)).repeat_interleave((problem.probability * 8).round().long())
    return problem, rows


def gradient_on(subject, problem, rows):
    batch = from_problem(problem, rows[None], torch.zeros(len(problem.space)).double())
    on_logp = evaluate(subject, batch)[1].logp
    return torch.einsum("bt,btp->p", on_logp, problem.scores[rows])


def exact_values(problem):
    """(N, T) what is to be had from each prefix on: the KL still to come, with its sign turned."""
    future = -to_go((problem.logp - problem.ref_logp) * problem.space.mask)
    weight = problem.probability[:, None].expand_as(future)
    live, total = problem.space.mask, torch.zeros(problem.space.prefixes).double()
    prefix = problem.space.prefix[live]
    visited = total.index_add(0, prefix, weight[live])
    return problem.at_tokens(total.index_add(0, prefix, (weight * future)[live]) / visited)


def with_critic(framework, lam, critic):
    module = adapter(framework)
    kind, name = ("kl", "lam") if framework == "verl" else ("k1", "lambd")
    return module.in_reward(kind, "gae critic=0", **{name: lam}, critic=critic)


def advantages(problem, lam, values):
    """GAE at γ = 1 by its definition: TD errors of the rewards -l, discounted by λ."""
    reward = -(problem.logp - problem.ref_logp) * problem.space.mask
    after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1) * problem.space.mask
    found, error = torch.zeros_like(reward), reward + after - values
    for t in reversed(range(reward.shape[1])):
        found[:, t] = error[:, t] + (lam * found[:, t + 1] if t + 1 < reward.shape[1] else 0)
    return found * problem.space.mask


def descended(lam, critic):
    """What GAE's advantages are the gradient of: with nothing known of the future, λ decides how much of it counts."""
    return (
        {1.0: "reverse-kl-sequence", 0.0: "reverse-kl-token"}.get(lam)
        if critic == "untrained"
        else "reverse-kl-sequence"
    )


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("critic", ["untrained", "exact"])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("framework", ["verl", "openrlhf", "skyrl"])
def test_in_a_large_batch_whitening_is_one_factor(framework, lam, critic, ends):
    problem, rows = proportional(ends)
    values = exact_values(problem) if critic == "exact" else torch.zeros_like(problem.logp)
    found = gradient_on(with_critic(framework, lam, lambda _: values[rows]), problem, rows)
    by_definition, live = advantages(problem, lam, values), problem.space.mask[rows]
    factor = float(by_definition[rows][live].std(correction=0 if framework == "openrlhf" else 1))
    if framework == "openrlhf":  # averages over the batch's tokens
        factor *= float(live.sum() / len(rows))
    SINGLE.check_vector(found * factor, mean_gradient(problem, -by_definition))
    targets = target_gradients(problem)
    if name := descended(lam, critic):
        SINGLE.check_vector(found * factor, targets[name])
    else:
        apart = [float((found * factor - target).norm() / target.norm()) for target in targets.values()]
        assert min(apart) > 0.01


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("framework", ["verl", "openrlhf", "skyrl"])
def test_a_score_reaches_the_policy_loss_beside_the_kl(framework, ends):
    """With the reference on the policy there is no KL, and every token has its completion's score less the others'."""
    problem, rows = proportional(ends)
    score = torch.randn(len(problem.space), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    batch = from_problem(problem, rows[None], score).at_reference().fresh()
    subject = adapter(framework).in_reward("kl" if framework == "verl" else "k1", "rloo")
    on_logp = evaluate(subject, batch)[1].logp
    shared = float(batch.mask.sum()) if framework == "openrlhf" else len(rows)
    SINGLE.check(on_logp, -leave_one_out(score[rows]) * batch.mask / shared)
