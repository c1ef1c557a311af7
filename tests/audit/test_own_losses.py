"""Losses as users write them: every one of `data/losses.py` is audited, and its verdict is right."""

from functools import cache
from pathlib import Path

import pytest
import torch
from some import first
from tolerances import EXACT

from klgrad import KLTerm, zoo
from klgrad.audit import audit, load, load_every
from klgrad.audit.advice import GAPS, LENGTHS, MASKED, SHIFT, differences, notes
from klgrad.errors import LossCallError

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


AVERAGED = {"grpo_whole": ("unknown", "completion-mean"), "KDLoss": (FORWARD, "token-mean")}
"""Losses with a mean over tokens: the verdict and the unit."""


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGED)
def test_means_over_tokens(name):
    result = audit(load(f"{FILE}:{name}"))
    assert (result.verdict, result.anatomy.unit.name) == AVERAGED[name]
    assert result.anatomy.shares.keys() == {"forward-kl"}


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
    assert result.anatomy.leaks
    assert result.anatomy.shares == {f"{divergence}-kl": 1.0}
    assert result.advice.remedies[0] == MASKED
    assert "* mask" in str(result.advice)
    assert "length of each completion" not in str(result.advice)


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


def reward_to_go_past_the_mask(logp, ref_logp, mask):
    """The KL of masked positions is in the reward of the tokens before them."""
    to_go = (logp - ref_logp).detach().flip(-1).cumsum(-1).flip(-1)
    return (to_go * logp * mask).sum(-1).mean()


def total_past_the_mask(logp, ref_logp, mask):
    return ((logp - ref_logp).detach().sum(-1) * (logp * mask).sum(-1)).mean()


@pytest.mark.parametrize("loss", [reward_to_go_past_the_mask, total_past_the_mask])
def test_a_kl_that_leaks_from_masked_positions_is_told_to_mask_it(loss):
    result = audit(loss)
    assert (result.verdict, result.reads_masked, result.anatomy.leaks) == ("unknown", True, False)
    assert "the values at masked positions change its gradient" in str(result.advice)
    assert result.advice.remedies[0] == MASKED
    assert "length of each completion" not in str(result.advice)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("bound", [0.07, 0.13])
def test_a_clip_of_single_entries_is_not_told_to_change_its_lengths(direction, bound):
    def clipped(logits, ref_logits, mask):
        p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        entries = p.exp() * (p - q) if direction == "reverse" else q.exp() * (q - p)
        return (entries.clamp(max=bound).sum(-1) * mask).sum(-1).mean()

    result = audit(clipped)
    assert result.verdict == "unknown"
    assert not result.anatomy.proved
    assert "length" not in str(result.advice)


def test_a_division_by_lengths_is_told():
    def per_completion(logp, ref_logp, mask, power):
        return ((logp - ref_logp).detach().mul(mask).sum(-1) * (logp * mask).sum(-1) / mask.sum(-1) ** power).mean()

    for power in (1, 2):
        result = audit(per_completion, settings={"power": power})
        assert (result.anatomy.unit.name, result.anatomy.proved) == ("completion-mean", True)
        assert result.advice.remedies[0] == LENGTHS


def reward_on_the_last_token(logp, ref_logp, mask):
    """The place of the last token is taken to be the number of tokens."""
    reward = torch.zeros_like(logp)
    reward[torch.arange(len(logp)), mask.sum(-1) - 1] = ((logp - ref_logp).detach() * mask).sum(-1)
    return (reward.flip(-1).cumsum(-1).flip(-1) * logp * mask).sum(-1).mean()


def test_what_a_mask_with_gaps_changes_is_told():
    result = audit(reward_on_the_last_token)
    assert (result.verdict, result.stumbles_over_gaps) == ("reverse-kl-sequence", True)
    assert "masked positions inside a completion, such as the output of a tool, change its gradient" in str(
        result.advice
    )
    assert "masked gaps change it" in notes(result)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_filter_does_not_hide_a_gradient_on_padding(sign):
    def masked_where_the_log_ratio_has_a_sign(logp, ref_logp, mask):
        log_ratio = logp - ref_logp
        return (log_ratio**2 / 2 * (mask | (sign * log_ratio.detach() < 0))).sum() / len(logp)

    result = audit(masked_where_the_log_ratio_has_a_sign)
    assert result.anatomy.leaks
    assert result.verdict == "unknown"


def test_strict_is_about_gaps_and_empty_completions_too():
    def per_completion(logp, ref_logp, mask):
        return (((logp - ref_logp) ** 2 / 2 * mask).sum(-1) / mask.sum(-1)).mean()

    for loss, note in ((reward_on_the_last_token, "masked gaps change it"), (per_completion, "a completion is empty")):
        result = audit(loss)
        assert not differences(result, result.verdict)
        assert any(note in d.received for d in differences(result, result.verdict, strict=True))


