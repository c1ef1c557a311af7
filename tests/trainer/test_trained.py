"""What `KLTrainer` trains, by the audit of its own loss on TRL's code, and what its settings declare."""

import pytest
import torch
from some import first
from tolerances import EXACT, SINGLE

from klgrad.audit import audit
from klgrad.audit.probes import from_problem
from klgrad.audit.procedure import advantage_of, rational_case
from klgrad.audit.subject import evaluate, expected_gradient, of_reference, sum_over_rows
from klgrad.enumeration import autoregressive, target_gradients
from klgrad.frameworks.trl import KL_FIELDS_LEFT_OUT, audited_settings, declared
from klgrad.trl import KLConfig
from klgrad.trl.config import notes

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = autoregressive(3, 2, ends=True, seed=24, away_from_ref=1.0, off_policy=1.0)
NO_ADVANTAGE = advantage_of(SMALL, "zero")


def config(**settings):
    return KLConfig("unused", use_cpu=True, bf16=False, report_to=[], **settings)


# The default


def test_the_default_trains_what_it_declares():
    default = audit(declared())
    assert default.verdict == config().objective.term.descends.on_policy == "reverse-kl-sequence"
    assert default.holds == "large-batches"
    assert default.anatomy.proved_fresh
    assert notes(config()) == []


def test_the_mean_over_tokens_of_the_default_is_biased_in_small_batches():
    subject, problem = declared(), SMALL.on_policy()
    target = target_gradients(problem)["reverse-kl-sequence"]
    bias = {}
    for size in (2, 3):
        found = expected_gradient(subject, problem, size, NO_ADVANTAGE).mean[: len(target)]
        bias[size] = off_direction(found, target)
    assert bias[2] > bias[3] > 0.01


# Notes


def scale_of(found, target):
    """The factor of the target that is nearest to a gradient."""
    return float(found @ target / target.square().sum())


def off_direction(found, target):
    """The share of a gradient that is not a multiple of the target's."""
    return float((found - scale_of(found, target) * target).norm() / found.norm())


def scales(settings):
    """The factor of the default's target in the limit, on two problems with varying lengths; None where it is none.

    In the limit: by one call of the loss on the batch that holds every group as often as it is likely.
    """
    subject, factors = declared(**settings), []
    for distance in ("near", "far"):
        case = rational_case(distance, 3, 2, True, 2, 4, on_policy=True)
        found = sum_over_rows(case.problem, case.members, of_reference(subject, case.batch())).mean
        target = case.targets["reverse-kl-sequence"]
        factors.append(scale_of(found, target) if off_direction(found, target) <= SINGLE.rtol else None)
    return factors


def means_what_it_declares(settings):
    """Whether the gradient in the limit is that of the default's target, at one scale."""
    near, far = scales(settings)
    return near is not None and far is not None and near > 0 and abs(near / far - 1) <= SINGLE.rtol


@pytest.mark.parametrize("placement", ["loss", "advantage"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
def test_a_loss_type_has_a_note_where_it_changes_what_is_descended(loss_type, placement):
    settings = {"loss_type": loss_type, "kl_placement": placement}
    noted = [note for note in notes(config(**settings)) if "of no divergence" in note]
    assert means_what_it_declares(settings) == (not noted)
    assert ("kl_reduction='sequence'" in "".join(noted)) == (bool(noted) and placement == "loss")


@pytest.mark.parametrize(("scaled", "unit"), [("none", None), ("group", "prompt"), ("batch", "batch")])
def test_a_kl_in_the_reward_has_a_note_where_a_deviation_divides_it(scaled, unit):
    settings = {"kl_placement": "reward", "scale_rewards": scaled}
    found = notes(config(**settings))
    assert means_what_it_declares(settings) == (not found)
    if found:
        assert "a standard deviation divides the KL too" in found[0]
        assert f"β differs from {unit} to {unit}" in found[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "kl_reduction": "sequence"},
        {"kl_placement": "reward", "scale_rewards": "none", "loss_type": "dr_grpo"},
        {"kl_placement": "advantage", "scale_rewards": "group"},
    ],
)
def test_what_the_notes_recommend_keeps_the_meaning(settings):
    assert notes(config(**settings)) == []
    assert means_what_it_declares(settings)


def test_the_deviation_of_a_batch_changes_the_scale_alone():
    near, far = scales({"kl_placement": "reward", "scale_rewards": "batch", "loss_type": "dr_grpo"})
    assert near > 1.5 * far > 0 or far > 1.5 * near > 0


WHOLE = {"kl_reduction": "sequence", "kl_ratio_bound": "none"}
AUDITED = {
    "token, token ratio": (
        {"kl_level": "token", "kl_ratio": "token", **WHOLE},
        "reverse-kl-token",
        "reverse-kl-token-sampler",
    ),
    "sequence, prefix ratio": ({"kl_ratio": "prefix", **WHOLE}, "reverse-kl-sequence", "reverse-kl-sequence"),
    "in the advantage": ({"kl_placement": "advantage", "loss_type": "dr_grpo"}, "reverse-kl-sequence", "unknown"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", first(AUDITED, 1))
def test_what_a_ratio_and_a_placement_descend(case):
    settings, on_policy, off_policy = AUDITED[case]
    found = audit(declared(**settings))
    assert (found.verdict, found.verdict_off_policy) == (on_policy, off_policy)


# Exact terms: the KLs over the vocabulary are given


def test_columns_without_tokens_are_cut_as_trl_cuts_them():
    """A batch whose completions all end before the last column."""
    ended = (SMALL.space.mask.sum(-1) == 1).nonzero().flatten()[:1]
    batch = from_problem(SMALL, torch.stack([ended, ended], -1), NO_ADVANTAGE)
    _, parts = evaluate(declared(kl_estimator="exact", kl_level="token", kl_reduction="sequence"), batch)
    p, log_ratio = batch.logits.detach().softmax(-1), (batch.logits - batch.ref_logits).detach()
    slope = p * (log_ratio - (p * log_ratio).sum(-1, keepdim=True))
    EXACT.check_vector(parts.logits[:, 0], slope[:, 0] / 2)
    assert not bool(parts.logits[:, 1:].any())


# Settings


def test_the_audit_gets_every_setting_that_may_act_on_the_kl():
    given = {
        "loss_type": "sapo", "scale_rewards": "batch", "kl_level": "token", "kl_ratio": "token", "kl_coef": 0.3,
        "kl_ratio_bound": "none", "sapo_temperature_neg": 2.0, "vllm_importance_sampling_mode": "token_mask",
        "learning_rate": 1e-3, "num_iterations": 2, "kl_target": 1.0,
    }  # fmt: skip
    found = audited_settings(config(**given))
    left_out = {*KL_FIELDS_LEFT_OUT, "learning_rate", "num_iterations"}
    assert found == {name: value for name, value in given.items() if name not in left_out}
    assert KLConfig.__dataclass_fields__.keys() >= set(KL_FIELDS_LEFT_OUT)
