"""What the audit said when it matched gradients with a list of targets is implied by the parts that it reads now.

`matched.json` has, for each loss of the catalogue and each audited setting of a framework, the names that the last
matching audit gave: on fresh samples with the batches for which they held, and the same on stale ones. The parts of
today are those of the goldens and of the frameworks' records.
"""

import json
from pathlib import Path

import pytest

from klgrad.frameworks import FRAMEWORKS, recorded

HERE = Path(__file__).parent
MATCHED = json.loads((HERE / "matched.json").read_text("utf-8"))
CATALOGUE = {r["name"]: r for r in json.loads((HERE.parent / "goldens/catalogue.json").read_text("utf-8"))["results"]}
RECORDED = {name: v for framework in FRAMEWORKS if (r := recorded(framework)) for name, v in r.verdicts.items()}

NO_NAME_TODAY = {
    # The clamps at ±20, beyond every problem that was matched, are seen.
    "nemo-rl reference_policy_kl_type=k3 token_level_loss=True use_on_policy_kl_approximation=True "
    "kl_output_clamp_value=null": "both",
    # On stale samples the mean that is subtracted adds a drift, which the parts tell.
    "tinker-cookbook rl kl_penalty_coef kl_discount_factor=0.0": "stale",
    "tinker-cookbook distillation kl_penalty_coef kl_discount_factor=0.0": "stale",
}
"""Names that were too strong, and on which samples."""


def test_every_loss_that_was_matched_is_still_audited():
    assert not set(MATCHED) - set(CATALOGUE) - set(RECORDED)
    assert len(MATCHED) == 248


@pytest.mark.parametrize("name", MATCHED)
def test_a_name_that_a_loss_had_it_still_has(name):
    fresh, holds, stale, _ = MATCHED[name]
    if name in CATALOGUE:
        now = [CATALOGUE[name][field] for field in ("verdict", "verdict_off_policy", "holds")]
    else:
        now = RECORDED[name]
    stronger = NO_NAME_TODAY.get(name)
    if stronger != "both" and fresh != "unknown":
        assert (now[0], now[2]) == (fresh, holds)
    if stronger is None and stale != "unknown":
        assert now[1] == stale
    if stronger:
        assert now[1] == "unknown" != stale


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_loss_without_a_name_has_parts(name):
    """Nothing in the catalogue is unknown: the parts of a loss without a name are proved too."""
    parts = CATALOGUE[name]["anatomy"]
    assert parts["proved"]
    assert parts["divergence"]["name"] != "other" or parts["divergence"]["curve"]