def test_an_empty_completion_is_tried():
    def per_completion(logp, ref_logp, mask, least):
        return (((logp - ref_logp) ** 2 / 2 * mask).sum(-1) / mask.sum(-1).clamp(min=least)).mean()

    divided, safe = (audit(per_completion, settings={"least": least}) for least in (0, 1))
    assert (divided.finite_if_empty, safe.finite_if_empty) == (False, True)
    assert "it is no finite number if a completion is empty" in str(divided.advice)
    assert "empty" not in str(safe.advice)


@pytest.mark.parametrize("loss", [KLTerm(baseline="leave_one_out"), zoo.get("k1-reward")])
def test_gaps_and_empty_completions_do_not_change_the_losses_of_this_package(loss):
    result = audit(loss)
    assert (result.reads_masked, result.stumbles_over_gaps, result.finite_if_empty) == (False, False, True)


def kl_of_the_most_likely(logits, ref_logits, mask, k=100, of_teacher=False):
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    places = (q if of_teacher else p).topk(min(k, p.shape[-1]), -1).indices
    p, q = p.gather(-1, places), q.gather(-1, places)
    return ((p.exp() * (p - q)).sum(-1) * mask).sum() / mask.sum()


def kl_of_likely_samples(logits, logp, ref_logp, labels, k=20):
    """k2 where the sampled token is among the k most likely: the gradient passes through the log-probs alone."""
    mask = labels != -100
    places = logits.topk(min(k, logits.shape[-1]), -1).indices
    return ((logp - ref_logp) ** 2 / 2 * mask * (places == labels.clamp(min=0)[..., None]).any(-1)).sum(-1).mean()


@pytest.mark.parametrize("advantages", ["zero", "random"])
@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        (kl_of_the_most_likely, {}),
        (kl_of_the_most_likely, {"k": 500}),
        (kl_of_the_most_likely, {"of_teacher": True}),
        (kl_of_likely_samples, {}),
    ],
)
def test_a_list_of_the_most_likely_tokens_is_not_the_kl_of_all(loss, settings, advantages):
    result = audit(loss, settings=settings, advantages=advantages)
    assert (result.verdict, result.verdict_off_policy) == ("unknown", "unknown")
    assert result.anatomy.unexplained["a vocabulary of 512"] > result.anatomy.allowed
    if loss is kl_of_the_most_likely:
        assert result.anatomy.top_k == (settings.get("k", 100) if settings.get("k") != 500 else None)


def sampled_from_logits(logits, ref_logits, labels):
    mask, places = labels != -100, labels.clamp(min=0)[..., None]
    p, q = (x.log_softmax(-1).gather(-1, places)[..., 0] for x in (logits, ref_logits))
    return ((p - q) ** 2 / 2 * mask).sum(-1).mean()


@pytest.mark.parametrize(("loss", "settings"), [(kl_of_the_most_likely, {"k": 512}), (sampled_from_logits, {})])
def test_a_kl_of_all_tokens_keeps_its_verdict_in_a_large_vocabulary(loss, settings):
    result = audit(loss, settings=settings)
    assert (result.verdict, result.anatomy.top_k) == ("reverse-kl-token", None)


def test_the_error_of_too_many_tokens_says_how_many_there_are():
    def top(logits, ref_logits, mask, k=20):
        p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        return ((p.topk(k, -1).values - q.topk(k, -1).values).sum(-1) * mask).sum(-1).mean()

    with pytest.raises(LossCallError) as raised:
        audit(top)
    assert "logits of shape (8, 10, 4)" in str(raised.value)
    assert "the audit's vocabularies have 2 to 4 tokens: try --set k=2" in str(raised.value)


def test_a_mask_that_leaks_at_the_output_of_a_tool_is_told_to_mask_it():
    def of_what_comes_before_the_end(logp, ref_logp, mask):
        end = mask.flip(-1).cumsum(-1).flip(-1) > 0
        return ((logp - ref_logp) ** 2 / 2 * end).sum(-1).mean()

    result = audit(of_what_comes_before_the_end)
    assert (result.anatomy.leaks, result.leaks_at_gaps) == (False, True)
    assert result.to_dict()["anatomy"]["masked_tokens_leak"]
    assert "touches masked gaps" in notes(result)
    assert result.advice.remedies[0] == MASKED


def test_what_takes_a_place_in_the_row_for_a_count_is_told_to_use_the_mask():
    result = audit(reward_on_the_last_token)
    assert not result.leaks_at_gaps
    assert result.advice.remedies[0] == GAPS


def test_a_late_reference_is_not_told_to_mask():
    def shifted(logp, ref_logp, mask):
        return ((logp[:, 1:] - ref_logp[:, :-1]) ** 2 / 2 * mask[:, 1:]).sum(-1).mean()

    result = audit(shifted)
    assert notes(result) == ["ref one token off"]
    assert [remedy for remedy in result.advice.remedies if not remedy.use] == [SHIFT]
