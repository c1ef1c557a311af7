"""The audit of whole policy losses: the declared parts, losses composed of known parts, and what is told as no part."""

import json
import random
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO

import pytest
import torch
from rich.console import Console
from tolerances import EXACT

from klgrad.audit import audit
from klgrad.audit.page import policies_to_html
from klgrad.audit.policy import audit_whole
from klgrad.audit.policy_sentences import cells_of, in_full, report, to_markdown
from klgrad.audit.sentences import summary
from klgrad.audit.terminal import to_json
from klgrad.policy_losses import ONE, POLICY_LOSSES, PolicyParts, R, Weight, clipped

HELD = {"dppo": "probability"}
"""Published losses that are no function of the ratio and the advantage."""


@cache
def published(name):
    return audit_whole(POLICY_LOSSES[name])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_published_loss_has_the_parts_that_it_declares(name):
    r = published(name)
    assert r.policy.parts == POLICY_LOSSES[name].parts
    assert r.policy.parts.depends_on == HELD.get(name, "")
    assert r.policy.proved == (name not in HELD)
    if r.policy.proved:
        assert max(r.policy.unexplained.values()) <= EXACT.rtol
    assert (r.kl_verdict, r.kl_verdict_off_policy) == ("nothing", "nothing")
    assert r.summary
    assert r.source


# Losses that are composed of random parts, as a user would write them, and the parts that the audit must find

RATIOS = ("none", "token", "prefix", "sequence", "mean")
BASELINES = ("none", "group-mean", "leave-one-out", "batch-mean", "batch-leave-one-out")
UNITS = ("sum", "completion-mean", "token-mean", "fixed-length")
KLS = {None: "nothing", "k2": "reverse-kl-token", "k3": "forward-kl-token"}


@dataclass(frozen=True)
class Recipe:
    """A policy loss and, as `parts`, what it is made of; `rows`, `population`, `epsilon` and `kl` are further parts."""

    parts: PolicyParts
    rows: bool = True
    population: bool = False
    epsilon: float = 0.0
    kl: str | None = None

    def __call__(self, logp, ref_logp, behavior_logp, mask, rewards, group):
        p = self.parts
        log_ratio = torch.where(mask, (logp - behavior_logp).detach(), 0)
        total = log_ratio.sum(-1, keepdim=True)
        length = mask.sum(-1, keepdim=True)
        logs = {
            "none": torch.zeros_like(log_ratio),
            "token": log_ratio,
            "prefix": log_ratio.cumsum(-1),
            "sequence": total,
            "mean": total / length,
        }[p.ratio]
        advantage = self.advantages(rewards, group)[:, None]
        weight = torch.where(advantage > 0, bounded(p.positive, logs.exp()), bounded(p.negative, logs.exp()))
        per_token = torch.where(mask, -advantage * weight * logp, 0)
        if p.unit == "token-mean":
            loss = per_token.sum() / mask.sum()
        else:
            per_row = per_token.sum(-1)
            per_row = per_row / length[:, 0] if p.unit == "completion-mean" else per_row
            per_row = per_row / mask.shape[1] if p.unit == "fixed-length" else per_row
            loss = per_row.mean() if self.rows else per_row.sum()
        l = logp - ref_logp
        kl = {None: 0 * l, "k2": l**2 / 2, "k3": (-l).exp() - 1 + l}[self.kl]
        return loss + 0.1 * torch.where(mask, kl, 0).sum(-1).mean()

    def advantages(self, rewards, group):
        p, alike = self.parts, (group[:, None] == group[None, :]).double()
        everyone = torch.ones_like(alike)
        peers = everyone if "batch" in p.baseline else alike
        if "leave" in p.baseline:
            peers = peers - torch.eye(len(peers))
        mean = 0.0 if p.baseline == "none" else peers @ rewards / peers.sum(-1)
        if p.divided == "none":
            return rewards - mean
        peers = everyone if p.divided == "batch" else alike
        n = peers.sum(-1)
        variance = (peers @ rewards**2 / n - (peers @ rewards / n) ** 2).clamp(min=0)
        deviation = (variance * (1 if self.population else n / (n - 1))).sqrt()
        return (rewards - mean) / (deviation + self.epsilon)


