"""The audit, run through `KLTrainer`: what each placement descends, on-policy and off-policy."""

import pytest
from some import first

from klgrad.audit import audit
from klgrad.frameworks.trl import declared

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

CASES = {
    "token, token ratio": (
        {"kl_level": "token", "kl_reduction": "sequence", "kl_ratio": "token", "kl_ratio_bound": "none"},
        "reverse-kl-token",
        "reverse-kl-token-sampler",
    ),
    "sequence, prefix ratio": (
        {"kl_ratio": "prefix", "kl_ratio_bound": "none", "kl_reduction": "sequence"},
        "reverse-kl-sequence",
        "reverse-kl-sequence",
    ),
    "in the advantage": ({"kl_placement": "advantage", "loss_type": "dr_grpo"}, "reverse-kl-sequence", "unknown"),
}


@pytest.mark.parametrize("case", first(CASES, 1))
def test_verdict(case):
    settings, on_policy, off_policy = CASES[case]
    found = audit(declared(**settings))
    assert (found.verdict, found.verdict_off_policy) == (on_policy, off_policy)
