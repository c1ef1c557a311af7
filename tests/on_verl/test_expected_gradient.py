"""verl's own loss code with the declared KL: the mean gradient over all completions is that of the term, in float64."""

import pytest
import torch
from on_verl.configuration import HAS_VERL
from oracle import mean_gradient_over_groups
from tolerances import EXACT

from klgrad.audit.subject import Subject, expected_gradient
from klgrad.enumeration import autoregressive

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_VERL, reason="verl is not installed"),
]

PROBLEM = autoregressive(2, 3, ends=True, seed=8, away_from_ref=1.0)
NODES = {
    "sequence": {},
    "discount": {"discount": 0.5},
    "sequence, prefix": {"ratio": "prefix", "ratio_bound": "none"},
    "sequence, truncated": {"ratio": "prefix", "ratio_bound": "truncate:1.1"},
    "token, masked": {"level": "token", "ratio": "token", "ratio_bound": "mask:0.5:2"},
    "influence": {"level": "token", "influence_bound": 0.3},
    "k1_k3": {"estimator": "k1_k3"},
    "forward sequence": {"divergence": "forward", "estimator": "k3", "ratio": "sequence", "ratio_bound": "none"},
    "jensen-shannon, teacher": {
        "reference": "teacher",
        "divergence": "jensen-shannon(0.1)",
        "level": "token",
        "estimator": "sampled",
        "ratio": "prefix",
        "ratio_bound": "none",
    },
    "a mixture with a future": {
        "divergence": "0.3 forward + 0.7 reverse",
        "level": "future",
        "estimator": "sampled",
        "discount": 0.5,
    },
    "teacher": {"reference": "teacher", "discount": 0.5, "ratio": "prefix", "ratio_bound": "none"},
    "advantage": {"placement": "advantage"},
    "advantage, leave-one-out": {"placement": "advantage", "baseline": "leave_one_out"},
    "advantage, all": {
        "placement": "advantage",
        "baseline": "leave_one_out",
        "discount": 0.7,
        "ratio": "prefix",
        "ratio_bound": "clip:0.7:1.4",
    },
}


def gradient_on_verl(subject, problem, advantage):
    alone = Subject(subject.name, "framework", subject.loss, stacks=False)
    return expected_gradient(alone, problem, 2, advantage).mean[: problem.logits.numel()]


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("case", NODES)
def test_it_is_that_of_the_term(case, on_policy):
    from klgrad.frameworks.verl import declared
    from klgrad.verl.declaration import term_of

    problem = PROBLEM.on_policy() if on_policy else PROBLEM
    found = gradient_on_verl(declared(NODES[case]), problem, torch.zeros(len(problem.space)).double())
    term = term_of(NODES[case]).term
    EXACT.check_vector(
        found, mean_gradient_over_groups(PROBLEM, 2, lambda rollout: term(rollout).loss, on_policy=on_policy)
    )


@pytest.mark.parametrize("placement", ["loss", "advantage"])
def test_it_is_added_to_the_policy_gradient(placement):
    """Sample by sample: on-policy nothing is clipped, so the gradient of the sum is the sum of the gradients."""
    from klgrad.audit.batch import from_problem
    from klgrad.frameworks.verl import declared

    problem = PROBLEM.on_policy()
    rewards = torch.randn(len(problem.space), generator=torch.Generator().manual_seed(0)).double()

    def gradient(coef, advantage):
        batch = from_problem(problem, torch.arange(len(problem.space))[None], advantage)
        return torch.autograd.grad(declared({"placement": placement, "coef": coef})(batch), batch.logp)[0]

    reward, kl = gradient(0.0, rewards), gradient(0.3, 0 * rewards)
    assert min(float(reward.norm()), float(kl.norm())) > 0.01
    EXACT.check_vector(gradient(0.3, rewards), reward + kl)


def test_a_missing_detach_or_a_wrong_sign_would_be_seen(monkeypatch):
    from klgrad.frameworks.verl import declared
    from klgrad.verl import loss

    problem, none = PROBLEM.on_policy(), torch.zeros(len(PROBLEM.space)).double()
    right = gradient_on_verl(declared({"placement": "advantage"}), problem, none)
    lower = loss.lowered_advantages
    monkeypatch.setattr(loss, "lowered_advantages", lambda *a: 2 * a[3] - lower(*a))
    wrong = gradient_on_verl(declared({"placement": "advantage"}), problem, none)
    EXACT.check_vector(wrong, -right)
    with pytest.raises(AssertionError):
        EXACT.check_vector(wrong, right)
