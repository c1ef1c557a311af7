"""What is expected of a loss, for `klgrad audit --expect` and for `klgrad.testing.assert_descends`."""

from dataclasses import dataclass

from ..core.term import KLTerm
from ..remedies import Remedy
from ..targets import TARGETS, Verdict
from ..zoo.replacements import TOKEN, TOKEN_RATIO
from .advising import KEEP_TARGET, SEQUENCE, STALE
from .audit_result import AuditResult
from .words import notes, small_batches

ON_POLICY: dict[Verdict, KLTerm] = {
    "reverse-kl-sequence": SEQUENCE,
    "reverse-kl-token": TOKEN,
    "forward-kl-token": KLTerm(divergence="forward", level="token", estimator="k3"),
    "forward-kl-sequence": KLTerm(divergence="forward", estimator="k3"),
}
"""A term for each on-policy verdict that a term has."""

OFF_POLICY: dict[Verdict, KLTerm] = {**STALE, "reverse-kl-token-sampler": TOKEN_RATIO}
"""The same off-policy."""


@dataclass(frozen=True)
class Difference:
    """One finding of an audit that is not as expected.

    Attributes:
        expected: what was expected.
        received: what was found.
        remedy: what to use for the verdict that was expected; None if it was no verdict, or one that no term has.
    """

    expected: str
    received: str
    remedy: Remedy | None = None

    def __str__(self) -> str:
        return f"expected {self.expected}, found {self.received}"


def differences(
    result: AuditResult, on_policy: Verdict | None = None, off_policy: Verdict | None = None, *, strict: bool = False
) -> list[Difference]:
    """Compare an audit with what is expected of the loss. One that is not deterministic meets no expectation.

    Args:
        result: the audit.
        on_policy: the expected verdict with samples from π. Where another target has the same gradient on-policy,
            either name will do.
        off_policy: the expected verdict with samples from another policy.
        strict: whether the verdict must hold in batches of every size, without a dead zone, and all must be finite.

    Returns:
        What differs; empty if nothing does.

    Example:
        >>> from klgrad.audit import audit, catalogue
        >>> from klgrad.audit.expectations import differences
        >>> print(*differences(audit(catalogue()["k3-loss"]), "reverse-kl-token"))
        expected reverse-kl-token on-policy, found forward-kl-token
    """
    if not result.deterministic and (on_policy or off_policy or strict):
        return [Difference("a verdict", "none, since the same batch gives different gradients")]
    found = []
    if on_policy is not None:
        found += _verdict(TARGETS[on_policy].same_on_policy or on_policy, result.verdict, "on-policy", ON_POLICY)
    if off_policy is not None:
        found += _verdict(off_policy, result.verdict_off_policy, "off-policy", OFF_POLICY)
    if strict and result.holds == "large-batches":
        off = small_batches(result)
        received = f"{result.verdict} in large batches only{f', {off}' if off else ''}"
        found.append(Difference("a verdict that holds in batches of every size", received))
    if strict and (result.dead_zone or not result.finite):
        found.append(Difference("a finite gradient without a dead zone", ", ".join(notes(result))))
    if strict and (result.stumbles_over_gaps or result.finite_if_empty is False):
        found.append(Difference("the same gradient with masked gaps and empty completions", ", ".join(notes(result))))
    return found


def _verdict(wanted: Verdict, got: Verdict, where: str, terms: dict[Verdict, KLTerm]) -> list[Difference]:
    if wanted == got:
        return []
    remedy = Remedy(f"for {wanted} {where}", (terms[wanted],)) if wanted in terms else None
    return [Difference(f"{wanted} {where}", got, remedy)]


def remedies(result: AuditResult, found: list[Difference]) -> list[Remedy]:
    """What to do about the differences, most important first.

    The audit's replacements are those for the reverse KL. Where another target is expected, they would be wrong, and
    are used only if there is no term for it.

    Args:
        result: the audit.
        found: what differs.

    Returns:
        The remedies; none if the audit finds nothing wrong and no term has the expected verdict.
    """
    advised = [remedy for remedy in result.advice.remedies if remedy.do != KEEP_TARGET]
    repairs = [remedy for remedy in advised if not remedy.use]
    replacements = [difference.remedy for difference in found if difference.remedy is not None]
    return [*repairs, *replacements] or advised
