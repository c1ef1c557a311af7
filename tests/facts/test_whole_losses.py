"""Facts 22 and 23 for whole losses, and the policy gradients that they are compared with; every completion summed."""

import pytest
import torch
from tolerances import EXACT

from klgrad import policy_losses
from klgrad.audit.subject import as_subject
from klgrad.audit.whole import Updates, gradient, policy_gradients, whole_cases
from klgrad.enumeration import target_gradients

OFF_POLICY = whole_cases(on_policy=False)
cases = pytest.mark.parametrize("case", OFF_POLICY, ids=lambda case: case.name)


def differentiated(case, objective):
    """The gradient of minus an objective of π, from its definition, without the padding."""
    logits = case.problem.logits.clone().requires_grad_()
    (found,) = torch.autograd.grad(-objective(case.problem.with_logits(logits)), logits)
    return found.flatten()


def on_logits(case, found):
    """The part of a gradient on the logits; that on the padding must be zero."""
    at = case.problem.logits.numel()
    assert not found[at:].any()
    return found[:at]


def constant(name, case, advantage):
    """The gradient of a policy loss under one advantage for all, minus that without advantages."""
    subject = as_subject(policy_losses.get(name).loss)
    return on_logits(case, gradient(case, Updates(subject, case).effect(case.constant(advantage))).mean)


@cases
def test_the_three_policy_gradients_are_those_of_their_definitions(case):
    p, a = case.problem, case.different(5)
    batch = case.batch(a)
    found = policy_gradients(case, torch.where(batch.mask, batch.advantages, 0) / len(batch.mask))
    mu, mask = p.probability, p.space.mask
    wanted = {
        "policy-gradient": lambda q: (q.logp.sum(-1).exp() * a).sum(),
        "policy-gradient-sampler-prefixes": lambda q: (
            mu * a * torch.where(mask, (q.logp - p.behavior_logp).exp(), 0).sum(-1)
        ).sum(),
        "policy-gradient-uncorrected": lambda q: (mu * a * q.logp.sum(-1)).sum(),
    }
    for name, objective in wanted.items():
        EXACT.check_vector(on_logits(case, found[name]), differentiated(case, objective))


@cases
@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_fact_23_reinforce_drifts_by_the_gradient_of_the_kl_of_the_sampler(case, advantage):
    towards = target_gradients(case.problem)["forward-kl-sampler-sequence"]
    EXACT.check_vector(constant("reinforce", case, advantage), advantage * towards)
    assert towards.norm() > 1e-3  # so that the comparison is not one of zeros


@cases
@pytest.mark.parametrize("name", ["token-is", "sequence-is", "score-centering"])
def test_fact_23_a_ratio_or_a_centred_score_removes_the_drift(case, name):
    EXACT.check_vector(constant(name, case, 0.7), torch.zeros(case.problem.logits.numel(), dtype=torch.float64))


@pytest.mark.parametrize("name", ["token-tis", "sequence-tis", "icepop", "token-mis", "sequence-mis", "dppo"])
def test_fact_23_a_bounded_ratio_removes_the_drift_in_part(name):
    far = [case for case in OFF_POLICY if case.distance == "far"]
    left = [constant(name, case, 0.7).norm() / constant("reinforce", case, 0.7).norm() for case in far]
    assert max(left) > 0.01
    assert torch.stack(left).mean() < 0.7


@cases
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr-grpo", "rloo", "gspo", "cispo"])
def test_rewards_that_are_centred_in_groups_do_not_drift(case, name):
    nothing = torch.zeros(case.problem.logits.numel(), dtype=torch.float64)
    EXACT.check_vector(constant(name, case, 0.75), nothing)  # the mean of 0.75 is not rounded


@pytest.mark.parametrize("case", whole_cases(on_policy=True), ids=lambda case: case.name)
def test_a_mean_per_completion_prefers_short_completions_even_on_policy(case):
    """With one advantage for all, its update is the gradient of the mean of 1/length: not zero if lengths vary."""

    def loss(logp, mask, advantages):
        return (torch.where(mask, -advantages * logp, 0).sum(-1) / mask.sum(-1)).mean()

    found = on_logits(case, gradient(case, Updates(as_subject(loss), case).effect(case.constant(1.0))).mean)
    shortness = 1 / case.problem.space.mask.sum(-1).double()
    EXACT.check_vector(found, differentiated(case, lambda q: (q.logp.sum(-1).exp() * shortness).sum()))
    assert (found.norm() > 0.01) == case.varying
