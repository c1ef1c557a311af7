"""What a `KLConfig` refuses, before anything is loaded."""

import pytest

from klgrad import Clip, KLTerm, Mask, OffPolicy, Truncate
from klgrad.errors import MeaningError
from klgrad.trl import KLConfig
from klgrad.trl.objective import bound_of

pytestmark = pytest.mark.filterwarnings("ignore")


def config(**settings):
    return KLConfig("unused", use_cpu=True, bf16=False, report_to=[], **settings)


def test_the_fields_are_a_term():
    made = config(kl_estimator="exact", kl_discount=0.9, kl_baseline="leave_one_out", kl_ratio="prefix")
    sampler = OffPolicy("prefix", Truncate(2.0))
    assert made.objective.term == KLTerm(estimator="exact", discount=0.9, baseline="leave_one_out", sampler=sampler)
    assert made.objective.exact
    assert "objective" not in made.to_dict()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"beta": 0.1}, "two KL terms would add up"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"kl_target": -1.0}, "kl_target"),
        ({"kl_target": 1.0, "kl_coef": 0.0}, "0 has none"),
        ({"kl_horizon": 0}, "kl_horizon"),
        ({"rollout_lag": -1}, "rollout_lag"),
        ({"rollout_lag": 2}, "kl_ratio='prefix' corrects for it"),
        ({"kl_ratio": "prefix", "kl_placement": "advantage"}, "weighs the KL once"),
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
        ({"kl_cell": "k3-loss", "rollout_lag": 1}, "sampler is no longer the policy"),
        ({"kl_placement": "advantage", "importance_sampling_level": "sequence"}, "spreads every token's coefficient"),
        ({"kl_placement": "advantage", "top_entropy_quantile": 0.2}, "would be dropped"),
        ({"kl_placement": "advantage", "off_policy_mask_threshold": 0.5}, "be masked with them"),
        ({"kl_placement": "advantage", "kl_reduction": "sequence"}, "reduced as the policy loss"),
        ({"teacher": "somebody", "sync_ref_model": True}, "overwritten by the student"),
        ({"kl_top_k": 8}, "sampled token alone"),
        ({"kl_top_k": 0, "kl_estimator": "exact"}, "kl_top_k"),
    ],
)
def test_refused(settings, told):
    with pytest.raises((MeaningError, LookupError), match=told):
        config(**settings)


def test_a_group_of_one_has_no_peers():
    with pytest.raises((MeaningError, ValueError), match="generations"):
        config(kl_baseline="leave_one_out", num_generations=1)


@pytest.mark.parametrize(
    "stale", [{"num_iterations": 2}, {"steps_per_generation": 2, "gradient_accumulation_steps": 3}]
)
def test_stale_completions_without_weights_are_told_of(stale, recwarn):
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
