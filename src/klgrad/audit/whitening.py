"""Recognise a KL in a reward that is whitened: centred, and divided by its standard deviation."""

from dataclasses import replace

import torch

from .batch import Batch
from .gradient import evaluate
from .subject import Subject

SCALE, SHIFT = -2.0, 5.0
"""What the log-ratios are multiplied by, and what is added to that of each first token, which changes its sign."""

SAME = 1e-2
"""Relative difference below which two gradients are opposite: 1e-4 is often added to the standard deviation."""


def whitens(subject: Subject) -> bool:
    """Whether the gradient only changes its sign when all log-ratios are multiplied by -2 and shifted.

    Args:
        subject: the loss.

    Returns:
        True for a loss that centres the KL and divides it by its spread; False also for a loss without a gradient.

    Example:
        >>> from klgrad import zoo
        >>> from klgrad.audit.subject import as_subject
        >>> whitens(as_subject(zoo.get("k1-reward-group-std"))), whitens(as_subject(zoo.get("k1-reward")))
        (True, False)
    """
    batch = _batch()
    log_ratio = SCALE * (batch.logp - batch.ref_logp).detach()
    log_ratio[:, 0] += SHIFT
    moved = replace(batch, ref_logp=batch.logp.detach() - log_ratio)
    before, after = (evaluate(subject, x)[1][0] for x in (batch, moved))
    return bool(before.abs().max() > 0) and bool((after + before).norm() < SAME * before.norm())


def _batch() -> Batch:
    """One group of three completions with three tokens each, on-policy."""
    logp = torch.tensor([[-4.0, -3.5, -5.0], [-3.3, -4.5, -3.7], [-4.2, -3.9, -3.4]], dtype=torch.float64)
    log_ratio = torch.tensor([[0.4, -0.9, 0.3], [-0.6, -0.2, 0.5], [0.8, 0.1, -0.3]], dtype=torch.float64)
    none, mask = torch.zeros_like(logp), torch.ones_like(logp, dtype=torch.bool)
    group = torch.zeros(len(logp), dtype=torch.long)
    return Batch(logp, logp - log_ratio, logp, logp, mask, none, group, none, none).fresh()
