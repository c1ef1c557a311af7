"""Policy losses composed of random parts, as a user would write them, and the parts that the audit must find."""

import random
from dataclasses import dataclass, replace

import torch

from klgrad.policy_losses import ONE, PolicyParts, Weight

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
