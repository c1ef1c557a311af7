"""k3 as a loss against vanilla, on many problems: the comparison of figure 3 over samples n, starts and steps.

The KL that k3 as a loss leaves has a heavy tail over problems: a rare arm with a huge ratio ref/π can throw a run far
away. So one experiment with 100 problems, as in the paper, may or may not show a difference of the means. Reported is
the share of such experiments that show it.
"""

import torch
from torch import Tensor

from ...core.estimators import k1, k3
from ..study import Numbers, over_repeats
from . import bandits

SCALES = (1.0, 1.25, 1.5, 2.0)
"""Factors on ε2, the distance of the first π from ref in the logits; 1 in the paper."""

STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Where the KL is measured."""

EXPERIMENT = 100
"""Problems in one experiment of the paper."""

EXPERIMENTS = 2000
"""Experiments drawn, with replacement, from the problems simulated."""

BLOCK = 100
"""Problems simulated at a time: few enough for a processor's cache, and for torch not to use several threads."""

VANILLA, K3 = 0, 1
"""The methods' places on the first axis."""


def sampled(samples: int, scale: float, problems: int, steps: int, generator: torch.Generator) -> Tensor:
    """Descend estimated gradients.

    Returns:
        (2, points, problems) KL(π‖ref) at the start and at each of `STEPS` up to `steps`.
    """
    blocks = [_descend_sampled(samples, scale, steps, generator) for _ in range(problems // BLOCK)]
    return torch.cat(blocks, -1)


def _descend_sampled(samples: int, scale: float, steps: int, generator: torch.Generator) -> Tensor:
    problem = bandits.draw(BLOCK, generator, torch.float32, scale=scale)
    ref_logp = problem.ref_logp.expand(2, -1, -1)
    logits, seen = problem.logits.expand(2, -1, -1).clone(), []
    for step in range(steps + 1):
        p = torch.softmax(logits, -1)
        if step == 0 or step in STEPS:
            seen.append(bandits.divergence(torch.log_softmax(logits, -1), ref_logp))
        # In float64: steps of 2^-24 would draw an arm of probability 1e-8, whose ratio is huge, too often or never.
        arms = bandits.sample(p.double(), samples, generator)
        descend(logits, p, arms, ref_logp)
    return torch.stack(seen, 1)


def descend(logits: Tensor, p: Tensor, arms: Tensor, ref_logp: Tensor) -> None:
    """One step of both methods, in place, from sampled arms (2, problems, samples).

    The same gradient as `bandits.estimated_gradients`, without weights for arms that were not drawn.
    """
    log_ratio = p.gather(-1, arms).clamp(min=torch.finfo(p.dtype).tiny).log() - ref_logp.gather(-1, arms)
    weight = torch.stack([k1.value(log_ratio[VANILLA]), k3.slope(log_ratio[K3])])
    share = weight * (-bandits.RATE / arms.shape[-1])
    # The score of arm y is e_y - π.
    logits.addcmul_(p, share.sum(-1, keepdim=True), value=-1).scatter_add_(-1, arms, share)


def exact(scale: float, problems: int, steps: int, generator: torch.Generator) -> Tensor:
    """Descend the expected gradients, which have no noise: ∇KL(π‖ref) for vanilla, ∇KL(ref‖π) for k3 as a loss.

    Returns:
        (2, points, problems) KL(π‖ref), as `sampled`.
    """
    problem = bandits.draw(problems, generator, torch.float32, scale=scale)
    logits, seen = problem.logits.expand(2, -1, -1).clone(), []
    for step in range(steps + 1):
        logp = torch.log_softmax(logits, -1)
        log_ratio, p = logp - problem.ref_logp, logp.exp()
        if step == 0 or step in STEPS:
            seen.append((p * log_ratio).sum(-1))
        weight = torch.stack([k1.value(log_ratio[VANILLA]), k3.slope(log_ratio[K3])])
        logits -= bandits.RATE * bandits.exact_gradient(weight, p)
    return torch.stack(seen, 1)


def share_of_experiments(difference: Tensor, generator: torch.Generator) -> Tensor:
    """(points,) the share of experiments of `EXPERIMENT` problems whose mean (points, problems) is positive."""
    chosen = torch.randint(difference.shape[-1], (EXPERIMENTS, EXPERIMENT), generator=generator)
    return torch.stack([(x[chosen].mean(-1) > 0).double().mean() for x in difference])


def compared(kl: Tensor, generator: torch.Generator) -> Numbers:
    """Of (2, points, problems), the first point the start: how far each method is, and where k3 is against vanilla."""
    start, later = kl[K3, 0], kl[:, 1:].double()
    difference = later[K3] - later[VANILLA]
    kept = later[K3, -1] <= start
    return {
        "problems": kl.shape[-1],
        "mean": later.mean(-1).tolist(),
        "median": later.median(-1).values.tolist(),
        "difference": over_repeats(difference),
        "experiments": share_of_experiments(difference, generator).tolist(),
        "above on problems": (difference[-1] > 0).double().mean().item(),
        "thrown": 1 - kept.double().mean().item(),
        "difference without thrown": over_repeats(difference[-1, kept]),
    }
