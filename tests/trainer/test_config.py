"""What a `KLConfig` declares, and what it refuses before anything is loaded."""

from functools import partial

import pytest
import tiny
import torch
from tolerances import EXACT

from klgrad import Clip, ImportanceWeighting, KLTerm, Mask, Rollout, Truncate
from klgrad.errors import MeaningError
from klgrad.trl import KLConfig, KLTrainer
from klgrad.trl.config import MeaningWarning, fields_of, notes, resolve_config
from klgrad.trl.kl_trainer import per_token_loss

pytestmark = pytest.mark.filterwarnings("ignore")


def config(**settings):
    return KLConfig("unused", use_cpu=True, bf16=False, report_to=[], **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"beta": 0.1}, "two KL terms would add up"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"kl_target": 1.0, "kl_coef": 0.0}, "0 would stay 0"),
        ({"rollout_lag": -1}, "rollout_lag"),
        ({"rollout_lag": 2}, "set kl_ratio='prefix' with"),
        ({"kl_ratio": "prefix", "kl_placement": "advantage"}, "weights the KL once"),
        ({"kl_placement": "reward", "kl_level": "token"}, "one number per completion"),
        ({"kl_placement": "reward", "kl_discount": 0.5}, "as its baseline"),
        ({"kl_placement": "nowhere"}, "loss is the default"),
        ({"kl_cell": "k3-los"}, "did you mean 'k3-loss'"),
        ({"kl_cell": "k3-loss", "kl_placement": "reward"}, "a whole loss"),
        ({"kl_ratio": "token", "kl_ratio_bound": "truncate"}, "truncate:2"),
        ({"kl_estimator": "k3"}, "reverse"),
        ({"kl_coef": float("inf")}, "`kl_coef` >= 0; received inf"),
        ({"kl_reduction": "mean"}, "policy is the default"),
        ({"kl_cell": "k3-loss", "kl_estimator": "exact"}, "no `kl_estimator` beside `kl_cell`"),
        ({"kl_cell": "k2-loss-token-mean"}, "whose own reduction is part of the loss"),
        ({"kl_cell": "k3-loss", "rollout_lag": 1}, "sampler is no longer the policy"),
        ({"kl_placement": "advantage", "importance_sampling_level": "sequence"}, "would mix the coefficients"),
        ({"kl_placement": "advantage", "top_entropy_quantile": 0.2}, "would be dropped"),
        ({"kl_placement": "advantage", "off_policy_mask_threshold": 0.5}, "would be dropped"),
        ({"kl_placement": "advantage", "kl_reduction": "sequence"}, "reduced like the policy loss"),
        ({"mask_truncated_completions": True}, "the gradient is that of no divergence"),
        ({"teacher": "somebody", "sync_ref_model": True}, "the student would overwrite"),
        ({"kl_top_k": 8}, "sampled token alone"),
        ({"kl_top_k": 0, "kl_estimator": "exact"}, "kl_top_k"),
        ({"kl_ratio_bound": 2.0}, "kl_ratio_bound"),
    ],
)
def test_refused(settings, reason):
    with pytest.raises((MeaningError, LookupError), match=reason):
        config(**settings)


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


KEPT = "kl_reduction='sequence', loss_type='dapo' or loss_type='dr_grpo' keeps the declared KL"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"top_p": 0.9}, r"top_p=0.9: completions are not sampled from the policy"),
        ({"top_k": 20, "kl_ratio": "prefix"}, r"kl_ratio does not correct"),
        ({"generation_kwargs": {"temperature": 0.5}}, "generation_kwargs temperature=0.5"),
        ({"use_adaptive_entropy": True}, "entropy bonus"),
        ({"sync_ref_model": True}, "a reference that moves"),
        ({"use_vllm": True, "kl_placement": "reward"}, "weights the KL in the reward"),
        ({"loss_type": "cispo"}, "multiplied by it, with a KL in them, and a KL in the loss is not"),
        ({"loss_type": "grpo"}, KEPT),
        ({"loss_type": "sapo", "kl_placement": "advantage"}, "however large the batch; loss_type='dapo'"),
        (
            {"loss_type": "bnpo", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
            f"forward pass, of 2 completions on each process, and not by those of the update, of 16: .*; {KEPT}",
        ),
        (
            {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "kl_placement": "advantage"},
            "tokens of one forward pass, of 8 completions on each process.*; loss_type='dapo'",
        ),
        ({"kl_placement": "reward"}, "scale_rewards='group' and .*: a standard deviation divides the KL too"),
        (
            {"kl_placement": "reward", "scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"},
            "kl_placement='advantage', or 'none' with 'sum_then_normalize', keeps the declared KL",
        ),
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
        {"loss_type": "grpo", "kl_coef": 0.0},
        {"mask_truncated_completions": True, "kl_coef": 0.0},  # cut off completions, where no KL is declared
        {"rollout_lag": 2, "rollout_lag_uncorrected": True},  # which is allowed by name
    ],
)
def test_no_note_where_nothing_changes(settings):
    assert notes(config(**settings)) == []


# A KL that is declared by a `KLTerm` is the one that the fields of a `KLConfig` declare.


