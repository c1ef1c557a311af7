"""A genuine language model in TRL's trainers: every group of its completions, down to its parameters."""

import pytest
from language_model import (
    END,
    LIMIT,
    everything_in_float64,
    expected_gradient,
    forward_kl,
    gradient_of,
    loss_of,
    policies,
    reverse_kl,
    sequence_reverse_kl,
    token_level,
    trainer_of,
)
from some import first
from tolerances import EXACT

from klgrad.frameworks import FRAMEWORKS

pytestmark = [
    pytest.mark.skipif(FRAMEWORKS["trl"].installed is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # it warns of its own affairs
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def in_float64():
    with everything_in_float64():
        yield


K3 = {"loss_type": "dr_grpo", "use_bias_correction_kl": False}
CORRECTED = {"loss_type": "dr_grpo", "use_bias_correction_kl": True}
CASES = {
    # Dr. GRPO divides by the longest completion that is allowed.
    "plain k3": ("grpo", K3, token_level(forward_kl), 1 / LIMIT),
    "bias corrected": ("grpo", CORRECTED, token_level(reverse_kl), 1 / LIMIT),
    "bias corrected, tempered": ("grpo", {**CORRECTED, "temperature": 0.6}, token_level(reverse_kl), 1 / LIMIT),
    "in the reward": ("rloo", {"normalize_advantages": False}, sequence_reverse_kl, 1.0),
    "in the reward, tempered": ("rloo", {"normalize_advantages": False, "temperature": 0.6}, sequence_reverse_kl, 1.0),
}


@pytest.mark.parametrize("case", first(CASES, ("bias corrected, tempered", "in the reward")))
def test_the_parameters_get_the_gradient_of_the_divergence(case):
    kind, settings, divergence, scale = CASES[case]
    trainer = trainer_of(kind, **settings)
    policy, ref = policies(trainer, settings.get("temperature", 1.0))
    EXACT.check_vector(expected_gradient(trainer, policy), scale * gradient_of(trainer, divergence(policy, ref)))


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_neither_padding_nor_chunks_matter(kind):
    """Prompts of two lengths are padded on the left, and scored by the pair; the batch is the mean of its groups."""
    trainer = trainer_of(kind, **(CORRECTED if kind == "grpo" else {"normalize_advantages": False}))
    groups = [("a", [(END,), (2, 3)]), ("b a b", [(3, END), (0, 2)])]
    alone = [gradient_of(trainer, loss_of(trainer, [prompt] * 2, pair)) for prompt, pair in groups]
    together = loss_of(trainer, [p for p, _ in groups for _ in range(2)], [y for _, pair in groups for y in pair])
    assert float((alone[0] - alone[1]).norm()) > 0.1 * float(alone[0].norm())
    EXACT.check_vector(gradient_of(trainer, together), (alone[0] + alone[1]) / 2)
