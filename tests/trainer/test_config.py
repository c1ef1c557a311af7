"""What a `KLConfig` declares, and what it refuses before anything is loaded."""

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

TERMS = {
    "default": (KLTerm(), {}),
    "token": (KLTerm(level="token"), {"kl_level": "token"}),
    "forward": (
        KLTerm(divergence="forward", level="token", estimator="k3"),
        {"kl_divergence": "forward", "kl_level": "token", "kl_estimator": "k3"},
    ),
    "exact": (
        KLTerm(estimator="exact", discount=0.9, baseline="leave_one_out"),
        {"kl_estimator": "exact", "kl_discount": 0.9, "kl_baseline": "leave_one_out"},
    ),
    "bounded": (KLTerm(influence_bound=0.1), {"kl_influence_bound": 0.1}),
    "clipped": (
        KLTerm(weighting=ImportanceWeighting("sequence", Clip(0.5, 3.0))),
        {"kl_ratio": "sequence", "kl_ratio_bound": "clip:0.5:3"},
    ),
    "masked": (
        KLTerm(level="token", weighting=ImportanceWeighting("token", Mask(0.25, 2.0))),
        {"kl_level": "token", "kl_ratio": "token", "kl_ratio_bound": "mask:0.25:2"},
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_term_is_what_its_fields_declare(name):
    term, fields = TERMS[name]
    by_term, by_fields = resolve_config(config(), term), config(**fields)
    assert by_term.objective == by_fields.objective
    assert by_term.objective.term == term
    assert config(**fields_of(term)).objective == by_fields.objective


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
        (
            {"kl_estimator": "exact", "kl_baseline": "leave_one_out"},
            "kl_estimator='exact', kl_baseline='leave_one_out'",
        ),
    ],
)
def test_a_kl_that_is_declared_twice_is_refused(fields, named):
    with pytest.raises(MeaningError) as raised:
        resolve_config(config(**fields), KLTerm(discount=0.5))
    assert raised.value.received == f"kl={KLTerm(discount=0.5).name} and {named}"


@pytest.mark.parametrize(
    ("fields", "kl"),
    [
        (
            {"rollout_lag": 1, "kl_ratio": "prefix", "kl_ratio_bound": "truncate:3"},
            KLTerm(weighting=ImportanceWeighting("prefix", Truncate(3.0))),
        ),
        ({"kl_top_k": 4, "kl_estimator": "exact"}, KLTerm(estimator="exact")),
    ],
)
def test_fields_that_agree_with_the_term_are_accepted(fields, kl):
    """Settings such as `rollout_lag` are checked when the configuration is written, and need the fields there."""
    assert resolve_config(config(**fields), kl).objective.term == kl
    with pytest.raises(MeaningError, match="must agree"):
        resolve_config(config(**fields), KLTerm(discount=0.5))


def test_what_is_no_term_is_refused():
    with pytest.raises(MeaningError, match=r"`kl` as a KLTerm; received a .*remedy: write kl=KLTerm"):
        resolve_config(config(), "k1")


def test_a_terms_own_reduction_is_refused():
    with pytest.raises(MeaningError, match=r"reduction='token'; remedy: leave it out: .*`kl_reduction`"):
        resolve_config(config(), KLTerm(reduction="token"))


def test_settings_are_checked_against_the_term():
    with pytest.raises(MeaningError, match="no `kl_ratio` with kl_placement='advantage'"):
        resolve_config(config(kl_placement="advantage"), KLTerm(weighting=ImportanceWeighting("prefix", None)))
    with pytest.warns(MeaningWarning, match="sync_ref_model"):
        resolve_config(config(sync_ref_model=True), KLTerm(level="token"))


@pytest.mark.slow
def test_a_term_and_its_fields_train_the_same_weights(tmp_path):
    term, fields = KLTerm(level="token", estimator="exact"), {"kl_level": "token", "kl_estimator": "exact"}
    runs = []
    for kl, given in ((term, {}), (None, fields), (None, {})):
        args = KLConfig(str(tmp_path), kl_coef=0.3, **tiny.SETTINGS, **given)
        trainer = KLTrainer(
            tiny.folder(), tiny.reward, args, kl=kl, train_dataset=tiny.prompts(), processing_class=tiny.tokenizer()
        )
        trainer.train()
        runs.append((trainer.objective, tiny.logged(trainer, "loss"), tiny.weights(trainer)))
    by_term, by_fields, other = runs
    assert by_term[:2] == by_fields[:2]
    assert torch.equal(by_term[2], by_fields[2])
    assert not torch.equal(by_term[2], other[2])


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