def bounded(weight, ratio):
    """By comparisons of the ratio itself, and not by the class that the audit uses."""
    value = ratio if weight.inside == "r" else torch.ones_like(ratio)
    if weight.low is not None:
        value = torch.where(ratio < weight.low, weight.below, value)
    if weight.high is not None:
        value = torch.where(ratio > weight.high, weight.above, value)
    return weight.factor * value


def draw_weights(rng):
    """A weight for each sign of the advantage."""
    low, high = round(rng.uniform(0.1, 0.95), 3), round(rng.uniform(1.05, 8), 3)
    kinds = {
        "free": (Weight(), Weight()),
        "ppo": (Weight(high=high), Weight(low=low)),
        "dual": (Weight(high=high), Weight(low=low, high=high + 2)),
        "truncate": (Weight(high=high, above=high),) * 2,
        "clip": (Weight(low=low, below=low, high=high, above=high),) * 2,
        "mask": (Weight(low=low, high=high),) * 2,
        "mask above": (Weight(high=high),) * 2,
        "band": (Weight("1", low=low, high=high),) * 2,
        "narrow": (Weight(high=1.0004), Weight(low=0.9997)),
        "one sign": (Weight(high=high), Weight("1", factor=0.0)),
        "less": (Weight(), Weight(factor=0.25)),
    }
    return kinds[rng.choice(list(kinds))]


def draw(seed):
    """A random recipe."""
    rng = random.Random(seed)
    ratio, baseline = rng.choice(RATIOS), rng.choice(BASELINES)
    up, down = (ONE, ONE) if ratio == "none" else draw_weights(rng)
    divided = rng.choice(("none", "none", "group", "batch"))
    unit = rng.choice(UNITS)
    return Recipe(
        PolicyParts(ratio, up, down, baseline, divided, unit),
        rows=unit == "token-mean" or rng.random() < 0.8,
        population=divided != "none" and rng.random() < 0.5,
        epsilon=rng.choice((1e-4, 1e-2)) if divided != "none" else 0.0,
        kl=rng.choice(list(KLS)),
    )


def mutate(recipe, seed):
    """The recipe with one part changed, and the name of that part."""
    rng, p = random.Random(seed), recipe.parts
    others = lambda options, now: rng.choice([x for x in options if x != now])
    changes = {
        "baseline": lambda: replace(p, baseline=others(BASELINES, p.baseline)),
        "unit": lambda: replace(p, unit=others(UNITS[:2], p.unit)),
        "positive": lambda: replace(p, ratio="token", positive=Weight(high=1.37)),
        "ratio": lambda: replace(p, ratio=others(RATIOS[1:], p.ratio)),
    }
    name = rng.choice([n for n in changes if n != "ratio" or p.ratio != "none"])
    parts = changes[name]()
    if name == "positive" and p.ratio == "none":
        parts = replace(parts, negative=Weight())
    return replace(recipe, parts=parts, rows=recipe.rows or parts.unit == "token-mean"), name


def statements(r):
    """Every part of a result that a recipe has."""
    a = r.policy
    return {
        **{name: getattr(a.parts, name) for name in ("ratio", "positive", "negative", "baseline", "divided", "unit")},
        "rows": a.unit.rows,
        "population": a.population if a.parts.divided != "none" else False,
        "epsilon": round(a.epsilon, 9),
        "kl": r.kl_verdict,
        "proved": a.proved,
    }


def expected(recipe):
    p = recipe.parts
    return {
        **{name: getattr(p, name) for name in ("ratio", "positive", "negative", "baseline", "divided", "unit")},
        "rows": recipe.rows,
        "population": recipe.population,
        "epsilon": recipe.epsilon,
        "kl": KLS[recipe.kl],
        "proved": True,
    }


