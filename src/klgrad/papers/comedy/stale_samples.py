r"""Stale samples bias every configuration; ratios of sequences or of prefixes repair k1 in reward and k1, k3 in both,
token ratios do not.

*A Comedy of Estimators* (arXiv 2512.21852), off-policy part, known from summaries: neither k1 nor k3, in reward or in
loss, is unbiased at the sequence level; an unbiased estimator was left open. Here the chains of `chains` are sampled by
a stale policy and every sequence is summed. Ours: standard normal logits of policy and reference, a sampler whose
logits are off by normal noise of a given size, and three weights. r_t is the ratio of the token whose score it
weights. w_T is the ratio of the whole sequence. w_t = r_1...r_t is the ratio of the prefix up to the present token: it
weights the term of that token, which the score of this and of every earlier token is multiplied by. w_T and w_t are
exact, and either answers the open question; both cost variance, and w_t costs less, also if w_T weights the same sums
over later tokens. With either, k3 in reward and k3 in loss keep their on-policy bias.
"""

from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.credit import to_go
from ...core.importance import prefix_ratio, sequence_ratio, token_ratio
from ...core.rollout import Rollout
from ...drawing import style
from ..study import Check, Numbers, Settings, below, exceeds_zero, ours
from .synthetic import EXACT, LABELS, MARKERS, Chains, placements, random_chains, random_logits

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STALENESS = [0.0, 0.1, 0.2, 0.4, 0.8]
"""Standard deviation of the sampler's logits from the policy's."""

BIASED = 1e3 * EXACT
"""A relative bias above this in every problem is not due to rounding."""

PAPERS_FOUR = ("k1-reward", "k1-loss", "k3-reward", "k3-loss")

SOUND = ("k1-reward", "k1-both", "k3-both")
"""Unbiased on-policy."""

WEIGHTS = {"none": "no weight", "token": "token ratio", "sequence": "sequence ratio", "prefix": "prefix ratio"}

REPAIRS = {
    "sequence": ("w_T", "o-"),
    "sequence to go": ("w_T, terms to go", "s--"),
    "prefix": ("w_t, terms to go", "^:"),
}
"""The exact ones, with their label, marker and line: the second differs from each of the others in one respect."""

Measured = dict[str, list[float]]
"""By configuration and weight, one number a problem."""


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
    plain, sequence = placements(rollout), sequence_ratio(rollout)
    found = {
        "none": plain,
        "token": _times(token_ratio(rollout), plain),
        "sequence": _times(sequence, plain),
        "sequence to go": _times(sequence, placements(rollout, to_go)),
        "prefix": placements(rollout, to_go, prefix_ratio(rollout)),
    }
    return {f"{name}/{weight}": c for weight, group in found.items() for name, c in group.items()}


def _times(ratio: Tensor, group: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: ratio * coefficient for name, coefficient in group.items()}


def _measure(chains: Chains) -> dict[str, Measured]:
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
    return [
        *(_biased(f"{LABELS[name]}, no weight: biased", every("bias", f"{name}/none")) for name in PAPERS_FOUR),
        *ours(
            *(_biased(f"{LABELS[name]}, token ratio: biased", every("bias", f"{name}/token")) for name in SOUND),
            below("sequence ratio: mean 1", max(abs(x - 1) for x in every("weights", "mean")), EXACT),
            *_repaired(fresh["bias"], [group["bias"] for group in stale], "sequence"),
            *_repaired(fresh["bias"], [group["bias"] for group in stale], "prefix"),
            *_costs(fresh["deviation"], stale[-1]["deviation"]),
            _larger(
                "the staler, the fewer effective samples",
                stale[0]["weights"]["effective"],
                stale[-1]["weights"]["effective"],
            ),
        ),
    ]


def _repaired(fresh: Measured, stale: list[Measured], weight: str) -> list[Check]:
    """An exact weight: what is unbiased on-policy is unbiased again, and what is biased has its on-policy bias."""
    title, checks = WEIGHTS[weight], []
    for name in SOUND:
        off = max(value for bias in stale for value in bias[f"{name}/{weight}"])
        checks.append(below(f"{LABELS[name]}, {title}: unbiased", off, EXACT))
    for name in ("k3-reward", "k3-loss"):
        on_policy = fresh[f"{name}/none"]
        pairs = [pair for bias in stale for pair in zip(bias[f"{name}/{weight}"], on_policy, strict=True)]
        off = max(abs(now - before) / before for now, before in pairs)
        checks.append(below(f"{LABELS[name]}, {title}: as biased as on-policy", off, EXACT))
    return checks


def _costs(fresh: Measured, stalest: Measured) -> list[Check]:
    more = "{}, sequence ratio: more deviation than on-policy"
    less = "{}, prefix ratio: less deviation than a sequence ratio on the same terms"
    return [
        *(_larger(more.format(LABELS[name]), stalest[f"{name}/sequence"], fresh[f"{name}/none"]) for name in SOUND),
        *(
            _larger(less.format(LABELS[name]), stalest[f"{name}/sequence to go"], stalest[f"{name}/prefix"])
            for name in SOUND
        ),
    ]


def _biased(claim: str, values: list[float]) -> Check:
    return Check(claim, f"at least {min(values):.2g} in every problem", min(values) > BIASED)


def _larger(claim: str, larger: list[float], smaller: list[float]) -> Check:
    """By the logarithm of the ratio of each problem: a few large weights would dominate any difference."""
    ratio = torch.tensor(larger, dtype=torch.float64) / torch.tensor(smaller, dtype=torch.float64)
    return exceeds_zero(claim, ratio.log())


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Bias against staleness under each weight, and what the exact weights cost."""
    figure.set_size_inches(9.6, 5.4)
    axes = figure.subplots(2, 3, sharex=True)
    x, groups = numbers["staleness"], numbers["by_staleness"]
    mean = lambda kind, name: [fmean(group[kind][name]) for group in groups]
    look = lambda name: style(name) | {"marker": MARKERS[name], "markersize": 5, "markerfacecolor": "none"}
    top = 1.05 * max(max(mean("bias", f"{name}/{weight}")) for name in LABELS for weight in WEIGHTS)
    for axis, (weight, title) in zip(axes[:, :2].flat, WEIGHTS.items(), strict=True):
        for name, text in LABELS.items():
            axis.plot(x, mean("bias", f"{name}/{weight}"), **look(name) | {"label": text if weight == "none" else None})
        axis.set_title(title, fontsize=10)
        axis.set(ylabel="bias / ‖∇KL‖", ylim=(-0.05 * top, top))
    cost, samples = axes[:, 2]
    for weight, (text, line) in REPAIRS.items():
        colour = style("k1-reward")["color"]
        cost.plot(x, mean("deviation", f"k1-reward/{weight}"), line, color=colour, ms=4, label=text)
    cost.set_title("k1 in reward, exact weights", fontsize=10)
    cost.set(ylabel="std of one sample / ‖∇KL‖", ylim=(0, None))
    cost.legend(fontsize=8)
    samples.plot(x, mean("weights", "effective"), color="black", marker=".")
    samples.set_title("effective samples, sequence ratio", fontsize=10)
    samples.set(ylabel="share of samples", ylim=(0, 1.05))
    for axis in axes[1]:
        axis.set_xlabel("std of sampler's logits\nfrom policy's")
    # The legend has the configurations only: the panel of costs has its own.
    title = f"means over {len(groups[0]['bias']['k1-reward/none'])} problems"
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=6, fontsize=9, title=title)
