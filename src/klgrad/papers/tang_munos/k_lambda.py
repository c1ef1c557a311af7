"""Every λ gives an unbiased value l + λ (1/r - 1), but as a loss the family descends λ times the forward KL: at λ =
0, where it is the plain log-ratio, nothing.

Section 3 of the paper, which states it without a figure. The expected gradient is summed over all arms, exactly,
and descended for 200 steps from each of the problems.
"""

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.estimators import k_lambda
from ...drawing import GREY, ORANGE
from ..study import Check, Numbers, Settings, below, over_repeats
from . import bandits

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LAMBDAS = [0.0, 0.25, 0.5, 1.0, 2.0]
COLOURS = [GREY, "#3b528b", "#21918c", ORANGE, "#5ec962"]
"""λ = 0 and 1 are k1 and k3 as losses, in their colours."""
STEPS = 200


def run(settings: Settings) -> Numbers:
    """Exact values, gradients and descent for each λ."""
    generator = torch.Generator().manual_seed(settings.seed)
    problems = bandits.draw(settings.size(100, 30), generator)
    logp, ref = problems.logp, problems.ref_logp
    p, log_ratio, kl = logp.exp(), logp - ref, bandits.divergence(logp, ref)
    forward = p - ref.exp()  # ∇KL(ref‖π) over logits
    found: Numbers = {"steps": list(range(STEPS + 1)), "problems": len(p)}
    found |= {"kl": {}, "value error": {}, "gradient error": {}}
    for lam in LAMBDAS:
        k = k_lambda(lam)
        value = (p * k.value(log_ratio)).sum(-1)
        gradient = bandits.exact_gradient(k.slope(log_ratio), p)
        found["value error"][str(lam)] = float(((value - kl).abs() / kl).max())
        found["gradient error"][str(lam)] = float(
            ((gradient - lam * forward).norm(dim=-1) / forward.norm(dim=-1)).max()
        )
        found["kl"][str(lam)] = over_repeats(_descend(problems, lam))
    return found


def _descend(problems: bandits.Bandits, lam: float) -> Tensor:
    """(STEPS + 1, R) KL to ref along the expected gradient of k_lambda as a loss."""
    logits, seen = problems.logits, []
    for _ in range(STEPS + 1):
        logp = torch.log_softmax(logits, -1)
        seen.append(bandits.divergence(logp, problems.ref_logp))
        slope = k_lambda(lam).slope(logp - problems.ref_logp)
        logits = logits - bandits.RATE * bandits.exact_gradient(slope, logp.exp())
    return torch.stack(seen)


def check(numbers: Numbers) -> list[Check]:
    """The claim, sentence by sentence."""
    ends = [numbers["kl"][str(lam)]["mean"][-1] for lam in LAMBDAS]
    start = numbers["kl"]["0.0"]["mean"][0]
    ordered = all(a > b for a, b in pairwise(ends))
    return [
        below("the value is unbiased for every λ (largest relative error)", max(numbers["value error"].values()), 1e-9),
        below("as a loss it is λ x the forward KL (same)", max(numbers["gradient error"].values()), 1e-9),
        below("at λ = 0 nothing moves", abs(ends[0] - start) / start, 1e-9),
        Check("the larger λ, the nearer it ends", ", ".join(f"{x:.3g}" for x in ends), ordered),
    ]


def draw(numbers: Numbers, figure: "Figure") -> None:
    """KL against steps for each λ."""
    axis = figure.subplots()
    for lam, colour in zip(LAMBDAS, COLOURS, strict=True):
        mean = numbers["kl"][str(lam)]["mean"]
        axis.plot(numbers["steps"], mean, color=colour, lw=2)
        axis.annotate(f" λ = {lam:g}", (numbers["steps"][-1], mean[-1]), color=colour, va="center", fontsize=9)
    axis.set(yscale="log", xlabel="steps along the expected gradient", ylabel="KL(π‖ref)", xlim=(0, STEPS * 1.14))
    axis.set_title(f"means over {numbers['problems']} problems, exact gradients", fontsize=10)
