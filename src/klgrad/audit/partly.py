"""What a loss without a verdict descends on some of the problems: near ref, at equal lengths, or on most of them."""

from dataclasses import dataclass
from typing import Literal

from ..targets import TARGETS, Verdict
from .audit_result import AuditResult
from .numbers import listed, outside, percent

Where = Literal["most problems", "near ref", "near ref at equal lengths", "equal lengths"]


@dataclass(frozen=True)
class Partly:
    """A verdict that holds on some of the problems.

    Attributes:
        where: on which.
        verdict: the verdict there.
        limits: the same in words, with what is off elsewhere.
    """

    where: Where
    verdict: Verdict
    limits: str

    @property
    def words(self) -> str:
        """As a noun phrase."""
        return f"{TARGETS[self.verdict].title_in_sentence}, {self.limits}"

    @property
    def finding(self) -> str:
        """As what the loss does."""
        return f"{TARGETS[self.verdict].does}, {self.limits}"


def partly(r: AuditResult) -> Partly | None:
    """On which problems a loss without a verdict on fresh samples has one; None if there are none, or it has one."""
    if r.verdict != "unknown" or not (r.deterministic and r.finite_in_float64 and r.depends_on_reference):
        return None
    if r.verdict_standard not in ("unknown", "sum-of-targets") and r.off_with:
        return Partly("most problems", r.verdict_standard, f"but not with {listed(r.off_with)}")
    near, far = (percent(r.bias_by_distance[distance]) for distance in ("near", "far"))
    equal = "only if nothing is masked" if r.touches_padding or r.reads_masked else "at equal lengths only"
    if TARGETS[r.verdict_near].has_gradient:
        zone = outside(r.dead_below, r.dead_above)
        dead = f"; no gradient where log π/ref is {zone}" if zone else ""
        return Partly("near ref", r.verdict_near, f"near ref only ({far} off far from it{dead})")
    if r.length_sensitive and TARGETS[r.verdict_fixed_lengths].has_gradient:
        off = percent(r.bias_by_batch.get("limit", r.bias[r.nearest]))
        return Partly("equal lengths", r.verdict_fixed_lengths, f"{equal} ({off} off if not)")
    if TARGETS[r.verdict_near_fixed_lengths].has_gradient:
        off = f"{near} off near ref, {far} far from it"
        return Partly("near ref at equal lengths", r.verdict_near_fixed_lengths, f"near ref and {equal} ({off})")
    return None
