"""Losses as users write them: every one of `data/losses.py` is audited, and its verdict is right."""

from functools import cache
from pathlib import Path

import pytest
from some import first
from tolerances import EXACT

from klgrad.audit import audit, load, load_every
from klgrad.audit.advising import MASKED

FILE = Path(__file__).parent / "data" / "losses.py"

FORWARD, REVERSE = "forward-kl-token", "reverse-kl-token"

VERDICTS = {
    "grpo_k3": (FORWARD, 0.04, {}),
    "grpo_corrected_k3": (REVERSE, 1.0, {}),
    "rloo_reward": ("reverse-kl-sequence", 0.05, {}),
    "jsd": ("unknown", None, {}),
    "forward_jsd": (FORWARD, 1.0, {}),
    "reverse_jsd": (REVERSE, 1.0, {}),
    "kl_penalty": (REVERSE, 1.0, {"kl_penalty": "mse"}),
    "policy_loss": ("nothing", None, {}),
    "update_actor": (REVERSE, 1.0, {}),
    "micro_batch_k1": ("nothing", None, {}),
    "PolicyLoss": ("nothing", None, {"clip_eps": 0.3}),
    "approx_kl": ("nothing", None, {}),
    "KLLoss": (REVERSE, 0.3, {"coef": 0.3}),
    "kl_loss": (REVERSE, 0.1, {}),
    "reverse_kd": (REVERSE, 1.0, {}),
    "forward_kd": (FORWARD, 1.0, {}),
    "forward_kd_per_entry": (FORWARD, 1.0, {}),
    "shifted_kd": (FORWARD, 1.0, {}),
    "top_k_kd": ("unknown", None, {}),
    "uld": ("unknown", None, {}),
    "mse_of_logits": ("unknown", None, {}),
    "cross_entropy": ("nothing", None, {}),
    "k2_from_logits": (REVERSE, 1.0, {}),
    "on_policy_distillation": (REVERSE, 1.0, {}),
    "k1_by_position": ("nothing", None, {}),
    "k2_in_a_dict": (REVERSE, 1.0, {}),
    "k2_per_completion": (REVERSE, 1.0, {}),
    "k2_in_an_object": (REVERSE, 1.0, {}),
    "k3_with_numbers_as_mask": (FORWARD, 1.0, {}),
    "forgot_the_mask": ("unknown", None, {}),
    "forgot_the_mask_of_logits": ("unknown", None, {}),
    "k3_of_keywords": (FORWARD, 1.0, {}),
    "k3_of_attributes": (FORWARD, 1.0, {}),
    "Penalty": (REVERSE, 0.1, {}),
    "Trainer.compute_kl": (FORWARD, 0.1, {}),
    "with_cfg": (REVERSE, 0.2, {"cfg": {"beta": 0.2}}),
}
"""By name: the on-policy verdict, the scale, and the settings."""


@cache
def audited(name):
    return audit(load(f"{FILE}:{name}", VERDICTS[name][2]))


@pytest.mark.slow
@pytest.mark.parametrize("name", first(VERDICTS, 10))
def test_verdicts(name):
    verdict, scale, _ = VERDICTS[name]
    result = audited(name)
    assert result.verdict == verdict, str(result.advice)
    if scale is not None:
        EXACT.check(result.scale, scale)


AVERAGED = {"grpo_whole": FORWARD, "KDLoss": FORWARD}
"""Losses with a mean over tokens, which are right where lengths are equal."""


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGED)
def test_means_over_tokens(name):
    assert audit(load(f"{FILE}:{name}"), lengths="equal").verdict == AVERAGED[name]


OF_THE_SAMPLER = {
    "reverse_kd": "reverse-kl-token-sampler",
    "reverse_jsd": "reverse-kl-token-sampler",
    "forward_kd": "forward-kl-token-sampler",
    "shifted_kd": "forward-kl-token-sampler",
    "cross_entropy": "forward-kl-sampler-sequence",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_SAMPLER)
def test_losses_of_logits_on_the_samplers_prefixes(name):
    assert audited(name).verdict_off_policy == OF_THE_SAMPLER[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "divergence"), [("forgot_the_mask", "reverse"), ("forgot_the_mask_of_logits", "forward")]
)
def test_a_forgotten_mask_is_named_with_its_remedy(name, divergence):
    result = audited(name)
    assert result.touches_padding
    advice = str(result.advice)
    assert advice.startswith(f"Descends the token-level {divergence} KL")
    assert "only if nothing is masked" in advice
    assert result.advice.remedies[0] == MASKED
    assert "* mask" in advice
    assert "length" not in advice


@pytest.mark.slow
def test_settings_choose_the_estimator():
    found = {k: audit(load(f"{FILE}:approx_kl", {"kl_estimator": k})).verdict for k in ("k1", "k2", "k3")}
    assert found == {"k1": "nothing", "k2": REVERSE, "k3": FORWARD}
    assert audit(load(f"{FILE}:Penalty", {"kind": "k3", "beta": 2.0})).verdict == FORWARD


def test_every_loss_of_the_file_is_found():
    found = load_every(str(FILE))
    names = [subject.name.removeprefix(f"{FILE}:") for subject in found.subjects]
    assert sorted([*names, *found.skipped]) == sorted({*VERDICTS, *AVERAGED, "Trainer"} - {"Trainer.compute_kl"})
    assert set(found.skipped) == {"kl_penalty", "KLLoss", "Trainer", "with_cfg"}
    assert len(names) >= 30
    assert "kl_penalty is not known" in found.skipped["kl_penalty"]
    assert found.skipped["KLLoss"].startswith("a constructor that needs coef; give them by --set coef=VALUE")
    given = load_every(str(FILE), {"coef": 0.1, "kl_penalty": "kl", "cfg": {"beta": 1.0}})
    assert set(given.skipped) == {"Trainer"}
