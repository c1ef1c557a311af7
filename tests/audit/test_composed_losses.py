"""Verdicts hold on problems that the audit has not seen, by sums that share no code with it (`scripts/hunt losses`)."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from some import first
from tolerances import DIFFERENCE

from klgrad.audit import audit

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "hunt"))

import composed_losses  # pyright: ignore[reportMissingImports]
import worlds  # pyright: ignore[reportMissingImports]
from compositions import Recipe, composed  # pyright: ignore[reportMissingImports]

SUM_OF_REWARDS = Recipe(loss=None, reward="k1", horizon="whole")


@cache
def audited(recipe):
    return audit(composed(recipe))


def false_statements(recipe, result):
    return [x.statement for x in composed_losses.check(recipe, result) if x.kind == "false"]


VERDICTS = {
    # On stale samples later tokens are the sampler's, so that only a sum over the whole completion descends L²/2.
    replace(SUM_OF_REWARDS, horizon="to-go"): "reverse-kl-sequence",
    Recipe(loss="exact", reward="exact", horizon="later"): "reverse-kl-sequence",
    replace(SUM_OF_REWARDS, horizon="to-go", ratio="prefix"): "reverse-kl-sequence",
    # The mean that is subtracted has the ratios of the other completions and not that of the token.
    replace(SUM_OF_REWARDS, horizon="to-go", baseline="group", ratio="prefix", inside=True): "reverse-kl-sequence",
    Recipe(loss="k3", factor=-1.0): "climbs forward-kl-token",
    Recipe(divide="tokens"): "reverse-kl-token",
    Recipe(loss="exact", ratio="before"): "reverse-kl-token",
    Recipe(loss="exact", reward="exact", horizon="later", baseline="leave-one-out"): "reverse-kl-sequence",
    replace(SUM_OF_REWARDS, baseline="leave-one-out", reduce="sum"): "reverse-kl-sequence",
    replace(SUM_OF_REWARDS, reward="k3"): "sum-of-targets",
    # Right on the narrow problems of large batches, and wrong elsewhere.
    Recipe(weight="unsure", level=0.6): "unknown",
    Recipe(loss="exact", weight="entropy"): "unknown",
    Recipe(loss="k1", weight="unsure", level=0.6): "unknown",
    Recipe(ratio="token", bound="truncate", at=25.0): "reverse-kl-token",
    # The mean of a group shrinks the future alone.
    Recipe(loss="exact", reward="exact", horizon="later", baseline="group"): "unknown",
    Recipe(loss="exact-bounded", reward="k3", number=3.9, horizon="later"): "unknown",
    Recipe(rows="even"): "unknown",
    Recipe(loss=None, reward="k1", baseline="leave-one-out", spread="batch", epsilon=0.0001, rows="even"): "unknown",
    # The direction of a target at a strength that grows with the KL.
    Recipe(outer="square"): "unknown",
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", first(VERDICTS, 9), ids=str)
def test_verdicts_hold_on_other_problems(recipe):
    result = audited(recipe)
    assert result.verdict == VERDICTS[recipe]
    assert false_statements(recipe, result) == []


@pytest.mark.parametrize(
    ("recipe", "wrong", "statement"),
    [
        (Recipe(), {"verdict": "forward-kl-token"}, "verdict=forward-kl-token (always)"),
        (Recipe(), {"verdict": "climbs reverse-kl-token"}, "verdict=climbs reverse-kl-token (always)"),
        (Recipe(), {"verdict": "nothing"}, "verdict=nothing (always)"),
        (
            Recipe(),
            {"verdict_off_policy": "reverse-kl-token-sampler"},
            "verdict_off_policy=reverse-kl-token-sampler (always)",
        ),
        (Recipe(divide="tokens"), {"holds": "always"}, "verdict=reverse-kl-token (always)"),
        (
            Recipe(weight="unsure", level=0.6),
            {"verdict": "reverse-kl-token", "holds": "large-batches"},
            "verdict=reverse-kl-token (large-batches)",
        ),
        (
            Recipe(outer="square"),
            {"verdict": "reverse-kl-token", "holds": "large-batches"},
            "verdict=reverse-kl-token (large-batches)",
        ),
    ],
    ids=lambda x: str(x) if isinstance(x, Recipe) else None,
)
@pytest.mark.slow
def test_a_wrong_statement_is_recognised(recipe, wrong, statement):
    result = audited(recipe)
    assert statement not in false_statements(recipe, result)
    assert statement in false_statements(recipe, replace(result, **wrong))


def test_a_verdict_that_is_missing_is_recognised():
    found = composed_losses.check(Recipe(), replace(audited(Recipe()), verdict="unknown", holds=None))
    assert [(x.kind, x.why) for x in found] == [("miss", "reverse-kl-token in every size")]


def objectives(w, kept):
    """The value of every target at the policy of a world; the visits and samples are those of `kept`."""
    visits, at = kept.visits, lambda table, anchor: (np.exp(table) * (table - anchor)).sum(1)
    drawn = kept.probability

    def to(anchor):
        l = w.of(w.policy) - w.of(anchor)
        mine, theirs = (np.exp(w.of(x).sum(1)) for x in (w.policy, anchor))
        return {
            "reverse-kl-sequence": mine @ l.sum(1),
            "reverse-kl-token": visits(kept.policy) @ at(w.policy, anchor),
            "reverse-kl-token-sampler": visits(w.sampler) @ at(w.policy, anchor),
            "forward-kl-token": visits(kept.policy) @ at(anchor, w.policy),
            "forward-kl-token-sampler": visits(w.sampler) @ at(anchor, w.policy),
            "forward-kl-sequence": -theirs @ l.sum(1),
            "k3-token": drawn @ (np.exp(-l) - 1 + l).sum(1),
            "squared-token": drawn @ np.square(l).sum(1) / 2,
            "squared-sequence": drawn @ np.square(l.sum(1)) / 2,
        }

    reference, sampler = to(w.reference), to(w.sampler)
    names = [name for name in sampler if "-kl-" in name and name != "forward-kl-token-sampler"]
    return reference | {name.replace("-kl-", "-kl-sampler-", 1): sampler[name] for name in names}


def test_the_targets_are_the_derivatives_of_their_objectives():
    case = next(c for c in worlds.small_cases() if c.world.varying and c.world.policy.shape[1] == 3)
    w, step = case.world, 1e-5
    assert set(objectives(w, w)) == set(w.targets)
    logits = w.policy.ravel()
    for i in range(len(logits)):
        shift = np.eye(len(logits))[i] * step
        ends = [
            objectives(replace(w, policy=worlds.normalised((logits + s).reshape(w.policy.shape))), w)
            for s in (shift, -shift)
        ]
        for name, gradient in w.targets.items():
            DIFFERENCE.check(torch.tensor(gradient[i]), (ends[0][name] - ends[1][name]) / (2 * step))
