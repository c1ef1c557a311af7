"""Recognise a KL in a reward that is whitened: centred, and divided by its standard deviation."""

from dataclasses import replace

import torch

from .batch import Batch
from .gradient import evaluate
from .numerics import probe_batch
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


LOWER = 8.0
"""What is subtracted from all log-probs, so that the changed ones are log-probs too."""


def _batch() -> Batch:
    """One group of three completions, on-policy."""
    batch = probe_batch(0.0, torch.float64)
    names = ("logp", "ref_logp", "old_logp", "behavior_logp")
    return replace(batch, **{name: getattr(batch, name).detach() - LOWER for name in names}).fresh()