@pytest.mark.parametrize(
    "seed", [*range(6), 62, *(pytest.param(seed, marks=pytest.mark.many) for seed in range(6, 100) if seed != 62)]
)
def test_a_composed_loss_is_taken_apart_into_exactly_its_parts(seed):
    recipe = draw(seed)
    assert statements(audit_whole(recipe, name="composed")) == expected(recipe)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.many) for seed in range(3, 25))])
def test_a_part_that_is_changed_turns_the_report(seed):
    recipe = draw(seed)
    changed, name = mutate(recipe, seed)
    before, after = (audit_whole(x, name="composed") for x in (recipe, changed))
    assert statements(after) == expected(changed)
    assert statements(after)[name] != statements(before)[name]
    label = {"baseline": "advantages", "positive": "weight"}.get(name, name)
    assert dict(report(after))[label] != dict(report(before))[label]


# Single parts


def token_sum(x, mask):
    return torch.where(mask, x, 0).sum(-1).mean()


def reinforce_with_k2(logp, ref_logp, mask, advantages):
    return token_sum(-advantages * logp + 0.1 * (logp - ref_logp) ** 2 / 2, mask)


def k3_per_completion(logp, ref_logp, mask, advantages):
    away = ref_logp - logp
    mean = (torch.where(mask, away.exp() - 1 - away, 0).sum(-1) / mask.sum(-1)).mean()
    return mean + token_sum(-advantages * logp, mask)


def dro(logp, old_logp, mask, advantages):
    return token_sum(-advantages * logp + (logp - old_logp) ** 2 / 2, mask)


@pytest.mark.parametrize("loss", [reinforce_with_k2, k3_per_completion, dro])
def test_the_kl_beside_the_policy_loss_is_that_of_its_audit_in_the_same_words(loss):
    whole, alone = audit_whole(loss), audit(loss)
    assert (whole.kl_verdict, whole.kl_verdict_off_policy) == (alone.verdict, alone.verdict_off_policy)
    assert summary(alone.anatomy) in cells_of(whole)[-1]
    assert summary(alone.anatomy, on_policy=False) in dict(report(whole))["KL"]
    assert whole.policy.proved


def test_a_pull_to_the_sampler_at_every_advantage_is_a_kl_and_no_drift():
    r = audit_whole(dro)
    assert "to the sampler" in cells_of(r)[-1]
    assert [(d.size, d.towards_sampler) for d in r.policy.drift] == [pytest.approx((1, 1)), pytest.approx((1, -1))]


def test_the_wrong_sign_is_told():
    r = audit_whole(lambda logp, mask, advantages: token_sum(advantages * logp, mask))
    assert r.policy.scale == -1
    assert "the sign is wrong" in dict(report(r))["fresh samples"]
    assert [d.towards_sampler for d in r.policy.drift] == pytest.approx([-1, 1])


def test_the_size_of_the_advantage_alone_is_a_weight_of_the_other_sign():
    r = audit_whole(lambda logp, mask, advantages: token_sum(-advantages.abs() * logp, mask))
    assert r.policy.parts.negative == Weight("1", factor=-1.0)
    assert "weighted 1 if positive, -1 if not" in dict(report(r))["fresh samples"]


def test_a_loss_that_ignores_the_mask_is_not_proved():
    r = audit_whole(lambda logp, advantages: (-advantages * logp).sum(-1).mean())
    assert r.policy.leaks
    assert not r.policy.proved
    assert "masked positions" in dict(report(r))["proved"]


def test_a_loss_without_advantages_has_no_update_and_its_kl():
    r = audit_whole(lambda logp, mask: token_sum(logp, mask))
    assert r.policy.is_nothing
    assert dict(report(r))["update"] == "none: no advantage has an effect"
    assert "climbs KL(μ‖π)" in dict(report(r))["KL"]


