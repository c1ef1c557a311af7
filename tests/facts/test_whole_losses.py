"""Facts 22 and 23 for whole losses, and what the ratios make of the policy gradient; every completion summed."""

import pytest
import torch
from oracle import differentiated
from tolerances import EXACT

from klgrad import policy_losses
from klgrad.audit.probes import from_problem
from klgrad.audit.procedure import proof_cases
from klgrad.audit.subject import as_subject, evaluate, sum_over_rows
from klgrad.enumeration import target_gradients

OFF_POLICY = proof_cases(False)
cases = pytest.mark.parametrize("case", OFF_POLICY, ids=lambda case: case.name)


def update(loss, case, advantages):
    """The gradient of a loss in the limit of large batches, with one advantage per completion, without the padding."""
    _, parts = evaluate(as_subject(loss), from_problem(case.problem, case.members, advantages))
    found = sum_over_rows(case.problem, case.members, parts).mean
    at = case.problem.logits.numel()
    assert not found[at:].any()
    return found[:at]


def constant(name, case, advantage):
    return update(
        policy_losses.get(name).loss, case, torch.full((len(case.problem.space),), advantage, dtype=torch.float64)
    )


def different(case):
    return torch.linspace(-1.3, 1.7, len(case.problem.space), dtype=torch.float64).roll(1)


OBJECTIVES = {
    "sequence-is": lambda p, a: lambda q: (q.logp.sum(-1).exp() * a).sum(),
    "token-is": lambda p, a: (
        lambda q: (p.probability * a * torch.where(p.space.mask, (q.logp - p.behavior_logp).exp(), 0).sum(-1)).sum()
    ),
    "reinforce": lambda p, a: lambda q: (p.probability * a * q.logp.sum(-1)).sum(),
}


@cases
@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_a_ratio_makes_of_the_policy_gradient(case, name):
    found, a = update(policy_losses.get(name).loss, case, different(case)), different(case)
    EXACT.check_vector(found, -differentiated(case.problem, OBJECTIVES[name](case.problem, a)))


@cases
@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_fact_23_reinforce_drifts_by_the_gradient_of_the_kl_of_the_sampler(case, advantage):
    towards = target_gradients(case.problem)["forward-kl-sampler-sequence"]
    EXACT.check_vector(constant("reinforce", case, advantage), advantage * towards)
    assert towards.norm() > 1e-3  # so that the comparison is not one of zeros


@cases
@pytest.mark.parametrize("name", ["token-is", "sequence-is", "score-centering"])
def test_fact_23_a_ratio_or_a_centred_score_removes_the_drift(case, name):
    found = constant(name, case, 0.7)
    EXACT.check_vector(found, 0 * found)


@pytest.mark.parametrize("name", ["token-tis", "sequence-tis", "icepop", "token-mis", "sequence-mis", "dppo"])
def test_fact_23_a_bounded_ratio_removes_the_drift_in_part(name):
    far = [case for case in OFF_POLICY if case.distance == "far"]
    left = [constant(name, case, 0.7).norm() / constant("reinforce", case, 0.7).norm() for case in far]
    assert max(left) > 0.01
    assert torch.stack(left).mean() < 0.7


@cases
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr-grpo", "rloo", "gspo", "cispo"])
def test_rewards_that_are_centred_in_groups_do_not_drift(case, name):
    found = constant(name, case, 0.75)  # whose mean is not rounded
    EXACT.check_vector(found, 0 * found)


@pytest.mark.parametrize("case", proof_cases(True), ids=lambda case: case.name)
def test_a_mean_per_completion_prefers_short_completions_even_on_policy(case):
    """With one advantage for all, its update is the gradient of the mean of 1/length: not zero if lengths vary."""

    def loss(logp, mask, advantages):
        return (torch.where(mask, -advantages * logp, 0).sum(-1) / mask.sum(-1)).mean()

    found = update(loss, case, torch.ones(len(case.problem.space), dtype=torch.float64))
    shortness = 1 / case.problem.space.mask.sum(-1).double()
    EXACT.check_vector(found, -differentiated(case.problem, lambda q: (q.logp.sum(-1).exp() * shortness).sum()))
    assert (found.norm() > 0.01) == case.problem.space.ends
