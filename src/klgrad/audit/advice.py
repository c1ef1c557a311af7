"""What the audit says of a loss as a whole: its findings, its advice, and what differs from an expectation."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..core.importance import ImportanceWeighting, Truncate
from ..core.term import KLTerm, Remedy, capitalised
from ..targets import TARGETS, UNCORRECTED, Verdict
from ..zoo import AFTER_DIVISION, BOUNDED, K2_OR_TOKEN, TOKEN, TOKEN_RATIO
from .parts import Anatomy
from .sentences import part_differences, remarks, report, summary
from .subject import Subject

if TYPE_CHECKING:
    from .procedure import AuditResult

# Whether a loss is the usual KL, what was found beside its parts, and the report of both.

Answer = Literal["yes", "in part", "no", "not known"]


def is_usual(r: "AuditResult") -> Answer:
    """Whether a loss descends the KL that a penalty mostly means: KL(π‖ref), of whole completions.

    It does in part for the KL of each token, and where it is divided by a spread.
    """
    a = r.anatomy
    if not a.proved_fresh:
        return "no" if a.top else "not known"
    if a.baseline.spread != "none" and set(a.shares) == {"reverse-kl"} and not a.has_edges:
        return "in part"
    answers: dict[str, Answer] = {"reverse-kl-sequence": "yes", "reverse-kl-token": "in part"}
    return answers.get(r.verdict, "no")


def findings(r: "AuditResult") -> list[str]:
    """What was found beside the parts, in a few words each."""
    a = r.anatomy
    if not a.deterministic:
        return ["not deterministic"]
    wrong = r.float32_wrong_from
    texts = (
        [] if wrong is None else [f"more than 1% off in float32 where log π/ref {'<' if wrong < 0 else '>'} {wrong:g}"]
    )
    texts += [] if r.finite else ["NaN or infinite in float32"]
    texts += remarks(a)
    gaps = "masked positions inside a completion, such as the output of a tool,"
    if a.late:  # a late ref reads masked positions
        pass
    elif r.reads_masked:
        texts.append("the values at masked positions change its gradient")
    elif r.leaks_at_gaps:
        texts.append(f"{gaps} have a gradient")
    elif r.stumbles_over_gaps:
        texts.append(f"{gaps} change its gradient")
    return [*texts, "NaN or an error if a completion is empty"] if r.finite_if_empty is False else texts


def rows(r: "AuditResult") -> list[tuple[str, str]]:
    """The report of one loss: a label and a sentence for each part and for each finding."""
    a, answer = r.anatomy, is_usual(r)
    is_named = answer in ("yes", "in part") and a.baseline.spread == "none"
    where = [f"{answer}, of each token alone" if answer == "in part" and a.baseline.spread == "none" else answer]
    if is_named and r.verdict_off_policy not in (r.verdict, f"{r.verdict}-sampler"):
        where.append("on fresh samples only")
    if is_named and r.holds == "large-batches":
        where.append("in large batches (it depends on the other completions)")
    does = f": it {r.advice.finding}" if a.proved_fresh else ""
    parts = [("KL(π‖ref)?", f"{', '.join(where)}{does}".replace(" l ", " log π/ref ")), *report(a)]
    also = [("also", text) for text in findings(r)] if a.deterministic else []
    is_sound = is_named and all(remedy.do == IF_STALE for remedy in r.advice.remedies)
    check = f"klgrad audit {r.name} --expect {r.verdict}" + (" (which looks at fresh samples)" if where[1:] else "")
    expected = [("in CI", check)] if is_sound and r.kind != "framework" else []
    called = [("called", r.call)] if r.kind in ("function", "framework") else []
    return [*parts, *also, *expected, *called, *(("advice", str(remedy)) for remedy in r.advice.remedies)]


# From the parts to the advice: one remedy for each part that differs from a KL as it is mostly meant.


@dataclass(frozen=True)
class Advice:
    """What a loss does, what to beware of, and what to do about it.

    Attributes:
        finding: what the loss does, as the predicate of a sentence: "descends the forward KL, token by token".
        warnings: further findings.
        remedies: what to do, most important first; empty for a sound loss.
    """

    finding: str = ""
    warnings: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    def __str__(self) -> str:
        text = capitalised("; ".join([self.finding, *self.warnings]))
        return " ".join([f"{text}." if text else "", *map(str, self.remedies)]).strip()


SEQUENCE = KLTerm()
EITHER = Remedy("for the reverse KL", (TOKEN, SEQUENCE), "of each token, or of whole completions")

PREFIX = ImportanceWeighting("prefix", bound=None)

STALE: dict[Verdict, KLTerm] = {
    "reverse-kl-sequence": KLTerm(weighting=PREFIX),
    "reverse-kl-token": KLTerm(level="token", weighting=PREFIX),
    "forward-kl-token": KLTerm(divergence="forward", level="token", estimator="k3", weighting=PREFIX),
    "forward-kl-sequence": KLTerm(
        divergence="forward", estimator="k3", weighting=ImportanceWeighting("sequence", bound=None)
    ),
}
"""By on-policy verdict, a term that has the same target with samples from another policy too."""

NOT_DETERMINISTIC = Remedy("audit it in evaluation mode, without dropout or random state")
NOT_FINITE = Remedy("add a small constant to what it divides by")
WRONG_SIGN = Remedy("return the quantity to minimise")
MASKED = Remedy("multiply each token's value by the mask before it is summed, as in (kl * mask).sum()")
GAPS = Remedy(
    "find and count tokens by the mask, as in mask.cumsum(-1), not by their place in the completion, if masks have gaps"
)
LENGTHS = Remedy("divide by a constant or by all tokens of the batch, not by the length of each completion")
SHIFT = Remedy("compare the log-prob of token t with ref's log-prob of token t")
END = Remedy("include the last token of each completion, at which it ends")
NOT_REFERENCE = Remedy("pass the log-probs of ref, not those of the sampler")
BOUND_APART = Remedy(
    "detach the ratio, and let it weigh the coefficient instead of the estimate",
    (KLTerm(level="token", weighting=ImportanceWeighting("token", bound=Truncate(2.0))),),
    "the reverse KL, with the bound that you choose",
)
ENTROPY = Remedy("leave out the term with the log-prob of π alone, if no entropy term is meant")
SWAPPED = Remedy("swap logp and ref_logp, if k3 was meant, which is exp(-l) - 1 + l")
WITHOUT_ITSELF = Remedy("leave the completion itself out of the mean that is subtracted")
ENTRIES = Remedy("add the tail of the vocabulary, or use all of it")
CENTRE = Remedy("subtract a mean over completions, after the tokens of each are summed")
FOR_TOKENS = Remedy("for the reverse KL", (TOKEN,), "of each token; KLTerm() is that of whole completions")
FOR_SEQUENCES = Remedy("for the reverse KL", (SEQUENCE,))
IF_STALE = "for samples of an older policy too"
NOISY = "its variance grows with the length; bound=Truncate(c) trades it for bias"


def advise(result: "AuditResult", subject: Subject) -> Advice:
    """Turn the findings of an audit into advice; the loss may have a remedy of its own."""
    remedies = _remedies(result, subject)
    return Advice(_finding(result), tuple(_warnings(result)), (*remedies, *_for_stale_samples(result, remedies)))


def _remedies(result: "AuditResult", subject: Subject) -> tuple[Remedy, ...]:
    a = result.anatomy
    if not a.deterministic:
        return (NOT_DETERMINISTIC,)
    if not a.finite:
        return (NOT_FINITE,)
    if subject.instead is not None:
        return (subject.instead,)
    if subject.kind == "term":  # a term declares what it is
        return ()
    if not result.depends_on_reference:
        return (NOT_REFERENCE if a.anchor == "sampler" else K2_OR_TOKEN,)
    leaks = a.leaks or (not a.late and bool(result.reads_masked or result.leaks_at_gaps))
    if not a.proved_fresh and not a.shares:
        return (MASKED,) if leaks else (EITHER,)
    has_dead_zone = result.dead_below is not None or result.dead_above is not None
    parts = {
        SHIFT: a.late != 0,
        END: not a.ends,
        MASKED: leaks,
        GAPS: bool(result.stumbles_over_gaps) and not leaks and not a.late,
        WRONG_SIGN: bool(a.shares) and all(weight < 0 for weight in a.shares.values()),
        AFTER_DIVISION: a.baseline.spread != "none",
        CENTRE: a.baseline.name == "token-mean",
        LENGTHS: a.unit.name == "completion-mean",
        BOUND_APART: a.samples.bound is not None and a.samples.bound.beyond is not None,
        BOUNDED: has_dead_zone,
        ENTROPY: any(a.entropy),
        SWAPPED: set(a.shares) == {"chi-square"} and a.level == "token" and not a.is_exact,
        WITHOUT_ITSELF: a.baseline.name == "batch-mean",
        ENTRIES: a.top is not None and a.top.tail != "lumped",
        (FOR_SEQUENCES if a.horizon.kind == "all" else FOR_TOKENS): set(a.shares) == {"forward-kl"}
        and not has_dead_zone,
        EITHER: len(a.shares) > 1 or not set(a.shares) <= {"reverse-kl", "forward-kl"},
    }
    return tuple(_rescaled(a, remedy) for remedy, differs in parts.items() if differs)


def _rescaled(a: Anatomy, remedy: Remedy) -> Remedy:
    """A term sums over the completion: in the place of a mean over tokens it has another β."""
    if a.unit.name not in ("completion-mean", "token-mean") or not remedy.terms:
        return remedy
    return replace(remedy, why="; ".join(filter(None, ("divide β by the mean length", remedy.why))))


def _for_stale_samples(result: "AuditResult", others: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    a = result.anatomy
    is_weighted = any(term.weighting is not None for remedy in others for term in remedy.terms)
    # The bias of a bound was chosen.
    is_bounded = a.samples.ratio in ("token", "prefix", "sequence") and a.samples.bound is not None
    is_lost = _lost_when_stale(result) if a.shares else a.is_nothing and result.verdict_off_policy != "nothing"
    is_lost = is_lost and not summary(a, on_policy=False).startswith("the same")
    if not a.proved_fresh or is_weighted or is_bounded or not is_lost:
        return ()
    whole = a.horizon.kind != "none"
    meant: Verdict = "reverse-kl-sequence" if a.horizon.kind == "all" else "reverse-kl-token"
    meant = result.verdict if result.verdict in STALE and not others else meant
    advised = [term for remedy in others for term in remedy.terms if (term.level == "sequence") == whole]
    term = replace(advised[0], weighting=PREFIX) if advised else STALE[meant]
    return (_rescaled(a, Remedy(IF_STALE, (term,), NOISY)),)


def _lost_when_stale(result: "AuditResult") -> bool:
    """Whether stale samples leave no KL."""
    verdict = result.verdict_off_policy
    return not TARGETS[verdict].has_gradient or verdict in UNCORRECTED


def _finding(result: "AuditResult") -> str:
    a = result.anatomy
    text = summary(a)
    if not a.proved_fresh and not a.is_nothing:
        why = text.removeprefix("not known: ").removeprefix("none can be told: ")
        return f"descends no divergence that is known: {why}"
    beside = {
        ", on masked positions too": a.leaks,
        ", but not at the last token": not a.ends,
        ", but not of completions that fill the width": not a.cut_off,
        ", with an entropy term beside it": any(a.entropy),
        ", so that tokens of short completions weigh more": a.unit.name == "completion-mean" and not a.is_nothing,
    }
    text += "".join(words for words, holds in beside.items() if holds)
    if text.startswith("climbs"):
        return f"{text}: the sign is wrong"
    if text.startswith("nothing"):
        return f"regularises {text}"
    if text.startswith("none: "):
        return f"descends no divergence: {text.removeprefix('none: ')}"
    return f"descends {'' if text.startswith('a ') else 'the '}{text}"


def _warnings(result: "AuditResult") -> list[str]:
    a = result.anatomy
    if not a.deterministic:
        return []
    is_lost = _lost_when_stale(result) and result.verdict_off_policy != "nothing"
    if a.proved_fresh and (is_lost if result.depends_on_reference else a.constant):
        return [*findings(result), f"on stale samples: {summary(a, on_policy=False)}"]
    return findings(result)


# What is expected of a loss, for `klgrad audit --expect` and for `klgrad.testing.assert_descends`.

ON_POLICY: dict[Verdict, KLTerm] = {name: replace(term, weighting=None) for name, term in STALE.items()}
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


Expectation = Verdict | dict[str, str]
"""A name of `klgrad.targets`, or values of parts: `{"divergence": "reverse-kl", "horizon": "all"}`."""


def differences(
    result: "AuditResult",
    on_policy: Expectation | None = None,
    off_policy: Verdict | None = None,
    *,
    strict: bool = False,
) -> list[Difference]:
    """Compare an audit with what is expected of the loss. One that is not deterministic meets no expectation.

    Args:
        result: the audit.
        on_policy: the expected verdict with samples from π, where another target has the same gradient on-policy
            either name will do; or the expected parts.
        off_policy: the expected verdict with samples from another policy.
        strict: whether the verdict must hold in batches of every size, without a dead zone, and all must
            be finite and right in float32.

    Returns:
        What differs; empty if nothing does.

    Example:
        >>> from klgrad.audit import audit, catalogue
        >>> from klgrad.audit.advice import differences
        >>> print(*differences(audit(catalogue()["k3-loss"]), "reverse-kl-token"))
        expected reverse-kl-token on-policy, found forward-kl-token
    """
    a = result.anatomy
    if not a.deterministic and (on_policy or off_policy or strict):
        return [Difference("a verdict", "none, since the same batch gives different gradients")]
    differ: list[Difference] = []
    if isinstance(on_policy, dict):
        differ += [Difference(*pair) for pair in part_differences(a, on_policy)]
    elif on_policy is not None:
        differ += _verdict(TARGETS[on_policy].same_on_policy or on_policy, result.verdict, "on-policy", ON_POLICY)
    if off_policy is not None:
        differ += _verdict(off_policy, result.verdict_off_policy, "off-policy", OFF_POLICY)
    if strict:
        sides = [(result.verdict, result.holds)]
        sides += [(f"{result.verdict_off_policy} off-policy", result.holds_off_policy)] if off_policy else []
        differ += [
            Difference("a verdict that holds in batches of every size", f"{verdict} in large batches only")
            for verdict, holds in sides
            if holds == "large-batches"
        ]
        differ += _numerical(result)
    return differ


def _verdict(wanted: Verdict, got: Verdict, where: str, terms: dict[Verdict, KLTerm]) -> list[Difference]:
    if wanted == got:
        return []
    remedy = Remedy(f"for {wanted} {where}", (terms[wanted],)) if wanted in terms else None
    return [Difference(f"{wanted} {where}", got, remedy)]


def _numerical(result: "AuditResult") -> list[Difference]:
    """What a strict expectation asks of the numbers."""
    dead = [f"no gradient {word} log π/ref = {edge:.3g}" for word, edge in (
        ("below", result.dead_below), ("above", result.dead_above)
    ) if edge is not None]  # fmt: skip
    is_wrong = result.float32_wrong_from is not None or not result.finite
    is_disturbed = result.stumbles_over_gaps or result.finite_if_empty is False
    received = ", ".join([*dead, *findings(result)])
    wanted = {
        "a finite gradient without a dead zone, right in float32": bool(dead) or is_wrong,
        "the same gradient with masked gaps and empty completions": is_disturbed,
    }
    return [Difference(expected, received) for expected, differs in wanted.items() if differs]


def remedies(result: "AuditResult", differing: list[Difference]) -> list[Remedy]:
    """What to do about the differences, most important first.

    The audit's replacements are those for the reverse KL. Where another target is expected, they would be wrong, and
    are used only if there is no term for it.
    """
    advised = [remedy for remedy in result.advice.remedies if remedy.do != IF_STALE]
    repairs = [remedy for remedy in advised if not remedy.use]
    replacements = [difference.remedy for difference in differing if difference.remedy is not None]
    return [*repairs, *replacements] or advised
