"""What a `KLConfig` refuses, before anything is loaded."""

import pytest

from klgrad import Clip, ImportanceWeighting, KLTerm, Mask, Truncate
from klgrad.errors import MeaningError
from klgrad.integrations import bound_of
from klgrad.trl import KLConfig
from klgrad.trl.config_checks import MeaningWarning, notes

pytestmark = pytest.mark.filterwarnings("ignore")


def config(**settings):
    return KLConfig("unused", use_cpu=True, bf16=False, report_to=[], **settings)


def test_the_fields_are_a_term():
    made = config(kl_estimator="exact", kl_discount=0.9, kl_baseline="leave_one_out", kl_ratio="prefix")
    sampler = ImportanceWeighting("prefix", Truncate(2.0))
    assert made.objective.term == KLTerm(estimator="exact", discount=0.9, baseline="leave_one_out", weighting=sampler)
    assert made.objective.exact
    assert "objective" not in made.to_dict()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"beta": 0.1}, "two KL terms would add up"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"kl_target": -1.0}, "kl_target"),
        ({"kl_target": 1.0, "kl_coef": 0.0}, "0 would stay 0"),
        ({"kl_horizon": 0}, "kl_horizon"),
        ({"rollout_lag": -1}, "rollout_lag"),
        ({"rollout_lag": 2}, "set kl_ratio='prefix' with"),
        ({"kl_ratio": "prefix", "kl_placement": "advantage"}, "weights the KL once"),
        ({"kl_placement": "reward", "kl_level": "token"}, "one number per completion"),
        ({"kl_placement": "reward", "kl_discount": 0.5}, "baseline there"),
        ({"kl_placement": "nowhere"}, "loss is the default"),
        ({"kl_cell": "k3-los"}, "did you mean 'k3-loss'"),
        ({"kl_cell": "k3-loss", "kl_placement": "reward"}, "a whole loss"),
        ({"kl_ratio": "token", "kl_ratio_bound": "truncate"}, "truncate:2"),
        ({"kl_estimator": "k3"}, "reverse"),
        ({"kl_coef": float("inf")}, "finite"),
        ({"kl_target_unit": "tokens"}, "kl_target_unit"),
        ({"kl_reduction": "mean"}, "policy is the default"),
        ({"kl_cell": "k3-loss", "kl_estimator": "exact"}, "no `kl_estimator` beside `kl_cell`"),
        ({"kl_cell": "k2-loss-token-mean"}, "whose own reduction is part of the loss"),
        ({"kl_cell": "k3-loss", "rollout_lag": 1}, "sampler is no longer the policy"),
        ({"kl_placement": "advantage", "importance_sampling_level": "sequence"}, "would mix the coefficients"),
        ({"kl_placement": "advantage", "top_entropy_quantile": 0.2}, "would be dropped"),
        ({"kl_placement": "advantage", "off_policy_mask_threshold": 0.5}, "be masked with them"),
        ({"kl_placement": "advantage", "kl_reduction": "sequence"}, "reduced like the policy loss"),
        ({"kl_placement": "reward", "top_entropy_quantile": 0.2}, "would be dropped"),
        ({"kl_placement": "reward", "off_policy_mask_threshold": 0.5}, "be masked with them"),
        ({"mask_truncated_completions": True}, "the gradient is that of no divergence"),
        ({"mask_truncated_completions": True, "kl_cell": "k3-loss"}, "the gradient is that of no divergence"),
        ({"teacher": "somebody", "sync_ref_model": True}, "the student would overwrite"),
        ({"kl_top_k": 8}, "sampled token alone"),
        ({"kl_top_k": 0, "kl_estimator": "exact"}, "kl_top_k"),
    ],
)
def test_refused(settings, reason):
    with pytest.raises((MeaningError, LookupError), match=reason):
        config(**settings)


def test_a_group_of_one_has_no_peers():
    with pytest.raises((MeaningError, ValueError), match="generations"):
        config(kl_baseline="leave_one_out", num_generations=1)


