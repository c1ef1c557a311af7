"""The choices of the playground as losses of the library, and the cells of the zoo as choices."""

import re

import torch

from klgrad import Clip, Mask, Rollout, Truncate, credit, estimators, importance
from klgrad.core.result import reduce

DEFAULTS = {
    "loss": "k3(l)",
    "place": "loss",
    "horizon": "none",
    "discount": 0.9,
    "ratio": "none",
    "bound": "none",
    "low": 0.5,
    "high": 2.0,
    "unit": "sum",
    "baseline": "none",
}

IN_REWARD = {"place": "reward", "horizon": "whole"}
CELLS = {
    "k1-loss": {"loss": "l"},
    "k2-loss": {"loss": "k2(l)"},
    "k3-loss": {},
    "k-half-loss": {"loss": "l + (exp(-l) - 1) / 2"},
    "abs-loss": {"loss": "abs(l)"},
    "k3-loss-clamped": {"loss": "clamp(k3(l), -10, 10)"},
    "k2-loss-clamped": {"loss": "clamp(l^2 / 2, -10, 10)"},
    "k3-no-grad": {"loss": "stop(k3(l))"},
    "k3-straight-through": {"loss": "k2(l) + stop(k3(l) - k2(l))"},
    "k2-loss-length-mean": {"loss": "l**2 / 2", "unit": "completion-mean"},
    "k2-loss-token-mean": {"loss": "0.5 * l * l", "unit": "token-mean"},
    "ratio-k3-loss": {"loss": "r * k3(l)"},
    "ratio-k1-loss": {"loss": "r * l"},
    "ratio-k2-loss": {"loss": "r * k2(l)"},
    "stopped-ratio-k2-loss": {"loss": "k2(l)", "ratio": "token"},
    "truncated-ratio-k2-loss": {"loss": "k2(l)", "ratio": "token", "bound": "truncate", "high": 1.2},
    "stopped-ratio-k3-loss": {"loss": "stop(r) * k3(l)"},
    "k1-reward": {"loss": "l", **IN_REWARD},
    "k1-reward-to-go": {"loss": "l", "place": "reward", "horizon": "all"},
    "k1-advantage": {"loss": "l", "place": "reward"},
    "k2-reward": {"loss": "k2(l)", **IN_REWARD},
    "k3-reward": {"loss": "k3(l)", **IN_REWARD},
    "k1-reward-leave-one-out": {"loss": "l", **IN_REWARD, "baseline": "leave-one-out"},
    "k3-reward-leave-one-out": {"loss": "k3(l)", **IN_REWARD, "baseline": "leave-one-out"},
    "k1-reward-group-mean": {"loss": "l", **IN_REWARD, "baseline": "group-mean"},
    "k1-reward-group-std": {"loss": "l", **IN_REWARD, "baseline": "group-std"},
    "k1-both": {"loss": "l", "place": "both", "horizon": "whole"},
    "k3-both": {"loss": "k3(l)", "place": "both", "horizon": "whole"},
    "k3-both-half": {"loss": "k3(l) / 2", "place": "both", "horizon": "whole"},
    "k3-both-token": {"loss": "k3(l)", "place": "both"},
    "k3-both-leave-one-out": {"loss": "k3(l)", "place": "both", "horizon": "whole", "baseline": "leave-one-out"},
}

OTHERS = [
    {"loss": "exp(l) - 1 - l"},
    {"loss": "-k2(l)"},
    {"loss": "log(0.5 * exp(l) + 0.5) - l", "place": "reward"},
    {"loss": "-0.7 * log(0.3 * exp(-l) + 0.7)", "place": "reward"},
    {"loss": "(1 - exp(-0.7 * l)) / 0.7", "place": "reward"},
    {"loss": "2 * (1 - exp(-l / 2))", "place": "reward"},
    {"loss": "clamp(l, -2, 2)", "place": "reward"},
    {"loss": "l + l^3", "place": "reward"},
    {"loss": "l + 3 * (1 - exp(-l))", "place": "reward"},
    {"loss": "min(stop(r), 3) * k2(l)"},
    {"loss": "clamp(stop(r), 0.4, 3) * k2(l)"},
    {"loss": "2 * l", "place": "reward", "horizon": "all", "unit": "token-mean"},
    {"loss": "l", "place": "reward", "horizon": "discount"},
    {"loss": "k3(l)", "place": "both", "horizon": "discount", "discount": 0.5},
    {"loss": "l", "place": "reward", "horizon": "all", "ratio": "prefix"},
    {"loss": "l", "place": "reward", "horizon": "all", "ratio": "prefix", "bound": "truncate"},
    {"loss": "l", "place": "reward", "horizon": "all", "ratio": "sequence", "bound": "clip"},
    {"loss": "k2(l)", "ratio": "token", "bound": "mask", "unit": "fixed-length"},
    {"loss": "l", "place": "reward", "horizon": "all", "baseline": "leave-one-out"},
]
"""Choices that are no cell: divergences, bounds, discounts and units."""

