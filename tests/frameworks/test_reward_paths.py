"""The KL in the reward, from the log-probs at sampling to the policy loss, against formulae written independently."""

import importlib
from dataclasses import replace

import pytest
import torch
from oracle import mean_gradient, mean_gradient_over_groups
from tolerances import SINGLE

from klgrad.audit.batch import from_problem
from klgrad.audit.subject import evaluate, expected_gradient
from klgrad.enumeration import autoregressive, target_gradients
from klgrad.frameworks import FRAMEWORKS

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

SMALL = autoregressive(2, 3, ends=True, seed=8, away_from_ref=1.0)


def adapter(framework):
    if FRAMEWORKS[framework].installed is None:
        pytest.skip(f"{framework} is not installed")
    return importlib.import_module(f"klgrad.frameworks.{framework}")


def k1(rollout):
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
    ratio = (rollout.logp - rollout.behavior_logp).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    if dual:
        loss = torch.where(advantage < 0, torch.minimum(-advantage * 3.0, loss), loss)
    return loss * rollout.mask


def summed(per_token):
    return per_token.sum(-1).mean()


def averaged(per_token, rollout):
    return per_token.sum() / rollout.mask.sum()


def skyrl_rloo(rollout):
    return summed(clipped(rollout, leave_one_out(-k1(rollout).sum(-1))))


def skyrl_default(rollout):
    """k3 clamped at 10, less the group's mean, over its deviation."""
    away = rollout.ref_logp - rollout.behavior_logp
    reward = -((away.exp() - away - 1).clamp(max=10) * rollout.mask).sum(-1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    return averaged(clipped(rollout, advantage[:, None]), rollout)


def skyrl_maxrl(rollout):
    reward = -k1(rollout).sum(-1)
    return summed(clipped(rollout, ((reward - reward.mean()) / (reward.mean() + 1e-6))[:, None]))


def skyrl_gae(rollout):
    return summed(clipped(rollout, whitened(-to_go(k1(rollout)), rollout.mask, bessel=True)))


def skyrl_corrected(level, cap):
    """The policy's own KL, weighted by π/μ of each token or of the completion; the ratio to itself is 1."""

    def loss(rollout):
        here = rollout.logp.detach()
        advantage = leave_one_out(-((here - rollout.ref_logp) * rollout.mask).sum(-1))
        log_ratio = (here - rollout.behavior_logp) * rollout.mask
        ratio = (log_ratio.sum(-1, keepdim=True) if level == "sequence" else log_ratio).exp().clamp(max=cap)
        return summed(-ratio * advantage * rollout.logp * rollout.mask)

    return loss


def verl_gae(rollout):
    return summed(clipped(rollout, whitened(-to_go(k1(rollout)), rollout.mask, bessel=True), dual=True))


def openrlhf_gae(rollout):
    return averaged(clipped(rollout, whitened(-to_go(k1(rollout)), rollout.mask, bessel=False)), rollout)


def openrlhf_rloo(rollout):
    return averaged(clipped(rollout, -to_go(k1(rollout))), rollout)


def openrlhf_gae_without_std(rollout):
    returns = -to_go(k1(rollout))
    return averaged(clipped(rollout, returns - returns[rollout.mask.bool()].mean()), rollout)


INDEPENDENT = {
    ("skyrl", "k1", "rloo"): skyrl_rloo,
    ("skyrl", "k3", "grpo", "token_mean"): skyrl_default,
    ("skyrl", "k1", "maxrl"): skyrl_maxrl,
    ("skyrl", "k1", "gae critic=0"): skyrl_gae,
    ("skyrl", "k1", "reinforce++"): skyrl_gae,
    ("skyrl", "k1", "rloo", "tis=token"): skyrl_corrected("token", 2.0),
    ("skyrl", "k1", "rloo", "tis=sequence"): skyrl_corrected("sequence", 5.0),
    ("skyrl", "k1", "rloo", "tis=sequence uncapped"): skyrl_corrected("sequence", 1e9),
    ("verl", "kl", "gae critic=0"): verl_gae,
    ("verl", "kl", "reinforce_plus_plus"): verl_gae,
    ("openrlhf", "k1", "rloo"): openrlhf_rloo,
    ("openrlhf", "k1", "group_norm"): openrlhf_rloo,
    ("openrlhf", "k1", "gae critic=0"): openrlhf_gae,
    ("openrlhf", "k1", "gae critic=0 no_std_norm"): openrlhf_gae_without_std,
}


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("setting", INDEPENDENT, ids=" ".join)
def test_the_exact_gradient_is_that_of_the_formula_written_down(setting, on_policy):
    framework, *arguments = setting
    subject = replace(adapter(framework).in_reward(*arguments), stacks=False)
    problem = SMALL.on_policy() if on_policy else SMALL
    none = torch.zeros(len(problem.space)).double()
    found = expected_gradient(subject, problem, 2, none).mean[: problem.logits.numel()]
    independent = mean_gradient_over_groups(SMALL, 2, INDEPENDENT[setting], on_policy=on_policy)
    # Each of the three adds a constant to its deviation, or computes its ratio in float32.
    SINGLE.check_vector(found, independent)


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


def gae(framework, lam, critic):
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
    found = gradient_on(gae(framework, lam, lambda _: values[rows]), problem, rows)
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