def test_rewards_that_are_bent_are_not_the_advantages():
    def bent(logp, mask, rewards):
        bent = rewards + 0.01 * rewards**2
        return token_sum(-(bent - bent.mean())[:, None] * logp, mask)

    r = audit_whole(bent)
    assert r.policy.parts.baseline == "other"
    assert not r.policy.proved
    assert dict(report(r))["fresh samples"] == "none that is known"


def test_a_smooth_weight_is_a_curve_of_its_own_and_proved():
    def sapo(logp, old_logp, mask, advantages):
        ratio = (logp - old_logp).exp()
        rate = torch.where(advantages > 0, 1.0, 1.05)
        return token_sum(-advantages * torch.sigmoid(rate * (ratio - 1)) * 4 / rate, mask)

    r = audit_whole(sapo)
    assert (r.policy.parts.positive.inside, r.policy.parts.ratio) == ("other", "token")
    assert r.policy.proved
    log_ratio, (up, _) = r.policy.curve()
    gate = torch.sigmoid(log_ratio.exp() - 1)
    EXACT.check_vector(up, 4 * gate * (1 - gate) * log_ratio.exp())
    assert "a curve of its own" in dict(report(r))["weight"]


@pytest.mark.parametrize("bound", [25.0, 1000.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_bound_that_no_sampled_ratio_reaches_is_found(level, bound):
    def masked_ratio(logp, old_logp, mask, advantages):
        log_ratio = (logp.detach() - old_logp) * mask
        ratio = (log_ratio if level == "token" else log_ratio.sum(-1, keepdim=True)).exp()
        return token_sum(-ratio * (ratio < bound) * advantages * logp, mask)

    assert audit_whole(masked_ratio).policy.parts == PolicyParts(level, *(Weight(high=bound),) * 2)


def test_a_ratio_in_float32_is_read_to_its_digits():
    def single(logp, old_logp, mask, advantages):
        ratio = (logp.float() - old_logp.float()).exp()
        return token_sum(clipped(ratio, advantages.float(), 0.2, 0.28), mask)

    r = audit_whole(single)
    assert r.policy.parts == PolicyParts("token", Weight(high=1.28), Weight(low=0.8))
    assert r.policy.proved


# What is no function of one ratio and the advantage


def decoupled(logp, old_logp, behavior_logp, mask, advantages):
    return token_sum(clipped((logp - old_logp).exp(), advantages, 0.2, 0.2) * (old_logp - behavior_logp).exp(), mask)


def test_two_ratios_to_two_policies_are_told():
    r = audit_whole(decoupled)
    assert r.policy.compares == ("old", "behavior")
    assert "with old_logp and with behavior_logp" in dict(report(r))["ratio"]
    assert published("ppo-clip").policy.compares == ("old",)
    assert published("token-is").policy.compares == ("behavior",)


def token_ratio_of_kept_completions(logp, behavior_logp, mask, advantages):
    log_ratio = torch.where(mask, (logp - behavior_logp).detach(), 0)
    keep = (log_ratio.sum(-1, keepdim=True).exp() < 2).to(logp)
    return token_sum(-log_ratio.exp() * keep * advantages * logp, mask)


def unsure_tokens_only(logp, mask, advantages):
    return token_sum(-advantages * logp * (logp.detach() < -0.5), mask)


def whole_vocabulary(logits, logp, mask, advantages):
    return token_sum(-advantages * (logp + 0.1 * logits.log_softmax(-1).square().sum(-1)), mask)


@pytest.mark.parametrize(
    ("loss", "other"),
    [
        (token_ratio_of_kept_completions, "several ratios"),
        (unsure_tokens_only, "probability"),
        (whole_vocabulary, "vocabulary"),
    ],
)
def test_what_is_no_function_of_the_ratio_is_told_with_its_share(loss, other):
    r = audit_whole(loss)
    assert r.policy.parts.depends_on == other
    assert not r.policy.proved
    rows = dict(report(r))
    assert rows["proved"].startswith("no: ")
    assert "%" in rows["proved"]
    assert rows["stale samples"].startswith("not proved")


def test_a_deviation_without_a_small_number_is_told():
    def bare(logp, mask, rewards, group):
        by_group = rewards.view(-1, int((group == 0).sum()))
        made = (by_group - by_group.mean(-1, keepdim=True)) / by_group.std(-1, keepdim=True)
        return token_sum(-made.flatten()[:, None] * logp, mask)

    r = audit_whole(bare)
    assert (r.policy.parts.divided, r.policy.epsilon, r.policy.finite_if_equal) == ("group", 0, False)
    assert "add a small number to the deviation" in dict(report(r))["beside it"]
    # Where all completions of a group are equal, its expected gradient is NaN.
    assert [gap for name, gap in r.policy.unexplained.items() if name.startswith("every outcome")] == [1.0, 1.0]
    assert not r.policy.proved


def test_a_loss_that_is_random_or_not_finite_is_told():
    noisy = audit_whole(lambda logp, mask, advantages: token_sum(-advantages * logp * torch.rand(()), mask))
    assert "different each time" in dict(report(noisy))["update"]
    broken = audit_whole(lambda logp, mask, advantages: token_sum(-advantages * logp / 0.0, mask))
    assert "NaN or infinite" in dict(report(broken))["update"]
    assert cells_of(broken)[1] == "not told"


# Drift, by fact 23


@pytest.mark.parametrize("name", ["token-is", "sequence-is", "score-centering", "rloo", "grpo"])
def test_what_removes_the_drift(name):
    assert [d.size for d in published(name).policy.drift] == [0, 0]
    assert dict(report(published(name)))["drift"] == "none"


@pytest.mark.parametrize("name", ["token-tis", "sequence-mis", "icepop", "product-mask", "ppo-clip", "dppo"])
def test_a_bound_removes_it_in_part(name):
    assert all(0.01 < d.size < 0.9 for d in published(name).policy.drift)
    assert "%" in dict(report(published(name)))["drift"]


def test_without_a_ratio_it_is_that_to_the_sampler_in_proportion():
    drift = published("reinforce").policy.drift
    assert [d.size for d in drift] == pytest.approx([1, 1])
    assert [d.towards_sampler for d in drift] == pytest.approx([1, -1])
    assert dict(report(published("reinforce")))["drift"] == "A > 0: to μ; A < 0: away from μ"


# The outputs


def test_json_has_the_parts_the_curve_the_drift_and_the_proof():
    (found,) = json.loads(to_json([published("dapo")]))["results"]
    policy = found["policy"]
    assert (policy["ratio"], policy["positive"]["high"], policy["baseline"]) == ("token", 1.28, "group-mean")
    assert policy["proved"]
    assert len(policy["curve"]["ratio"]) == len(policy["curve"]["positive"])
    assert policy["drift"]["positive"] == {"size": 0.0, "towards_sampler": 0.0}
    assert found["kl"] == {"verdict": "nothing", "verdict_off_policy": "nothing", "anatomy": None}


def test_the_report_the_table_and_the_page_say_the_same():
    r = published("grpo")
    with Console(width=400, record=True, file=StringIO()) as console:
        console.print(in_full(r))
    text, page = console.export_text(), policies_to_html([r], {"other": "why <not>"})
    for label, sentence in report(r):
        assert f"{label} " in text
        assert sentence in text
        assert sentence.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;") in page
    assert "why &lt;not&gt;" in page
    assert page.count('class="line') == 4  # two curves and their keys
    assert to_markdown([r]).count("\n") == 3
    assert "| A > 0: r, 0 above 1.2; A < 0: r, 0 below 0.8 |" in to_markdown([r])


def test_the_weights_of_the_registry_are_those_of_its_names():
    assert published("token-is").policy.parts == PolicyParts("token", R, R)
    assert published("reinforce").policy.parts == PolicyParts("none", ONE, ONE)
