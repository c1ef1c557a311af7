"""Gradients of a loss on several cases, ready to compare with targets."""

from collections.abc import Iterable

from ..targets import TO_REFERENCE, WITH_GRADIENT
from .batch import Advantages, advantage_of
from .gradient import expected_gradient
from .large_batches import limit_gradient
from .measurement import Measurement
from .problems import Case
from .subject import Subject
from .verdict import Comparison


def measure(
    subject: Subject, cases: Iterable[Case], advantages: Advantages = "zero", *, on_policy: bool = True
) -> Comparison:
    """Compute the gradient of a loss on every case.

    Args:
        subject: the loss.
        cases: summed over every group, or with `parts` in the limit of large batches.
        advantages: the advantages that the loss receives.
        on_policy: whether π is the sampler; targets between the two then have no gradient, and are left out.

    Returns:
        The gradients, to be compared with the targets.
    """
    found = []
    for case in cases:
        advantage = advantage_of(case.problem, advantages)
        if case.parts is None:
            gradient = expected_gradient(subject, case.problem, case.group_size, advantage)
        else:
            gradient = limit_gradient(subject, case, advantage)
        found.append(Measurement(case, gradient))
    return Comparison(found, TO_REFERENCE if on_policy else WITH_GRADIENT)
