"""Every placement, level and estimator of `KLTrainer`, down to the parameters of an enumerated language model."""

import pytest
from language_model import (
    LIMIT,
    everything_in_float64,
    expected_gradient,
    forward_kl,
    gradient_of,
    lumped,
    policies,
    reverse_kl,
    sequence_reverse_kl,
    token_level,
    trainer_of,
)
from some import first
from tolerances import EXACT, FLOAT32_REWARD

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

TOKEN, FORWARD = token_level(reverse_kl), token_level(forward_kl)
SUMMED = {"kl_reduction": "sequence"}
TOP = {**SUMMED, "kl_estimator": "exact", "kl_top_k": 2}
POLICY = {"loss_type": "dr_grpo"}  # divides by the longest completion that is allowed
CASES = {
    "k1, sequence": (SUMMED, sequence_reverse_kl, 1.0),
    "k1, token": ({**SUMMED, "kl_level": "token"}, TOKEN, 1.0),
    "future by k3, leave-one-out": (
        {**SUMMED, "kl_estimator": "k1_k3", "kl_baseline": "leave_one_out"},
        sequence_reverse_kl,
        1.0,
    ),
    "as the policy loss is reduced": (POLICY, sequence_reverse_kl, 1 / LIMIT),
    "forward": ({**SUMMED, "kl_divergence": "forward", "kl_level": "token", "kl_estimator": "k3"}, FORWARD, 1.0),
    "exact, sequence": ({**SUMMED, "kl_estimator": "exact"}, sequence_reverse_kl, 1.0),
    "exact, leave-one-out": (
        {**POLICY, "kl_estimator": "exact", "kl_baseline": "leave_one_out"},
        sequence_reverse_kl,
        1 / LIMIT,
    ),
    "exact, discount 0": ({**SUMMED, "kl_estimator": "exact", "kl_discount": 0.0}, TOKEN, 1.0),
    "exact, forward": (
        {**SUMMED, "kl_divergence": "forward", "kl_level": "token", "kl_estimator": "exact"},
        FORWARD,
        1.0,
    ),
    "top 2, the tail sampled": ({**TOP, "kl_discount": 0.0}, TOKEN, 1.0),
    "top 2, the tail in one lump": ({**TOP, "kl_discount": 0.0, "kl_tail": "lump"}, token_level(lumped(2)), 1.0),
    "in the advantage": ({**POLICY, "kl_placement": "advantage"}, sequence_reverse_kl, 1 / LIMIT),
    "in the advantage, exact": (
        {**POLICY, "kl_placement": "advantage", "kl_estimator": "exact"},
        sequence_reverse_kl,
        1 / LIMIT,
    ),
    # The group's mean, of which the completion itself is one of two, takes half of it away.
    "in the reward": ({**POLICY, "kl_placement": "reward", "scale_rewards": "none"}, sequence_reverse_kl, 0.5 / LIMIT),
}


@pytest.fixture(autouse=True)
def in_float64():
    with everything_in_float64():
        yield


@pytest.mark.parametrize("case", first(CASES, 4))
def test_the_parameters_get_the_gradient_of_the_divergence(case):
    settings, divergence, scale = CASES[case]
    trainer = trainer_of("klgrad", kl_coef=1.0, **settings)
    policy, ref = policies(trainer, settings.get("temperature", 1.0))
    tolerance = FLOAT32_REWARD if settings.get("kl_placement") == "reward" else EXACT
    tolerance.check_vector(expected_gradient(trainer, policy), scale * gradient_of(trainer, divergence(policy, ref)))


def test_over_the_vocabulary_old_completions_need_no_weights():
    """The KL of the next word where the sampler went; a weight, or the policy's own prefixes, would be another."""
    settings = {**SUMMED, "kl_estimator": "exact", "kl_discount": 0.0}
    trainer = trainer_of("klgrad", kl_coef=1.0, **settings)
    policy, ref = policies(trainer)
    found = expected_gradient(trainer, ref, stale=True)
    EXACT.check_vector(found, gradient_of(trainer, token_level(reverse_kl, ref)(policy, ref)))
    policy, ref = policies(trainer)
    with pytest.raises(AssertionError):
        EXACT.check_vector(found, gradient_of(trainer, TOKEN(policy, ref)))
