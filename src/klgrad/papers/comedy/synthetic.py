r"""Only k1 in reward, and k1 or k3 in both places, give ∇KL(A‖B); k3 in reward is furthest off; k1 in loss has a lower
bias than that and, for close chains, a higher variance than k1 in reward.

*A Comedy of Estimators* (arXiv 2512.21852), section 3.3, known from summaries only: binary autoregressive A_θ and B_φ
of 5 to 20 tokens, 200 rounds of 1000 samples. Here every sequence is summed instead, so that a bias is an exact number.
Ours: first-order chains (see `chains`), standard normal logits, and a second axis, the distance of B from A.

The bias of k1 in loss is lower, not low. Its expected gradient is zero (as in the paper's own table), hence its bias is
all of ∇KL; k3 in reward exceeds it by a tenth of ∇KL on average, and in two pairs of three. For close chains that is
small against the noise: a few per cent of one sample's standard deviation, against several standard deviations for k3
in reward. The variance of k1 in loss is higher than that of k1 in reward for close chains only; for independent ones it
is lower, and more so with length.
"""

from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...support.palette import style
from ..study import Check, Numbers, Settings, below, exceeds_zero
from .chains import EXACT, LABELS, MARKERS, Chains, Moments, placements, random_chains, relative_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL, QUICK = {5: 512, 10: 128, 15: 8, 20: 2}, {5: 512, 8: 64, 10: 8}
"""Pairs of chains by length: a pair costs twice as much with every token."""

SHARES = [1 / 16, 1 / 8, 1 / 4, 1 / 2]
"""How far B stands on the way from A to an independent chain."""

Measured = dict[str, dict[str, list[float]]]
"""By what was measured and by configuration, one number a pair."""


def run(settings: Settings) -> Numbers:
    """Bias and standard deviation of every configuration, by length and by distance of B from A."""
    generator = torch.Generator().manual_seed(settings.seed)
    pairs = QUICK if settings.quick else FULL
    by_length = [_measure(random_chains(n, length, generator)) for length, n in pairs.items()]
    length = settings.size(10, 8)
    apart = random_chains(settings.size(32, 16), length, generator)
    return {
        "lengths": list(pairs),
        "by_length": by_length,
        "length_of_shares": length,
        "shares": [*SHARES, 1.0],
        "by_share": [_measure(apart.towards(share)) for share in [*SHARES, 1.0]],
    }


def _measure(chains: Chains) -> Measured:
    target, found = chains.kl_gradient, chains.moments(placements)
    return {
        "bias": {name: found[name].bias(target).tolist() for name in LABELS},
        "deviation": {name: found[name].deviation(target).tolist() for name in LABELS},
        "identity": {
            "k1-loss-is-zero": relative_error(target + found["k1-loss"].mean, target).tolist(),
            "k3-loss-is-forward": found["k3-loss"].bias(chains.token_forward_kl_gradient).tolist(),
            **{f"{k}-halves-are-half": _halves(found, k, target) for k in ("k1", "k3")},
        },
    }


def _halves(found: dict[str, Moments], estimator: str, target: Tensor) -> list[float]:
    """How far β/2 in the reward and β/2 in the loss are from half of ∇KL."""
    mean = found[f"{estimator}-reward"].mean / 2 + found[f"{estimator}-loss"].mean / 2
    return relative_error(mean, target / 2).tolist()


def check(numbers: Numbers) -> list[Check]:
    """Exact sentences in every pair; comparisons over independent pairs of all lengths, most of them short."""
    groups = numbers["by_length"] + numbers["by_share"]
    near = numbers["by_share"][0]
    worst = lambda kind, name: max(value for group in groups for value in group[kind][name])
    bias = {name: [value for group in numbers["by_length"] for value in group["bias"][name]] for name in LABELS}
    noticed = {name: _over(near["bias"][name], near["deviation"][name]) for name in LABELS}
    return [
        below("k1 in reward: unbiased", worst("bias", "k1-reward"), EXACT),
        below("k1 in both: unbiased", worst("bias", "k1-both"), EXACT),
        below("k3 in both: unbiased", worst("bias", "k3-both"), EXACT),
        below("k1 in both, β/2 in each: half of ∇KL", worst("identity", "k1-halves-are-half"), EXACT),
        below("k3 in both, β/2 in each: half of ∇KL", worst("identity", "k3-halves-are-half"), EXACT),
        below("k1 in loss: expected gradient zero", worst("identity", "k1-loss-is-zero"), EXACT),
        below("k3 in loss: the tokens' forward KL", worst("identity", "k3-loss-is-forward"), EXACT),
        _more("k3 in loss: biased", bias["k3-loss"], bias["k1-reward"]),
        _more("k3 in reward: more bias than k3 in loss", bias["k3-reward"], bias["k3-loss"]),
        _more("k1 in loss: less bias than k3 in reward", bias["k3-reward"], bias["k1-loss"]),
        _more(
            "k1 in loss: more deviation than k1 in reward, B close to A",
            near["deviation"]["k1-loss"],
            near["deviation"]["k1-reward"],
        ),
        _more(
            "(ours) k1 in loss: less deviation than k1 in reward, A and B independent",
            numbers["by_share"][-1]["deviation"]["k1-reward"],
            numbers["by_share"][-1]["deviation"]["k1-loss"],
        ),
        _more(
            "(ours) k1 in loss: its bias is less of its deviation than k3 in reward's is, B close to A",
            noticed["k3-reward"],
            noticed["k1-loss"],
        ),
    ]


def _over(above: list[float], under: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, under, strict=True)]


def _more(claim: str, larger: list[float], smaller: list[float]) -> Check:
    """Whether it is larger on average, by the z-score; also reports in how many pairs."""
    differences = torch.tensor(larger, dtype=torch.float64) - torch.tensor(smaller, dtype=torch.float64)
    mean, positive = differences.mean().item(), (differences > 0).double().mean().item()
    judged = exceeds_zero(claim, differences)
    return replace(judged, measured=f"by {mean:.3g}, {judged.measured}, in {positive:.0%} of pairs")


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Bias above, standard deviation below; by length on the left, by distance on the right."""
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    columns = [
        (numbers["lengths"], numbers["by_length"], "tokens (independent A and B)"),
        (numbers["shares"], numbers["by_share"], f"distance of B from A ({numbers['length_of_shares']} tokens)"),
    ]
    for column, (x, groups, label) in enumerate(columns):
        for row, kind in enumerate(("bias", "deviation")):
            for name, text in LABELS.items():
                means = [fmean(group[kind][name]) for group in groups]
                look = style(name) | {"label": text if row == column == 0 else None}
                # Three lines coincide at no bias: hollow markers let each be seen.
                axes[row][column].plot(x, means, marker=MARKERS[name], markersize=6, markerfacecolor="none", **look)
        axes[1][column].set_xlabel(label)
    axes[0][0].set(ylabel="bias / ‖∇KL‖", xticks=numbers["lengths"])
    axes[1][0].set(ylabel="std of one\nsample / ‖∇KL‖", yscale="log")
    axes[1][1].set_xscale("log", base=2)
    axes[1][1].set_xticks(numbers["shares"], ["1/16", "1/8", "1/4", "1/2", "1"])
    figure.legend(loc="outside upper center", ncols=3, fontsize=9)
