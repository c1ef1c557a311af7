"""The losses of this package: every cell of `klgrad.zoo`, and every configuration of `KLTerm`."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from ..core.families.choices import CHOICES
from ..core.importance import ImportanceWeighting, Truncate
from ..core.regularizers import squared_sequence
from ..core.term import KLTerm
from ..errors import MeaningError
from ..zoo import CELLS
from .subject import Subject, as_subject, of_rollout

WEIGHTINGS = (
    None,
    ImportanceWeighting("token", bound=None),
    ImportanceWeighting("prefix", bound=None),
    ImportanceWeighting("sequence", bound=None),
)

COMMON = (
    "k1-loss",
    "k2-loss",
    "k3-loss",
    "k3-loss-clamped",
    "ratio-k3-loss",
    "k3-no-grad",
    "k2-loss-token-mean",
    "k2-loss-length-mean",
    "stopped-ratio-k2-loss",
    "k1-reward",
    "k3-reward",
    "k1-reward-leave-one-out",
    "k1-reward-group-std",
    "reverse-token-exact",
    "reverse-sequence-exact-loo",
)
"""The losses that most people use, or should know."""

COMPROMISES = (
    KLTerm(discount=0.9),
    KLTerm(estimator="exact", discount=0.9),
    KLTerm(influence_bound=1.0),
    KLTerm(level="token", influence_bound=1.0),
    KLTerm(reduction="token"),
    KLTerm(level="token", reduction="token"),
    KLTerm(level="token", weighting=ImportanceWeighting("token", bound=Truncate(1.2))),
    KLTerm(weighting=ImportanceWeighting("prefix", bound=Truncate(1.2))),
)
"""Terms with an option that trades bias for variance, at one value of each continuous option."""


def every_term() -> Iterator[KLTerm]:
    """Every valid combination of the discrete options, then the compromises."""
    axes = {name: choices for name, choices in CHOICES.items() if name != "reduction"} | {"weighting": WEIGHTINGS}
    for values in product(*axes.values()):
        chosen: dict[str, Any] = dict(zip(axes, values, strict=True))
        try:
            yield KLTerm(**chosen)
        except MeaningError:
            continue
    yield from COMPROMISES


@cache
def catalogue() -> dict[str, Subject]:
    """All losses of this package, ready to audit.

    Returns:
        Subjects by name.

    Example:
        >>> from klgrad.audit import catalogue
        >>> catalogue()["k3-loss"].kind
        'cell'
    """
    subjects = [as_subject(cell) for cell in CELLS.values()]
    summary = (squared_sequence.__doc__ or "").split("\n")[0]
    subjects.append(of_rollout("squared-sequence", "term", squared_sequence, stacks=True, summary=summary))
    subjects += [as_subject(term) for term in every_term()]
    return {subject.name: subject for subject in subjects}
