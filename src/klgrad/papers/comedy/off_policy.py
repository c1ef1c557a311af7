r"""Stale samples bias every configuration; sequence ratios repair k1 in reward and k1, k3 in both, token ratios do not.

*A Comedy of Estimators* (arXiv 2512.21852), off-policy part, known from summaries: neither k1 nor k3, in reward or in
loss, is unbiased at the sequence level; an unbiased estimator was left open. Here the chains of `chains` are sampled by
a stale policy and every sequence is summed. Ours: standard normal logits of policy and reference, a sampler whose
logits are off by normal noise of a given size, and the two repairs: w_T, the ratio of the whole sequence, and r_t, the
ratio of the token whose score it weights. w_T is exact, at the cost of variance; with it k3 in reward and k3 in loss
keep their on-policy bias.
"""

from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.importance import sequence_ratio, token_ratio
from ...core.rollout import Rollout
from ...support.palette import style
from ..study import Check, Numbers, Settings, below, exceeds_zero
from .chains import EXACT, LABELS, MARKERS, Chains, placements, random_chains, random_logits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STALENESS = [0.0, 0.1, 0.2, 0.4, 0.8]
"""Standard deviation of the sampler's logits from the policy's."""

BIASED = 1e3 * EXACT
"""A relative bias above this in every problem is not due to rounding."""

PAPERS_FOUR = ("k1-reward", "k1-loss", "k3-reward", "k3-loss")

SOUND = ("k1-reward", "k1-both", "k3-both")
"""Unbiased on-policy."""

WEIGHTS = {"none": "no weight", "token": "token ratio", "sequence": "sequence ratio"}


def run(settings: Settings) -> Numbers:
    """Bias, standard deviation and effective sample size, by how stale the sampler is."""
    generator = torch.Generator().manual_seed(settings.seed)
    length, problems = settings.size(10, 6), settings.size(64, 32)
    chains = random_chains(problems, length, generator)
    noise = random_logits(problems, length, generator)
    return {
        "length": length,
        "staleness": STALENESS,
        "by_staleness": [_measure(chains.sampled_by(chains.policy + stale * noise)) for stale in STALENESS],
    }


def _coefficients(rollout: Rollout) -> dict[str, Tensor]:
    """Every configuration under every weight."""
    ratio = {"none": 1.0, "token": token_ratio(rollout), "sequence": sequence_ratio(rollout)}
    plain = placements(rollout)
    return {f"{name}/{weight}": ratio[weight] * c for weight in WEIGHTS for name, c in plain.items()}


def _measure(chains: Chains) -> dict[str, dict[str, list[float]]]:
    """By what was measured and by configuration, one number a problem."""
    target, found = chains.kl_gradient, chains.moments(_coefficients)
    mean = chains.expectation(sequence_ratio)
    square = chains.expectation(lambda rollout: sequence_ratio(rollout).square())
    return {
        "bias": {name: x.bias(target).tolist() for name, x in found.items()},
        "deviation": {name: x.deviation(target).tolist() for name, x in found.items()},
        # What the effective sample size of many weights tends to, as a share of their number.
        "weights": {"mean": mean.tolist(), "effective": (mean.square() / square).tolist()},
    }


def check(numbers: Numbers) -> list[Check]:
    """Exact sentences in every problem at every staleness; the cost, at the stalest."""
    fresh, *stale = numbers["by_staleness"]
    every = lambda kind, name: [value for group in stale for value in group[kind][name]]
    checks = [_biased(f"{LABELS[name]}, no weight: biased", every("bias", f"{name}/none")) for name in PAPERS_FOUR]
    checks += [_biased(f"{LABELS[name]}, token ratio: biased", every("bias", f"{name}/token")) for name in SOUND]
    checks.append(below("sequence ratio: mean 1", max(abs(x - 1) for x in every("weights", "mean")), EXACT))
    for name in SOUND:
        checks.append(below(f"{LABELS[name]}, sequence ratio: unbiased", max(every("bias", f"{name}/sequence")), EXACT))
    for name in ("k3-reward", "k3-loss"):
        on_policy = fresh["bias"][f"{name}/none"] * len(stale)
        off = max(abs(a - b) / b for a, b in zip(every("bias", f"{name}/sequence"), on_policy, strict=True))
        checks.append(below(f"{LABELS[name]}, sequence ratio: as biased as on-policy", off, EXACT))
    for name in SOUND:
        weighted, on_policy = stale[-1]["deviation"][f"{name}/sequence"], fresh["deviation"][f"{name}/none"]
        checks.append(_larger(f"{LABELS[name]}, sequence ratio: more deviation than on-policy", weighted, on_policy))
    few, many = stale[-1]["weights"]["effective"], stale[0]["weights"]["effective"]
    return [*checks, _larger("the staler, the fewer effective samples", many, few)]


def _biased(claim: str, values: list[float]) -> Check:
    return Check(claim, f"at least {min(values):.2g} in every problem", min(values) > BIASED)


def _larger(claim: str, larger: list[float], smaller: list[float]) -> Check:
    """By the logarithm of the ratio of each problem: a few large weights would dominate any difference."""
    ratio = torch.tensor(larger, dtype=torch.float64) / torch.tensor(smaller, dtype=torch.float64)
    return exceeds_zero(claim, ratio.log())


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Bias against staleness under each weight, and what the sequence ratio costs."""
    axes = figure.subplots(2, 2, sharex=True).flat
    x, groups = numbers["staleness"], numbers["by_staleness"]
    mean = lambda kind, name: [fmean(group[kind][name]) for group in groups]
    look = lambda name: style(name) | {"marker": MARKERS[name], "markersize": 5, "markerfacecolor": "none"}
    top = 1.05 * max(max(mean("bias", f"{name}/{weight}")) for name in LABELS for weight in WEIGHTS)
    for axis, (weight, title) in zip(axes, WEIGHTS.items(), strict=False):
        for name, text in LABELS.items():
            axis.plot(x, mean("bias", f"{name}/{weight}"), **look(name) | {"label": text if weight == "none" else None})
        axis.set_title(title, fontsize=10)
        axis.set(ylabel="bias / ‖∇KL‖", ylim=(-0.05 * top, top))
    cost = axes[3]
    for name in SOUND:
        deviation = mean("deviation", f"{name}/sequence")
        cost.plot(x, [d / deviation[0] for d in deviation], **look(name) | {"label": None})
    cost.plot(x, mean("weights", "effective"), color="black", marker=".", label="effective samples")
    cost.text(x[2], 1.35, "std", fontsize=9)
    cost.set_title("sequence ratio: its cost", fontsize=10)
    cost.set(ylabel="times on-policy", yscale="log")
    cost.set_yticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
    cost.minorticks_off()
    for axis in (axes[2], cost):
        axis.set_xlabel("std of sampler's logits from policy's")
    figure.legend(loc="outside upper center", ncols=4, fontsize=9)
