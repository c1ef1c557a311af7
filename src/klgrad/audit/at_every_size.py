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

Holds = Literal["always", "large-batches", "small-batches"]
"""Whether a verdict holds in batches of every size, in the limit of large ones only, or in batches of 2, 3 and 4
completions, where the order of the rows matters and larger batches are not audited."""

NEAR_SUM = 0.1
"""A sum of two targets that leaves a larger remainder explains too little to be reported."""


@dataclass(frozen=True, eq=False)
class AtEverySize:
    """The gradients of a loss in small batches and in the limit.

    Attributes:
        small: batches of one group of 2, 3 or 4 completions.
        limit: batches with every group as often as it is likely.
        pairs: makes the gradients on the limit's problems in batches of 2 completions; they are computed only if they
            are needed.
        order_matters: whether the order of the groups of a large batch changes the gradient. The limit lists them in
            an order in which nobody draws them, so small batches decide.
    """

    small: Comparison
    limit: Comparison
    pairs: Callable[[], Comparison]
    order_matters: bool = False

    def only(self, keep: Callable[[Case], bool]) -> "AtEverySize":
        """The same on some of the problems."""
        pairs = lambda: self._pairs.only(keep)
        return AtEverySize(self.small.only(keep), self.limit.only(keep), pairs, self.order_matters)

    @cached_property
    def _pairs(self) -> Comparison:
        return self.pairs()

    @cached_property
    def verdict(self) -> Verdict:
        """That of the limit, if no problem in small batches contradicts it."""
        if not self.small.is_finite or self._is_clipped_away:
            return "unknown"
        if self.order_matters:
            return self.small.verdict
        found = self._of_limit
        if found == "unknown" or self._is_contradicted or not self._is_a_matter_of_size(found):
            return "unknown"
        return found

    @cached_property
    def _of_limit(self) -> Verdict:
        if self.scale_varies:
            match = self.limit.match_at_own_scales
            assert match is not None
            return signed(cast(TargetName, match.target), climbs=match.climbs)
        is_sum = self.decomposition is not None and self.decomposition.remainder <= MATCH
        return "sum-of-targets" if self.limit.verdict == "unknown" and is_sum else self.limit.verdict

    @cached_property
    def of_one_target(self) -> Verdict:
        """As `verdict`, at one scale and without sums."""
        return "unknown" if self.scale_varies or self.verdict == "sum-of-targets" else self.verdict

    def _is_a_matter_of_size(self, verdict: Verdict) -> bool:
        """Whether small batches lack a verdict of the limit because of their size, or do not lack it.

        The limit's problems are narrower than those of small batches: fewer probabilities, log-ratios and ratios. If
        the verdict holds on them in batches of 2 as well, the size plays no role, and the problems of small batches
        must have the verdict too. Equal and varying lengths are held apart, since a mean over tokens depends on the
        size at varying lengths only.
        """
        if self._has(self.small, verdict):
            return True
        kinds: list[Callable[[Case], bool]] = [lambda c: c.varying, lambda c: not c.varying]
        return all(
            self._has(self.small.only(kind), verdict) or not self._has(self._pairs.only(kind), verdict)
            for kind in kinds
        )

    def _has(self, found: Comparison, verdict: Verdict) -> bool:
        """Whether these gradients have a verdict of the limit, in the sense in which the limit has it."""
        if not found.measured:
            return True
        if self.scale_varies:
            return found.match_at_own_scales == self.limit.match_at_own_scales
        if verdict != "sum-of-targets":
            return all(found.has_verdict(m, verdict) for m in found.measured)
        same, limit = found.decomposition, self.limit.decomposition
        return same is not None and limit is not None and same.remainder <= MATCH and same.names == limit.names

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
        return self._in_small_batches == self._of_limit and bool(self.off_with)

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
        found = self.only(lambda case: not case.wider).verdict
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
        if self.order_matters:
            return "small-batches"
        return "always" if self._has(self.small, self.verdict) else "large-batches"

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
    if not in_limit.measured or in_limit.is_nothing or climbs or several or found.order_matters:
        return {}
    return {str(size): at_size(size).bias[target] for size in BATCH_SIZES} | {"limit": in_limit.bias[target]}
