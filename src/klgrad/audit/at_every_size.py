"""Small batches and the limit of large ones side by side: the verdict, and for which batches it holds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

from ..targets import TargetName, Verdict, signed
from .decomposition import Decomposition
from .large_batches import BATCH_SIZES, is_small
from .problems import Case
from .verdict import MATCH, Comparison

Holds = Literal["always", "large-batches"]
"""Whether a verdict holds in batches of every size, or in the limit of large ones only."""

NEAR_SUM = 0.1
"""A sum of two targets that leaves a larger remainder explains too little to be reported."""


@dataclass(frozen=True, eq=False)
class AtEverySize:
    """The gradients of a loss in small batches and in the limit.

    Attributes:
        small: batches of one group of 2, 3 or 4 completions.
        limit: batches with every group as often as it is likely.
    """

    small: Comparison
    limit: Comparison

    @cached_property
    def verdict(self) -> Verdict:
        """That of the limit, if no wider problem in small batches contradicts it."""
        found = self.limit.verdict
        if not self.small.is_finite or self._is_clipped_away:
            return "unknown"
        if self.scale_varies:
            match = self.limit.match_at_own_scales
            assert match is not None
            return signed(cast(TargetName, match.target), climbs=match.climbs)
        if found == "unknown" and self.decomposition is not None and self.decomposition.remainder <= MATCH:
            return "sum-of-targets"
        return "unknown" if self._is_contradicted else found

    @cached_property
    def scale_varies(self) -> bool:
        """Whether the gradient in the limit is that of a target at a scale that depends on the problem."""
        return self.limit.verdict == "unknown" and self.limit.match_at_own_scales is not None

    @cached_property
    def _is_clipped_away(self) -> bool:
        """Whether no completion of the limit's problems has a gradient, but some of those of small batches have one.

        A loss that clips the ratio has no gradient beyond it, and there are few completions.
        """
        without = all(m.gradient.typical == 0 for m in self.limit.measured)
        return without and any(m.gradient.typical != 0 for m in self.small.measured)

    @cached_property
    def _is_contradicted(self) -> bool:
        """Whether small batches match the limit except on wider problems.

        The problems of the limit have short completions and small groups, and a token must have a probability of 1/24
        to be in a batch, which bounds its log-ratio. The wider problems in small batches have more of each.
        """
        return self._in_small_batches == self.limit.verdict and bool(self.off_with)

    @cached_property
    def off_with(self) -> list[str]:
        """The wider problems on which the verdict of the standard ones, or else at equal lengths, does not hold."""
        known = self._in_small_batches
        if known == "unknown":
            return self._off_in_the_limit
        compared = [m for m in self.small.measured if m.case.wider and (known == self._standard or not m.case.varying)]
        return [m.case.wider for m in compared if not self.small.has_verdict(m, known)]

    @cached_property
    def _off_in_the_limit(self) -> list[str]:
        known = self.limit.only(lambda c: not c.wider).verdict
        if known == "unknown":
            return []
        return [m.case.wider for m in self.limit.measured if m.case.wider and not self.limit.has_verdict(m, known)]

    @cached_property
    def on_standard_problems(self) -> Verdict:
        """The verdict on the standard problems only.

        Where it differs from that on all, small batches must agree at equal lengths, where the size of a batch does not
        matter to a mean: the limit's problems have smaller log-ratios.
        """
        is_standard: Callable[[Case], bool] = lambda case: not case.wider
        found = AtEverySize(self.small.only(is_standard), self.limit.only(is_standard)).verdict
        at_equal_lengths = self.small.only(lambda case: not case.wider and not case.varying).verdict
        return found if found in (self.verdict, at_equal_lengths) else "unknown"

    @cached_property
    def _standard(self) -> Verdict:
        return self.small.only(lambda c: not c.wider).verdict

    @cached_property
    def _in_small_batches(self) -> Verdict:
        """The verdict on the standard problems, or else at equal lengths."""
        if self._standard != "unknown":
            return self._standard
        equal = self.small.only(lambda c: not c.wider and not c.varying)
        return equal.verdict if equal.measured else "unknown"

    @cached_property
    def holds(self) -> Holds | None:
        """Where the verdict holds; None if it is `unknown`."""
        if self.verdict == "unknown":
            return None
        if self.scale_varies:
            same = self.small.match_at_own_scales == self.limit.match_at_own_scales
            return "always" if same else "large-batches"
        if self.verdict != "sum-of-targets":
            return "always" if self.small.verdict == self.verdict else "large-batches"
        small, limit = self.small.decomposition, self.limit.decomposition
        same = small is not None and limit is not None and small.remainder <= MATCH and small.names == limit.names
        return "always" if same else "large-batches"

    @cached_property
    def decomposition(self) -> Decomposition | None:
        """The sum of two targets that the gradient is, or is near to; None where one target is enough."""
        found = None if self.scale_varies else self.limit.decomposition
        return found if found is not None and found.remainder <= NEAR_SUM else None


def bias_by_batch(found: AtEverySize, target: TargetName, at_size: Callable[[int], Comparison]) -> dict[str, float]:
    """The relative distance to a target by the number of completions in a batch, and in the `limit`.

    Args:
        found: the gradients of the loss on fresh samples.
        target: the target to compare with.
        at_size: the gradients on the problems of `at_batch_size` in batches of a given size.

    Returns:
        By size of the batch, over the same problems with varying lengths. Empty if the loss has no single target that
        it descends at one scale.
    """
    in_limit = found.limit.only(is_small)
    climbs = found.limit.match is not None and found.limit.match.climbs
    several = found.scale_varies or found.verdict == "sum-of-targets"
    if not in_limit.measured or in_limit.is_nothing or climbs or several:
        return {}
    return {str(size): at_size(size).bias[target] for size in BATCH_SIZES} | {"limit": in_limit.bias[target]}