CHOICES = {name: DEFAULTS | choice for name, choice in CELLS.items()} | {
    " ".join(str(x) for x in choice.values()): DEFAULTS | choice for choice in OTHERS
}

FUNCTIONS = {
    **{name: getattr(torch, name) for name in ("exp", "expm1", "log", "log1p", "sqrt", "abs", "sign", "clamp")},
    **{name: getattr(estimators, name) for name in ("k1", "k2", "k3")},
    "stop": lambda x: x.detach(),
    "min": lambda a, b: a.clamp(max=b),
}
BOUNDS = {"truncate": lambda low, high: Truncate(high), "clip": Clip, "mask": Mask}
RATIOS = {"token": importance.token_ratio, "prefix": importance.prefix_ratio, "sequence": importance.sequence_ratio}


def loss_of(choice):
    """The scalar loss that a choice of the playground means, by the parts of the library."""
    code = re.sub(r"\^", "**", choice["loss"])

    def loss(rollout: Rollout):
        mask = rollout.mask
        l = rollout.logp - rollout.ref_logp
        r = (rollout.logp - rollout.sampler_logp).exp()
        values = eval(code, {}, FUNCTIONS | {"l": l, "r": r}) + 0 * l  # a constant formula has a gradient of 0
        values = torch.where(mask, values, 0)
        weights = torch.ones_like(l.detach())
        if choice["ratio"] != "none":
            weights = RATIOS[choice["ratio"]](rollout).expand_as(l)
            if choice["bound"] != "none":
                weights = BOUNDS[choice["bound"]](choice["low"], choice["high"])(weights)
        total = 0 * l if choice["place"] == "reward" else weights * values
        if choice["place"] != "loss":
            per_decision = choice["ratio"] == "prefix"
            total = total + score(choice, values.detach(), weights, per_decision, rollout) * rollout.logp
        total = torch.where(mask, total, 0)
        if choice["unit"] == "token-mean":
            return reduce(total, rollout, "token")
        by = {"sum": 1, "completion-mean": mask.sum(-1).clamp(min=1), "fixed-length": mask.shape[1]}
        return (total.sum(-1) / by[choice["unit"]]).mean()

    return loss


def score(choice, values, weights, per_decision, rollout):
    """The coefficient that a reward puts on each score."""
    given = values * weights if per_decision else values
    if choice["horizon"] == "none":
        found = given
    elif choice["horizon"] == "whole":
        found = given.sum(-1, keepdim=True).expand_as(given)
    else:
        found = credit.to_go(given, rollout.mask, choice["discount"] if choice["horizon"] == "discount" else 1.0)
    if choice["baseline"] == "leave-one-out":
        found = found - credit.leave_one_out(found, rollout.group)
    elif choice["baseline"] != "none":
        total, size = credit.group_total(found, rollout.group)
        found = found - total / size
        if choice["baseline"] == "group-std":
            squares, _ = credit.group_total(found.square(), rollout.group)
            found = found / ((squares / (size - 1)).sqrt() + 1e-4)
    return found if per_decision else weights * found


def compared(parts):
    """What of the parts of a loss the page and the audit both say."""
    d = parts["divergence"]
    rounded = lambda x: None if x is None else round(x, 4)
    whole = [(p["name"], rounded(p["scale"])) for p in d.get("parts", [])]
    bound = parts["samples"]["bound"]
    edges = None if bound is None else (bound["kind"], rounded(bound["low"]), rounded(bound["high"]))
    return {
        "divergence": (d["name"], whole, rounded(d.get("alpha")), rounded(d.get("beta"))),
        "scale": "spread" if parts["divided_by_spread"] else rounded(d["scale"]),
        "flat": tuple(rounded(d[key]) for key in ("flat_below", "flat_above", "pull_below", "pull_above")),
        "convex": d["convex"],
        "horizon": tuple(parts["horizon"][key] for key in ("kind", "discount", "estimate")),
        "past": parts["past_credit"],
        "samples": (parts["samples"]["ratio"], edges),
        "unit": parts["unit"],
        "baseline": (parts["baseline"], parts["divided_by_spread"]),
        "constant": parts["constant"],
    }
