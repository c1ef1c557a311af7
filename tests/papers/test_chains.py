"""Off-policy weights of the chains: which are exact, on another problem than the study's."""

import pytest
import torch

from klgrad.core.credit import to_go
from klgrad.core.importance import prefix_ratio, prefix_ratio_before
from klgrad.papers.comedy.chains import BIASED, EXACT, SOUND, placements, random_chains, random_logits

WEIGHTS = {
    "prefix": lambda rollout: placements(rollout, to_go, prefix_ratio(rollout)),
    "prefix, without the present token": lambda rollout: placements(rollout, to_go, prefix_ratio_before(rollout)),
    "prefix of the score's token": lambda rollout: {
        name: prefix_ratio(rollout) * c for name, c in placements(rollout, to_go).items()
    },
}


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_prefix_ratio_is_exact_with_the_present_token_and_inside_the_sum(weight):
    generator = torch.Generator().manual_seed(5)
    chains = random_chains(4, 5, generator)
    chains = chains.sampled_by(chains.policy + 0.7 * random_logits(4, 5, generator))
    found = chains.moments(WEIGHTS[weight])
    for name in SOUND:
        bias = found[name].bias(chains.kl_gradient)
        assert bool((bias < EXACT).all() if weight == "prefix" else (bias > BIASED).all()), (name, bias)
