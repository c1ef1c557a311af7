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

SEQUENCE, TOKEN, FORWARD = sequence_reverse_kl, token_level(reverse_kl), token_level(forward_kl)
EXACT_TERM, LOO = {"kl_estimator": "exact"}, {"kl_baseline": "leave_one_out"}
NEXT = {**EXACT_TERM, "kl_discount": 0.0}
OF_TOKENS = {"kl_divergence": "forward", "kl_level": "token"}
SUMMED = {
    "k1, sequence": ({}, SEQUENCE),
    "k1, token": ({"kl_level": "token"}, TOKEN),
    "future by k3, leave-one-out": ({"kl_estimator": "k1_k3", **LOO}, SEQUENCE),
    "forward": ({**OF_TOKENS, "kl_estimator": "k3"}, FORWARD),
    "exact, sequence": (EXACT_TERM, SEQUENCE),
    "exact, discount 0": (NEXT, TOKEN),
    "exact, forward": ({**OF_TOKENS, **EXACT_TERM}, FORWARD),
    "top 2, the tail sampled": ({**NEXT, "kl_top_k": 2}, TOKEN),
    "top 2, the tail in one lump": ({**NEXT, "kl_top_k": 2, "kl_tail": "lump"}, token_level(lumped(2))),
}
"""Settings beside kl_reduction='sequence', and what they descend."""
LIKE_THE_POLICY = {
    "as the policy loss is reduced": ({}, 1.0),
    "exact, leave-one-out": ({**EXACT_TERM, **LOO}, 1.0),
    "in the advantage": ({"kl_placement": "advantage"}, 1.0),
    "in the advantage, exact": ({"kl_placement": "advantage", **EXACT_TERM}, 1.0),
    # The group's mean, of which the completion itself is one of two, takes half of it away.
    "in the reward": ({"kl_placement": "reward", "scale_rewards": "none"}, 0.5),
}
"""Settings beside loss_type='dr_grpo', which divides by the longest completion that is allowed, and a factor."""
CASES = {
    **{name: ({"kl_reduction": "sequence", **more}, of, 1.0) for name, (more, of) in SUMMED.items()},
    **{name: ({"loss_type": "dr_grpo", **x}, SEQUENCE, scale / LIMIT) for name, (x, scale) in LIKE_THE_POLICY.items()},
}


@pytest.fixture(autouse=True)
def in_float64():
    with everything_in_float64():
        yield


@pytest.mark.parametrize("case", first(CASES, {*list(SUMMED)[:3], "as the policy loss is reduced"}))
def test_the_parameters_get_the_gradient_of_the_divergence(case):
    settings, divergence, scale = CASES[case]
    trainer = trainer_of("klgrad", kl_coef=1.0, **settings)
    policy, ref = policies(trainer, settings.get("temperature", 1.0))
    tolerance = FLOAT32_REWARD if settings.get("kl_placement") == "reward" else EXACT
    tolerance.check_vector(expected_gradient(trainer, policy), scale * gradient_of(trainer, divergence(policy, ref)))


def test_over_the_vocabulary_old_completions_need_no_weights():
    """The KL of the next word where the sampler went; a weight, or the policy's own prefixes, would be another."""
    trainer = trainer_of("klgrad", kl_coef=1.0, kl_reduction="sequence", **NEXT)
    policy, ref = policies(trainer)
    found = expected_gradient(trainer, ref, stale=True)
    EXACT.check_vector(found, gradient_of(trainer, token_level(reverse_kl, ref)(policy, ref)))
    policy, ref = policies(trainer)
    with pytest.raises(AssertionError):
        EXACT.check_vector(found, gradient_of(trainer, TOKEN(policy, ref)))
