"""The values that the fields of a `KLTerm` can take, and what a family reads of a term."""

from typing import Literal, Protocol, get_args

from ..importance import ImportanceWeighting
from ..result import Reduction

Divergence = Literal["reverse", "forward"]
"""`reverse` is KL(π‖ref), `forward` is KL(ref‖π)."""

Level = Literal["token", "sequence"]
"""`sequence`: distributions over completions. `token`: distributions over one token, prefixes held fixed."""

TermEstimator = Literal["k1", "k1_k3", "k3", "exact"]
"""The sampled estimators of `klgrad.estimators`, or `exact` for a sum over the vocabulary."""

Baseline = Literal["none", "leave_one_out"]
"""What is subtracted from a coefficient to lower its variance."""

CHOICES: dict[str, tuple[str, ...]] = {
    "divergence": get_args(Divergence),
    "level": get_args(Level),
    "estimator": get_args(TermEstimator),
    "baseline": get_args(Baseline),
    "reduction": get_args(Reduction),
}
"""The allowed values of each field that takes one of a few strings."""


class Declaration(Protocol):
    """The fields of a `KLTerm` that its family depends on, as documented there."""

    @property
    def estimator(self) -> TermEstimator: ...  # noqa: D102
    @property
    def discount(self) -> float: ...  # noqa: D102
    @property
    def baseline(self) -> Baseline: ...  # noqa: D102
    @property
    def weighting(self) -> ImportanceWeighting | None: ...  # noqa: D102
    @property
    def influence_bound(self) -> float | None: ...  # noqa: D102
    @property
    def reduction(self) -> Reduction: ...  # noqa: D102
