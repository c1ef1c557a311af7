"""The whole policy losses of TRL's own trainers."""

import pytest

pytest.importorskip("trl")

from klgrad.audit.whole import audit_whole
from klgrad.frameworks import recorded
from klgrad.frameworks.trl import policy_loss, policy_losses

pytestmark = pytest.mark.slow


@pytest.mark.many
def test_the_default_divides_by_the_deviation_and_is_clipped_off_policy():
    r = audit_whole(policy_loss("grpo"))
    assert r.on_policy.update.verdict == "policy-gradient"
    assert r.on_policy.update.weighting.divided_by_deviation
    assert not r.on_policy.update.weighting.length_biased
    assert r.off_policy.update.verdict == "unknown"
    assert r.on_policy.kl == r.off_policy.positive.verdict == "nothing"


@pytest.mark.many
def test_without_a_correction_for_the_sampler_the_policy_gradient_is_uncorrected():
    settings = {"loss_type": "dr_grpo", "scale_rewards": "none", "use_vllm": True}
    r = audit_whole(policy_loss("grpo", **settings, vllm_importance_sampling_correction=False))
    assert r.off_policy.update.verdict == "policy-gradient-uncorrected"
    assert r.off_policy.update.weighting.baseline == "group"
    assert not r.off_policy.update.weighting.divided_by_deviation


def test_every_setting_has_its_own_name_and_is_recorded():
    names = [subject.name for subject in policy_losses()]
    assert names == [row[0] for row in recorded("trl").policy_losses]
    assert len(set(names)) == len(names)
