"""The whole policy losses of TRL's own trainers."""

import pytest

pytest.importorskip("trl")

from klgrad.audit.policy import audit_whole
from klgrad.audit.policy_page import cells_of
from klgrad.frameworks import recorded
from klgrad.frameworks.trl import policy_loss, policy_losses
from klgrad.policy_losses import PolicyParts, Weight

pytestmark = pytest.mark.slow


@pytest.mark.many
def test_the_default_divides_by_the_deviation_and_is_clipped_off_policy():
    r = audit_whole(policy_loss("grpo"))
    assert r.policy.proved
    assert r.policy.parts == PolicyParts(
        "token", Weight(high=1.2), Weight(low=0.8), "group-mean", "group", "token-mean"
    )
    assert r.policy.epsilon == pytest.approx(1e-4, rel=1e-3)  # rewards are in float32
    assert r.kl_verdict == "nothing"


@pytest.mark.many
def test_without_a_correction_for_the_sampler_the_policy_gradient_is_uncorrected():
    settings = {"loss_type": "dr_grpo", "scale_rewards": "none", "use_vllm": True}
    r = audit_whole(policy_loss("grpo", **settings, vllm_importance_sampling_correction=False))
    assert r.policy.proved
    assert r.policy.parts == PolicyParts(baseline="group-mean", unit="fixed-length")


@pytest.mark.many
@pytest.mark.parametrize("subject", policy_losses(), ids=lambda subject: subject.name)
def test_every_loss_is_proved_and_recorded(subject):
    r = audit_whole(subject)
    assert r.policy.proved
    assert list(cells_of(r)) in recorded("trl").policy_losses


def test_every_setting_has_its_own_name_and_is_recorded():
    names = [subject.name for subject in policy_losses()]
    assert names == [row[0] for row in recorded("trl").policy_losses]
    assert len(set(names)) == len(names)
