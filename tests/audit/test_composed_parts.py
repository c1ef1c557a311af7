"""A loss of random parts is taken apart into exactly these parts, and a part that is changed turns alone."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from some import first

from klgrad.audit import audit

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "hunt"))

from compositions import Recipe, composed  # pyright: ignore[reportMissingImports]

SLOPES = {
    "k1": lambda _: ({}, 1.0),
    "k2": lambda _: ({"reverse-kl": 1.0}, 0.0),
    "k3": lambda _: ({"forward-kl": 1.0}, 0.0),
    "k-lambda": lambda number: ({"forward-kl": number}, 1 - number),
    "chi-square": lambda _: ({"chi-square": 1.0}, 0.0),
    "js": lambda _: ({"jensen-shannon": 2.0}, 0.0),
    "abs": lambda _: ({"total-variation": 1.0}, 0.0),
    "huber": lambda _: ({"reverse-kl": 1.0}, 0.0),
    "exact": lambda _: ({"reverse-kl": 1.0}, 0.0),
    "exact-forward": lambda _: ({"forward-kl": 1.0}, 0.0),
    "exact-js": lambda _: ({"jensen-shannon": 2.0}, 0.0),
}
"""By the name of a term in a loss: the divergences that its derivative by log π is the slope of, and a constant."""

IN_REWARD = {"k1": {"reverse-kl": 1.0}, "k3": {"reverse-kl": 1.0, "forward-kl": -1.0}}
UNITS = {"none": "sum", "completion": "completion-mean", "tokens": "token-mean", "fixed": "fixed-length"}
BASELINES = {"none": "none", "leave-one-out": "leave-one-out", "group": "group-mean", "batch": "batch-mean"}


def draw(number):
    """A random composition: divergence, horizon, baseline, ratio, bound, unit and place."""
    rng = random.Random(f"parts/{number}")
    place = rng.choice(("loss", "reward", "both"))
    recipe = Recipe(loss=rng.choice(sorted(SLOPES)), number=round(rng.uniform(0.3, 3), 2))
    if place == "reward":
        recipe = Recipe(loss=None, reward=rng.choice(sorted(IN_REWARD)), baseline=rng.choice(sorted(BASELINES)))
        recipe = replace(recipe, horizon=rng.choice(("own", "to-go", "whole")))
    elif place == "both":
        recipe = Recipe(loss="k2", reward=rng.choice(("k1", "k3")), horizon="later")
    if recipe.horizon in ("to-go", "later"):
        recipe = replace(recipe, discount=rng.choice((1.0, 0.9, 0.5)))
    ratio = rng.choice(("none", "token", "prefix", "sequence"))
    bound = rng.choice(("none", "truncate", "clip", "mask")) if ratio != "none" else "none"
    bound = "gate" if ratio in ("token", "sequence") and rng.random() < 0.2 else bound
    of_token = place == "loss" and "exact" not in str(recipe.loss)
    power = {"weight": "probability"} if of_token and rng.random() < 0.2 else {}
    unit = {"divide": rng.choice(sorted(UNITS)), "reduce": rng.choice(("mean", "sum"))}
    at, factor = rng.choice((1.2, 2.0, 5.0, 10.0)), rng.choice((1.0, -1.0, 0.04, 2.0))
    return replace(recipe, ratio=ratio, bound=bound, at=at, factor=factor, **unit, **power)


def declared(recipe):
    """The parts of a composition."""
    slope = SLOPES[recipe.loss](recipe.number) if recipe.loss else (IN_REWARD[recipe.reward], 0.0)
    shares, constant = {name: w * recipe.factor for name, w in slope[0].items()}, slope[1] * recipe.factor
    looks = recipe.reward is not None and recipe.horizon != "own"
    discount = recipe.discount if recipe.horizon != "whole" else 1.0
    edge = recipe.number if recipe.loss == "huber" else None
    bound = {
        "none": None,
        "truncate": ("truncate", None, recipe.at),
        "clip": ("clip", 1 / recipe.at, recipe.at),
        "mask": ("mask", None, recipe.at),
        "gate": ("gate", None, recipe.at),
    }[recipe.bound]
    return {
        "divergence": shares,
        "constant": constant,
        "edges": None if edge is None else (-edge, edge),
        "horizon": ("none" if not looks else "all" if discount == 1 else discount, recipe.reward if looks else ""),
        "power": 1.0 if recipe.weight == "probability" else 0.0,
        "past": looks and recipe.horizon == "whole",
        "samples": (recipe.ratio, bound),
        "unit": (UNITS[recipe.divide], recipe.reduce == "mean" or recipe.divide == "tokens"),
        "baseline": BASELINES[recipe.baseline],
    }


def parts_of(recipe):
    """The parts that the audit reads."""
    a = audit(composed(recipe)).anatomy
    assert a.proved, (a.unexplained, a.matters)
    horizon, bound, curve = a.horizon, a.samples.bound, a.curve
    return {
        "divergence": a.shares,
        "constant": a.constant,
        "edges": (curve.low, curve.high) if a.has_edges else None,
        "horizon": (horizon.discount if horizon.kind == "discount" else horizon.kind, horizon.estimate),
        "power": a.power,
        "past": a.has_past,
        "samples": (a.samples.ratio, None if bound is None else (bound.kind, bound.low, bound.high)),
        "unit": (a.unit.name, a.unit.rows),
        "baseline": a.baseline.name,
    }


def differences(some, others):
    """The names of the parts that differ."""
    return {name for name in some if not is_same(some[name], others[name])}


def is_same(x, y):
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(map(is_same, x, y))
    if isinstance(x, dict):
        return x == pytest.approx(y)
    return x == (pytest.approx(y) if isinstance(y, float) else y)


@pytest.mark.many
@pytest.mark.parametrize("number", range(500))
def test_a_composed_loss_is_taken_apart_into_its_parts(number):
    recipe = draw(number)
    found, expected = parts_of(recipe), declared(recipe)
    assert differences(found, expected) == set(), (str(recipe), found, expected)


MUTATIONS = {
    "sign": (lambda r: replace(r, factor=-r.factor), {"divergence", "constant"}),
    "unit": (lambda r: replace(r, divide="completion" if r.divide != "completion" else "none"), {"unit"}),
    "ratio": (lambda r: replace(r, ratio="none", bound="none"), {"samples"}),
    "discount": (lambda r: replace(r, discount=0.7), {"horizon"}),
}
"""A changed part of a loss, and the parts of its report that may turn."""

MUTATED = (
    Recipe(loss=None, reward="k1", horizon="to-go", discount=0.9, ratio="prefix"),
    Recipe(loss=None, reward="k1", horizon="to-go", ratio="token", bound="truncate", at=2.0),
    Recipe(loss=None, reward="k1", horizon="to-go", baseline="leave-one-out", ratio="sequence"),
    Recipe(loss=None, reward="k3", horizon="to-go", discount=0.5, ratio="token"),
    Recipe(loss="k2", reward="k3", horizon="later", ratio="prefix", divide="fixed"),
    Recipe(loss="k2", reward="k1", horizon="later", discount=0.9, ratio="token", bound="clip", at=1.2),
    Recipe(loss="k2", reward="k1", horizon="later", ratio="sequence", divide="completion"),
    Recipe(loss=None, reward="k1", horizon="to-go", baseline="group", ratio="prefix", bound="mask", at=5.0),
    Recipe(loss=None, reward="k1", horizon="to-go", ratio="token", factor=0.04),
    Recipe(loss=None, reward="k3", horizon="to-go", baseline="batch", ratio="prefix", reduce="sum"),
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", first(MUTATED, 3), ids=str)
def test_a_changed_part_turns_that_part_of_the_report(recipe):
    whole = parts_of(recipe)
    assert differences(whole, declared(recipe)) == set()
    for change, allowed in MUTATIONS.values():
        changed = change(recipe)
        turned = differences(whole, parts_of(changed))
        assert turned == differences(declared(recipe), declared(changed))
        assert turned
        assert turned <= allowed
