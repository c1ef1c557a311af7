"""A KL that is declared by a `KLTerm` is the one that the fields of a `KLConfig` declare."""

import pytest
import tiny
import torch
from tolerances import EXACT

from klgrad import Clip, ImportanceWeighting, KLTerm, Mask, Rollout, Truncate
from klgrad.errors import MeaningError
from klgrad.trl import KLConfig, KLTrainer
from klgrad.trl.config import declared, fields_of
from klgrad.trl.config_checks import MeaningWarning
from klgrad.trl.kl_trainer import per_token_loss

pytestmark = pytest.mark.filterwarnings("ignore")

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
    "truncated": (
        KLTerm(weighting=ImportanceWeighting("prefix", Truncate(1 + 1e-12))),
        {"kl_ratio": "prefix", "kl_ratio_bound": "truncate:1.000000000001"},
    ),
    "clipped": (
        KLTerm(weighting=ImportanceWeighting("sequence", Clip(0.5, 3.0))),
        {"kl_ratio": "sequence", "kl_ratio_bound": "clip:0.5:3"},
    ),
    "masked": (
        KLTerm(level="token", weighting=ImportanceWeighting("token", Mask(0.25, 2.0))),
        {"kl_level": "token", "kl_ratio": "token", "kl_ratio_bound": "mask:0.25:2"},
    ),
    "unbounded": (
        KLTerm(weighting=ImportanceWeighting("prefix", None)),
        {"kl_ratio": "prefix", "kl_ratio_bound": "none"},
    ),
}


def config(**settings):
    return KLConfig("unused", use_cpu=True, bf16=False, report_to=[], **settings)


@pytest.mark.parametrize("name", TERMS)
def test_a_term_is_what_its_fields_declare(name):
    term, fields = TERMS[name]
    by_term, by_fields = declared(config(), term), config(**fields)
    assert by_term.objective == by_fields.objective
    assert by_term.objective.term == term
    assert config(**fields_of(term)).objective == by_fields.objective


def test_the_given_configuration_is_not_changed():
    args = config()
    found = declared(args, KLTerm(level="token"))
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
        declared(config(**fields), KLTerm(discount=0.5))
    assert raised.value.received == f"kl={KLTerm(discount=0.5).name} and {named}"
    assert all(f"`{name}`" in raised.value.remedy for name in fields)


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
    assert declared(config(**fields), kl).objective.term == kl
    with pytest.raises(MeaningError, match="must agree"):
        declared(config(**fields), KLTerm(discount=0.5))


@pytest.mark.parametrize("kl", ["k1", {"level": "token"}, KLTerm])
def test_what_is_no_term_is_refused(kl):
    with pytest.raises(MeaningError, match=r"`kl` as a KLTerm; received a .*remedy: write kl=KLTerm"):
        declared(config(), kl)


def test_a_terms_own_reduction_is_refused():
    with pytest.raises(MeaningError, match=r"reduction='token'; remedy: leave it out: .*`kl_reduction`"):
        declared(config(), KLTerm(reduction="token"))


def test_settings_are_checked_against_the_term():
    with pytest.raises(MeaningError, match="no `kl_ratio` with kl_placement='advantage'"):
        declared(config(kl_placement="advantage"), KLTerm(weighting=ImportanceWeighting("prefix", None)))
    with pytest.warns(MeaningWarning, match="sync_ref_model"):
        declared(config(sync_ref_model=True), KLTerm(level="token"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("term", "fields"),
    [
        (KLTerm(baseline="leave_one_out", discount=0.5), {"kl_baseline": "leave_one_out", "kl_discount": 0.5}),
        (KLTerm(level="token", estimator="exact"), {"kl_level": "token", "kl_estimator": "exact"}),
    ],
)
def test_the_same_loss_and_the_same_weights(term, fields, tmp_path):
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