@pytest.mark.parametrize(
    "stale", [{"num_iterations": 2}, {"steps_per_generation": 2, "gradient_accumulation_steps": 3}]
)
def test_stale_completions_without_weights_are_warned_of(stale, recwarn):
    with pytest.warns(UserWarning, match="leaves the KL uncorrected"):
        config(**stale)
    recwarn.clear()
    config(**stale, kl_ratio="prefix")
    config(**stale, kl_estimator="exact", kl_level="token")  # over the vocabulary: the sampler's prefixes, no weights
    assert not [w for w in recwarn if "uncorrected" in str(w.message)]
    with pytest.warns(UserWarning, match="leaves the KL uncorrected"):
        config(**stale, kl_estimator="exact")  # the future needs them


def test_lag_uncorrected_by_name():
    assert config(rollout_lag=2, rollout_lag_uncorrected=True).rollout_lag == 2


@pytest.mark.parametrize(
    ("text", "bound"),
    [("truncate:2", Truncate(2.0)), ("clip:0.5:2", Clip(0.5, 2.0)), ("mask:0.5:2", Mask(0.5, 2.0)), ("none", None)],
)
def test_bounds(text, bound):
    assert bound_of(text) == bound


def test_cut_off_completions_may_be_masked_where_no_kl_is_declared():
    assert config(mask_truncated_completions=True, kl_coef=0.0).mask_truncated_completions


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"top_p": 0.9}, r"top_p=0.9: completions are not sampled from the policy"),
        ({"top_k": 20, "kl_ratio": "prefix"}, r"kl_ratio does not correct"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"generation_kwargs": {"temperature": 0.5}}, "generation_kwargs temperature=0.5"),
        ({"entropy_coef": 0.1}, "entropy bonus"),
        ({"use_adaptive_entropy": True}, "entropy bonus"),
        ({"sync_ref_model": True}, "a reference that moves"),
        ({"loss_type": "cispo"}, "multiplied by it, and a KL in the loss is not"),
        ({"loss_type": "cispo", "kl_placement": "advantage"}, "multiplied by it, and the KL with them"),
        ({"use_vllm": True, "kl_placement": "reward"}, "weights the KL in the reward"),
        (
            {"loss_type": "grpo"},
            "kl_reduction='sequence', loss_type='dapo' or loss_type='dr_grpo' keeps the declared KL",
        ),
        ({"loss_type": "sapo", "kl_placement": "advantage"}, "however large the batch; loss_type='dapo'"),
        (
            {"loss_type": "bnpo", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
            r"tokens of one forward pass, of 2 completions on each process, and not by those of the update, of 16: .*"
            "; kl_reduction='sequence', loss_type='dapo' or loss_type='dr_grpo' keeps the declared KL",
        ),
        (
            {"loss_type": "bnpo", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
            r"of 1 completion on each process.*the gradient of no divergence",
        ),
        (
            {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "kl_placement": "advantage"},
            "tokens of one forward pass, of 8 completions on each process.*; loss_type='dapo'",
        ),
        ({"kl_placement": "reward"}, "scale_rewards='group': a standard deviation divides the KL too"),
        (
            {"kl_placement": "reward", "scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"},
            "kl_placement='advantage', or multi_objective_aggregation='sum_then_normalize' with scale_rewards='none', ",
        ),
        ({"neftune_noise_alpha": 5.0}, "adds noise"),
    ],
)
def test_what_changes_the_meaning_is_warned_of(settings, reason):
    with pytest.warns(MeaningWarning, match=reason):
        config(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_p": 0.9, "kl_estimator": "exact", "kl_level": "token"},  # a sum at whatever prefixes were sampled
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"generation_kwargs": {"max_new_tokens": 3}},
        {"loss_type": "bnpo"},  # one forward pass in an update: its tokens are those of the update
        {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "kl_reduction": "sequence"},
        {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "kl_coef": 0.0},
    ],
)
def test_no_note_where_nothing_changes(settings):
    assert notes(config(**settings)) == []