@pytest.mark.parametrize(
    ("described", "ratio", "bound", "text"),
    [
        ({}, "none", None, "truncate:2"),
        ({"level": "token"}, "none", None, "truncate:2"),
        ({"divergence": "forward", "level": "token", "estimator": "k3"}, "none", None, "truncate:2"),
        ({"estimator": "exact", "discount": 0.9, "baseline": "leave_one_out"}, "prefix", Truncate(2.0), "truncate:2"),
        ({"influence_bound": 0.1}, "none", None, "truncate:2"),
        ({}, "sequence", Clip(0.5, 3.0), "clip:0.5:3"),
        ({"level": "token"}, "token", Mask(0.25, 2.0), "mask:0.25:2"),
    ],
)
def test_a_term_is_what_its_fields_declare(described, ratio, bound, text):
    term = KLTerm(**described, weighting=None if ratio == "none" else ImportanceWeighting(ratio, bound))
    fields = {f"kl_{name}": value for name, value in described.items()}
    by_term, by_fields = resolve_config(config(), term), config(**fields, kl_ratio=ratio, kl_ratio_bound=text)
    assert by_term.objective == by_fields.objective
    assert by_term.objective.term == term
    assert by_term.objective.exact == (term.estimator == "exact")
    assert config(**fields_of(term)).objective == by_fields.objective
    assert "objective" not in by_fields.to_dict()


def test_the_given_configuration_is_not_changed():
    args = config()
    found = resolve_config(args, KLTerm(level="token"))
    assert (found.kl_level, args.kl_level) == ("token", "sequence")
    assert args.objective.term == KLTerm()
    assert found.to_dict()["kl_level"] == "token"  # what is saved with a run is what is trained


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kl_level": "token"}, "kl_level='token'"),
        ({"kl_ratio_bound": "none"}, "kl_ratio_bound='none'"),
        ({"kl_cell": "k3-loss"}, "kl_cell='k3-loss'"),
        ({"kl_ratio": "prefix", "kl_ratio_bound": "truncate:3"}, "kl_ratio='prefix', kl_ratio_bound='truncate:3.0'"),
        ({"kl_estimator": "exact", "kl_discount": 0.9}, "kl_estimator='exact', kl_discount=0.9"),
    ],
)
def test_a_kl_that_is_declared_twice_is_refused(fields, named):
    with pytest.raises(MeaningError, match="must agree") as raised:
        resolve_config(config(**fields), KLTerm(discount=0.5))
    assert raised.value.received == f"kl={KLTerm(discount=0.5).name} and {named}"


def test_fields_that_agree_with_the_term_are_accepted():
    """Settings such as `rollout_lag` are checked when the configuration is written, and need the fields there."""
    weighted = KLTerm(weighting=ImportanceWeighting("prefix", Truncate(3.0)))
    lag = config(rollout_lag=1, kl_ratio="prefix", kl_ratio_bound="truncate:3")
    assert resolve_config(lag, weighted).objective.term == weighted
    exact = KLTerm(estimator="exact")
    assert resolve_config(config(kl_top_k=4, kl_estimator="exact"), exact).objective.term == exact


@pytest.mark.parametrize(
    ("fields", "kl", "said"),
    [
        ({}, "k1", r"`kl` as a KLTerm; received a .*remedy: write kl=KLTerm"),
        ({}, KLTerm(reduction="token"), r"reduction='token'; remedy: leave it out: .*`kl_reduction`"),
        (
            {"kl_placement": "advantage"},
            KLTerm(weighting=ImportanceWeighting("prefix", None)),
            "no `kl_ratio` with kl_placement='advantage'",
        ),
    ],
)
def test_a_term_that_does_not_fit_is_refused(fields, kl, said):
    with pytest.raises(MeaningError, match=said):
        resolve_config(config(**fields), kl)


def test_a_term_is_warned_of_as_its_fields_are():
    with pytest.warns(MeaningWarning, match="sync_ref_model"):
        resolve_config(config(sync_ref_model=True), KLTerm(level="token"))


@pytest.mark.slow
def test_a_term_and_its_fields_train_the_same_weights(tmp_path):
    term, fields = KLTerm(level="token", estimator="exact"), {"kl_level": "token", "kl_estimator": "exact"}
    runs = [
        tiny.trained(partial(KLTrainer, kl=kl), KLConfig, tmp_path, kl_coef=0.3, **given)
        for kl, given in ((term, {}), (None, fields), (None, {}))
    ]
    by_term, by_fields, other = runs
    assert by_term.objective == by_fields.objective
    assert tiny.logged(by_term, "loss") == tiny.logged(by_fields, "loss")
    assert torch.equal(tiny.weights(by_term), tiny.weights(by_fields))
    assert not torch.equal(tiny.weights(by_term), tiny.weights(other))


@pytest.mark.parametrize(
    "fields",
    [
        {"kl_level": "token", "kl_estimator": "k3"},
        {"kl_level": "token", "kl_estimator": "exact"},
        {"kl_estimator": "k3"},
        {"kl_estimator": "k3", "kl_ratio": "sequence", "kl_ratio_bound": "none"},
    ],
    ids=str,
)
def test_the_value_of_a_forward_kl_in_the_loss_is_the_forward_kl(fields):
    """Summed over each completion it is the estimate of the term; one completion is empty, one has a hole."""
    objective = KLConfig("unused", use_cpu=True, bf16=False, kl_divergence="forward", **fields).objective
    logp, ref, mu, kl = torch.rand(4, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    behavior = -mu if objective.is_weighted else None
    rollout = Rollout(-logp, -ref, mask, behavior, token_reverse_kl=9 * kl, token_forward_kl=kl)
    result = objective.term(rollout)
    found = per_token_loss(objective, rollout, result, slice(0, 3), rollout.logp)
    EXACT.check(found.sum() / 3, result.value.mean)
    assert not found[~mask.bool()].any()
