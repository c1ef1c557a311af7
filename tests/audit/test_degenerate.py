"""Losses that are zero, infinite, huge, tiny or random, on some batches or on all: an answer, never a crash."""

import math
import random
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from some import first

from klgrad.audit import audit
from klgrad.audit.page import to_html
from klgrad.audit.subject import as_subject
from klgrad.audit.terminal import in_full, overview, to_json, to_markdown


def k2(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum(-1).mean()


def k3(logp, ref_logp, mask):
    return (((ref_logp - logp).exp() - 1 + logp) * mask).sum(-1).mean()


def audited(loss, **settings):
    """The losses here treat the rows of a group alike, which saves calls."""
    return audit(replace(as_subject(loss, "degenerate"), exchangeable=True), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_without_gradient_for_one_batch_shape_the_verdict_does_not_hold_always(rows):
    result = audited(lambda logp, ref_logp, mask: k2(logp, ref_logp, mask) * (len(logp) != rows))
    assert not result.anatomy.proved
    assert "always" not in (result.holds, result.holds_off_policy)
    assert result.variance is None or math.isfinite(result.variance)


@pytest.mark.slow
def test_another_target_for_one_batch_shape_is_seen_at_any_scale():
    """A scale per shape is free; a shape where the loss is small must not be lost beside the others."""

    def loss(logp, ref_logp, mask):
        return k3(logp, ref_logp, mask) if len(logp) == 3 else 1e9 * k2(logp, ref_logp, mask)

    result = audited(loss)
    assert (result.verdict, result.anatomy.proved) == ("unknown", False)


@pytest.mark.slow
def test_with_random_advantages_a_reference_that_acts_through_them_is_seen():
    def loss(logp, ref_logp, mask, advantages):
        return (0.5 * (logp - ref_logp) ** 2 * (advantages > 0) * mask).sum(-1).mean()

    result = audited(loss, advantages="random")
    assert result.depends_on_reference
    assert not audited(loss).depends_on_reference  # without advantages it has no gradient at all


@pytest.mark.slow
@pytest.mark.parametrize("scale", first([1e200, 1e-200, 1e-6, 1e6], 2))
@pytest.mark.parametrize("advantages", first(["zero", "random"], 1))
def test_a_scale_of_any_size_is_a_scale(scale, advantages):
    result = audited(lambda logp, ref_logp, mask: scale * k2(logp, ref_logp, mask), advantages=advantages)
    assert result.verdict == "reverse-kl-token"
    assert result.scale == pytest.approx(scale, rel=1e-9)
    assert result.variance == pytest.approx(audited(k2).variance, rel=1e-9)
    assert "NaN" not in str(result.advice)
    if scale == 1e200:
        assert "overflows in float32" in str(result.advice)


@pytest.mark.slow
def test_a_gradient_without_mean_is_nothing_at_any_scale():
    for scale in (1e200, 1e-200):
        result = audited(lambda logp, mask, scale=scale: scale * (logp * mask).sum(-1).mean())
        assert result.verdict == "nothing"
        assert str(result.advice).startswith("Regularises nothing: ref has no effect")


@pytest.mark.slow
def test_what_is_off_by_little_is_not_off_by_nothing():
    def loss(logp, ref_logp, mask):
        return k2(logp, ref_logp, mask) + 2e-4 * k3(logp, ref_logp, mask)

    result = audited(loss)
    assert result.verdict == "sum-of-targets"
    assert result.anatomy.shares == pytest.approx({"reverse-kl": 1.0, "forward-kl": 2e-4})


# What random losses are composed of. Each part is a function of the batch and of a seeded generator.
VALUES = {
    "k1": lambda b: b["logp"] - b["ref_logp"],
    "k2": lambda b: 0.5 * (b["logp"] - b["ref_logp"]) ** 2,
    "k3": lambda b: (b["ref_logp"] - b["logp"]).exp() - 1 + b["logp"] - b["ref_logp"],
    "detached": lambda b: (b["logp"] - b["ref_logp"]).detach(),
    "integers": lambda b: (b["logp"] - b["ref_logp"]).round().long(),
    "constant": lambda b: torch.ones_like(b["logp"]),
    "reward": lambda b: (b["logp"] - b["ref_logp"]).detach() * b["logp"],
    "advantages": lambda b: b["advantages"] * b["logp"],
    "whitened": lambda b: _whitened(b["logp"] - b["ref_logp"]).detach() * b["logp"],
    "root": lambda b: (b["logp"] - b["ref_logp"]).abs().sqrt(),
    "quotient": lambda b: b["logp"] / (b["logp"] - b["ref_logp"]),
    "step": lambda b: (b["logp"] > b["ref_logp"]).double(),
    "random": lambda b: b["logp"] * torch.rand(()),
    "exact": lambda b: b["token_reverse_kl"],
}
WHERE = {
    "live": lambda b: b["mask"],
    "padding": lambda b: ~b["mask"],
    "everywhere": lambda b: torch.ones_like(b["mask"]),
    "first token": lambda b: torch.arange(b["mask"].shape[1]) == 0,
    "first row": lambda b: (torch.arange(len(b["mask"])) == 0)[:, None].expand_as(b["mask"]),
    "never": lambda b: torch.zeros_like(b["mask"]),
    "far": lambda b: (b["logp"] - b["ref_logp"]).abs() > 6,
}
FACTORS = (1.0, -1.0, 0.0, 1e200, 1e-200, 1e300, 1e-310, math.inf, math.nan, 3)
WHEN = {
    "always": lambda b: True,
    "pairs": lambda b: len(b["mask"]) == 2,
    "not pairs": lambda b: len(b["mask"]) != 2,
    "long": lambda b: b["mask"].shape[1] > 3,
    "full": lambda b: bool(b["mask"].all()),
    "single": lambda b: b["logp"].dtype == torch.float32,
    "seldom": lambda b: float(b["logp"].detach().sum()) < -6,
}


def _whitened(x):
    return (x - x.mean()) / x.std()


def composed(seed):
    """A random loss of one to three parts, and its recipe."""
    choose = random.Random(seed)
    pick = lambda options: choose.choice(list(options))
    parts = [(pick(VALUES), pick(WHERE), pick(WHEN), pick(FACTORS), pick(FACTORS)) for _ in range(choose.randint(1, 3))]
    scalar = choose.random() < 0.5

    def loss(**b):
        total = torch.zeros_like(b["logp"])
        for value, where, when, then, otherwise in parts:
            factor = then if WHEN[when](b) else otherwise
            total = total + factor * torch.where(WHERE[where](b), VALUES[value](b), 0)
        return total.sum() / len(total) if scalar else total

    return loss, f"{seed}: {parts}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(range(24), 4))
def test_a_random_loss_has_an_answer(seed):
    loss, recipe = composed(seed)
    subject = replace(as_subject(loss, "composed"), exchangeable=True)
    torch.manual_seed(seed)
    check(subject, "random" if seed % 3 == 0 else "zero", recipe)


def check(subject, advantages, recipe):
    result = audit(subject, advantages=advantages)
    assert result.anatomy.proved_fresh or result.verdict == "unknown", recipe
    assert result.anatomy.proved or result.verdict_off_policy == "unknown", recipe
    assert result.variance is None or math.isfinite(result.variance), recipe
    # Whatever was found can be shown.
    to_json([result])
    to_markdown([result])
    to_html([result])
    console = Console(file=None, quiet=True, width=150)
    console.print(in_full(result, subject, 150), overview([result], 150))
