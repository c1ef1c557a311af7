"""Assertions about losses, for the tests of your project. With pytest they are fixtures too: `klgrad.pytest_plugin`."""

from typing import cast

from .audit import AuditResult, Subject, audit, catalogue, load
from .audit.advice import Difference, differences, remedies
from .audit.call import Settings
from .audit.probes import Advantages
from .audit.sentences import parse_parts
from .audit.subject import as_subject, imports_for
from .errors import UnknownNameError, VerdictError
from .targets import TARGETS, Verdict


def assert_descends(
    loss: object,
    verdict: Verdict | str,
    *,
    off_policy: Verdict | None = None,
    strict: bool = False,
    advantages: Advantages = "zero",
    settings: Settings | None = None,
) -> AuditResult:
    """Audit a loss, and fail if it does not descend what it should: `klgrad audit --expect` as an assertion.

    Args:
        loss: the loss, in any form that `klgrad.audit.audit` takes; or a text, as for the command: a name of the
            catalogue, `path/to/file.py:function` or `package.module:function`.
        verdict: what is expected with samples from π: the name of a target or any other verdict, or values of parts:
            `"divergence=reverse-kl,horizon=all,unit=sum"`.
        off_policy: the verdict that is expected with samples from another policy; None for any.
        strict: fail also for a verdict that holds in large batches only, a dead zone, a gradient that is not finite
            or wrong in float32, or one that masked gaps or empty completions change.
        advantages: as in `klgrad.audit.audit`.
        settings: values of the loss's own parameters, such as `{"beta": 0.04}`.

    Returns:
        The audit, for further assertions.

    Raises:
        VerdictError: an `AssertionError`; its message has what was expected, what the loss descends, and what to do.
        UnknownNameError: there is no such verdict, or no such loss.

    Example:
        >>> from klgrad.testing import assert_descends
        >>> def k2(logp, ref_logp):
        ...     return (logp - ref_logp) ** 2 / 2
        >>> assert_descends(k2, "reverse-kl-token").holds
        'always'
        >>> try:
        ...     assert_descends(k2, "reverse-kl-sequence")
        ... except AssertionError as error:
        ...     print(error.remedy)
        for reverse-kl-sequence on-policy, use KLTerm() instead.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    for name in (verdict, off_policy):
        if name is not None and name not in TARGETS and "=" not in name:
            raise UnknownNameError("verdict", name, TARGETS)
    expected = parse_parts(verdict) if "=" in verdict else cast(Verdict, verdict)
    with imports_for(loss if isinstance(loss, str) else ""):
        result = audit(_subject(loss, settings), advantages=advantages)
    mismatches = differences(result, expected, off_policy, strict=strict)
    if mismatches:
        raise _error(result, mismatches, strict and not differences(result, expected, off_policy))
    return result


def _subject(loss: object, settings: Settings | None) -> Subject:
    if not isinstance(loss, str):
        return as_subject(loss, settings=settings)
    if ":" in loss:
        return load(loss, settings)
    known = catalogue()
    if loss not in known:
        raise UnknownNameError("loss", loss, known)
    return as_subject(known[loss], settings=settings)


def _error(result: AuditResult, mismatches: list[Difference], strict_alone: bool) -> VerdictError:
    advice = result.advice
    remedy = " ".join(map(str, remedies(result, mismatches))) or "change the loss, or what is expected of it"
    if strict_alone:
        remedy = f"{remedy.rstrip('.')}, or leave out strict"
    expected, received = (
        " and ".join(texts) for texts in zip(*((x.expected, x.received) for x in mismatches), strict=True)
    )
    explanation = "; ".join([advice.finding, *advice.warnings])
    return VerdictError(
        f"{expected} from {result.name}", f"{received}: it {explanation}", remedy[0].lower() + remedy[1:]
    )
