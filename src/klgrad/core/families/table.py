"""The table of a family: which values of its options may be declared.

The table has a cell for each value of each option. A cell is `ALLOWED`, or a `Refusal` with the reason and the remedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import MeaningError
from ..importance import Ratio
from .choices import Baseline, Declaration, TermEstimator


@dataclass(frozen=True)
class Refusal:
    """An empty cell of a family's table.

    Attributes:
        expected: what would be allowed, and why.
        received: what was given; `{}` stands for the value.
        remedy: what to write instead.
        only_exact: the cell is empty for estimator='exact' alone, and allowed for sampled estimators.
    """

    expected: str
    received: str
    remedy: str
    only_exact: bool = False


ALLOWED = None
"""A cell of a table whose value is allowed."""

TableCell = Refusal | None

NO_FUTURE_TO_DISCOUNT = Refusal(
    "no discount at level='token', which is discount 0",
    "discount={}",
    "write level='sequence' with the discount, or drop the discount",
)

NO_SCORE_TO_CENTRE = Refusal(
    "no baseline for an exact token term (level='token' or discount=0), whose gradient has no sampled score to centre",
    "baseline={!r}",
    "write baseline='none', or level='sequence' with a discount above 0: the future has a sampled score",
    only_exact=True,
)

NO_BOUND_FOR_EXACT = Refusal(
    "no influence bound for estimator='exact', which sums over the vocabulary",
    "influence_bound={}",
    "drop the bound, or use a sampled estimator",
    only_exact=True,
)


@dataclass(frozen=True)
class Table:
    """The cells of a family's table.

    Attributes:
        estimators: by `estimator`.
        ratios: by the ratio of `weighting`; None for on-policy terms.
        baselines: by `baseline`.
        partial_discount: for a `discount` strictly between 0 and 1.
        influence_bound: for an `influence_bound` that is not None.
    """

    estimators: Mapping[TermEstimator, TableCell]
    ratios: Mapping[Ratio | None, TableCell]
    baselines: Mapping[Baseline, TableCell]
    partial_discount: TableCell
    influence_bound: TableCell = NO_BOUND_FOR_EXACT

    def check(self, term: Declaration) -> None:
        """Raise `MeaningError` if an option of the term is an empty cell."""
        ratio = None if term.weighting is None else term.weighting.ratio
        cells: list[tuple[TableCell, object]] = [
            (self.estimators[term.estimator], term.estimator),
            (self.partial_discount if 0 < term.discount < 1 else ALLOWED, f"{term.discount:g}"),
            (self.ratios[ratio], ratio),
            (self.baselines[term.baseline], term.baseline),
            (ALLOWED if term.influence_bound is None else self.influence_bound, term.influence_bound),
        ]
        for cell, value in cells:
            if cell is not None and (term.estimator == "exact" or not cell.only_exact):
                raise MeaningError(cell.expected, cell.received.format(value), cell.remedy)
