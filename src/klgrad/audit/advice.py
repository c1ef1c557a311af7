"""What the audit says of a loss as a whole: its notes, its advice, and what differs from an expectation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..core.importance import ImportanceWeighting, Truncate
from ..core.term import KLTerm, Piece, Remedy, capitalised, joined
from ..targets import TARGETS, UNCORRECTED, Verdict
from ..zoo import AFTER_DIVISION, K2_OR_TOKEN, TOKEN, TOKEN_RATIO
from .sentences import outside, part_differences, remarks, report, summary
from .subject import Subject

if TYPE_CHECKING:
    from .procedure import AuditResult

# Numbers as text.


def at_and_beyond(log_ratio: float, number: Callable[[float], str] = "{:g}".format) -> str:
    """Where log π/ref has this value, or one farther from 0; `number` writes the value.

    Example:
        >>> at_and_beyond(-16)
        'where log π/ref is -16 or less'
    """
    return f"where log π/ref is {number(log_ratio)} or {'less' if log_ratio < 0 else 'more'}"


# How a loss stands as a reverse KL, for reports of many.

Standing = Literal["right", "large", "else", "nothing"]
"""It is one, it is one in large batches, it is something else, or it is nothing."""

STANDINGS: dict[Standing, str] = {
    "right": "The reverse KL",
    "large": "The reverse KL in large batches",
    "else": "Something else",
    "nothing": "Nothing",
}
"""The heading of each, in the order of a report."""


def standing(r: "AuditResult") -> Standing:
    """How a loss stands on fresh samples."""
    target = TARGETS[r.verdict]
    if target.role == "nothing" or not r.depends_on_reference:
        return "nothing"
    if target.role != "reverse":
        return "else"
    return "large" if r.holds == "large-batches" else "right"


def findings(r: "AuditResult") -> list[tuple[str, str]]:
    """What was found beside the parts: for each a note, for a table, and a sentence; either may be empty."""
    a = r.anatomy
    if not a.deterministic:
        return [("not deterministic", "")]
    pairs = []
    if a.finite and not a.proved_fresh and a.top_k is None:
        pairs.append((f"depends on {', '.join(a.matters)}" if a.matters else "not proved", ""))
    wrong = r.float32_wrong_from
    edge = r.dead_below if (wrong or 0.0) < 0 else r.dead_above
    if wrong is not None and (edge is None or abs(wrong) < abs(edge)):
        pairs.append((f"float32 fails from l = {wrong:g}", f"in float32 it is wrong {at_and_beyond(wrong)}"))
    dead = outside(r.dead_below, r.dead_above)
    if dead:
        pairs.append((f"dead for l {dead}", f"it has no gradient where log π/ref is {dead}"))
    if not r.finite:
        pairs.append(("overflows", "it overflows in float32"))
    pairs += [(note, f"it has {text}" if text.startswith("a") else text) for note, text in remarks(a)]
    pairs += _of_mask(r)
    if r.finite_if_empty is False:
        pairs.append(("not finite if a completion is empty", "it is no finite number if a completion is empty"))
    return pairs


def is_usual(r: "AuditResult") -> str:
    """Whether a loss is the KL that a penalty mostly means: KL(π‖ref) of whole completions."""
    a, stale = r.anatomy, r.verdict_off_policy
    if standing(r) == "nothing" and a.proved_fresh:
        return "no: it has no effect on fresh samples"
    if r.verdict not in ("reverse-kl-sequence", "reverse-kl-token"):
        return "not known" if not a.proved_fresh and not a.top_k else _why_not(r)
    if a.baseline.spread != "none":
        return "its direction, at a strength that is not fixed"
    samples = "fresh and stale samples" if stale == r.verdict else "fresh samples"
    size = ", in large batches" if r.holds == "large-batches" else ""
    if r.verdict == "reverse-kl-sequence":
        return f"yes, on {samples}{size}"
    return f"in part: of each token, without its effect on later ones, on {samples}{size}"


def _why_not(r: "AuditResult") -> str:
    """`no`, and the part that differs."""
    a = r.anatomy
    own = set(a.shares)
    reasons = {
        "ref is one token off": a.late,
        "it pushes away from ref": own and all(weight < 0 for weight in a.shares.values()),
        "it is of a token's log-ratio times its probability": a.power,
        "it compares with the sampler": a.anchor == "sampler",
        "it is another divergence": own != {"reverse-kl"},
        "later tokens are discounted": a.horizon.kind == "discount",
        "it has no pull, or a constant one, at large log-ratios": a.has_edges,
        "there is an entropy term beside it": any(a.entropy),
    }
    return "; ".join(["no", *(reason for reason, holds in reasons.items() if holds)][:2]).replace("no; ", "no: ")


def rows(r: "AuditResult") -> list[tuple[str, str]]:
    """The report of one loss: a label and a sentence for each part and for each finding."""
    parts = [("KL(π‖ref)?", is_usual(r)), *report(r.anatomy)]
    also = [("also", text) for note, text in findings(r) if text and not note.startswith("dead")]  # its edges are told
    return [*parts[:-1], *also, parts[-1]] if r.anatomy.deterministic and r.anatomy.finite else parts


def notes(r: "AuditResult") -> list[str]:
    """Findings beside the parts, in a few words each."""
    return [note for note, _ in findings(r) if note]


def _of_mask(r: "AuditResult") -> list[tuple[str, str]]:
    """How masked positions disturb a loss, as a note and as a warning; not where a late ref reads them."""
    inside = "masked positions inside a completion, such as the output of a tool,"
    if r.anatomy.late:
        return []
    if r.reads_masked:
        return [("reads masked positions", "the values at masked positions change its gradient")]
    if r.leaks_at_gaps:
        return [("touches masked gaps", f"{inside} have a gradient")]
    return [("masked gaps change it", f"{inside} change its gradient")] if r.stumbles_over_gaps else []


# From the parts to the advice: one remedy for each part that differs from a KL as it is mostly meant.


@dataclass(frozen=True)
class Advice:
    """What a loss does, what to beware of, and what to do about it.

    Attributes:
        finding: what the loss does, as the predicate of a sentence: "descends the token-level forward KL".
        warnings: further findings, in the same form.
        remedies: what to do, most important first; empty for a sound loss.
    """

    finding: str = ""
    warnings: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()

    @property
    def pieces(self) -> list[Piece]:
        """The advice in sentences, with code marked as such."""
        findings = capitalised("; ".join([self.finding, *self.warnings]))
        pieces = [Piece(f"{findings}.")] if findings else []
        for remedy in self.remedies:
            pieces += [Piece(" "), *remedy.pieces]
        return pieces

    def __str__(self) -> str:
        return joined(self.pieces)


SEQUENCE = KLTerm()
EITHER = Remedy("for a KL", (TOKEN, SEQUENCE), "whichever is meant")

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
CLAMP = Remedy(
    "bound the coefficient instead of the value, so that there is a pull at every log-ratio",
    (KLTerm(level="token", influence_bound=10.0),),
    "the reverse KL",
)
BOUND_APART = Remedy(
    "detach the ratio, and let it weigh the coefficient instead of the estimate",
    (KLTerm(level="token", weighting=ImportanceWeighting("token", bound=Truncate(2.0))),),
    "the reverse KL, with the bound that you choose",
)
POWER = Remedy("leave out the factor π: a token is sampled with that probability already", (TOKEN,))
ENTROPY = Remedy("leave out the term with the log-prob of π alone, if no entropy term is meant")
SWAPPED = Remedy("swap logp and ref_logp, if k3 was meant, which is exp(-l) - 1 + l")
WITHOUT_ITSELF = Remedy("leave the completion itself out of the mean that is subtracted")
ENTRIES = Remedy("add the tail of the vocabulary, or use all of it")
CENTRE = Remedy("subtract a mean over completions, after the tokens of each are summed")
FOR_TOKENS = Remedy("for the reverse KL", (TOKEN,), "of each token; KLTerm() is that of whole completions")
FOR_SEQUENCES = Remedy("for the reverse KL", (SEQUENCE,))
NOISY = "its variance grows with the length; bound=Truncate(c) trades it for bias"
KEEP_TARGET = "for the same target if samples are stale"


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
    if not a.proved_fresh and not a.shares:
        return (MASKED,) if a.leaks or result.reads_masked else (EITHER,)
    has_dead_zone = result.dead_below is not None or result.dead_above is not None
    is_of_place = bool(_of_mask(result)) and not (a.leaks or result.reads_masked or result.leaks_at_gaps)
    parts = {
        SHIFT: a.late != 0,
        END: not a.ends,
        MASKED: a.leaks or (bool(_of_mask(result)) and not is_of_place),
        GAPS: is_of_place,
        WRONG_SIGN: bool(a.shares) and all(weight < 0 for weight in a.shares.values()),
        AFTER_DIVISION: a.baseline.spread != "none",
        CENTRE: a.baseline.name == "token-mean",
        LENGTHS: a.unit.name == "completion-mean",
        POWER: a.power != 0,
        BOUND_APART: a.samples.bound is not None and a.samples.bound.beyond is not None,
        CLAMP: has_dead_zone,
        ENTROPY: any(a.entropy),
        SWAPPED: set(a.shares) == {"chi-square"} and a.level == "token" and not a.is_exact,
        WITHOUT_ITSELF: a.baseline.name == "batch-mean",
        ENTRIES: a.top_k is not None and not a.lumps_tail,
        (FOR_SEQUENCES if a.horizon.kind == "all" else FOR_TOKENS): set(a.shares) == {"forward-kl"}
        and not has_dead_zone,
        EITHER: len(a.shares) > 1 or not set(a.shares) <= {"reverse-kl", "forward-kl"},
    }
    return tuple(remedy for remedy, differs in parts.items() if differs)


def _for_stale_samples(result: "AuditResult", others: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
    weighted = any(term.weighting is not None for remedy in others for term in remedy.terms)
    samples = result.anatomy.samples
    weighted |= samples.ratio in ("prefix", "sequence") and samples.bound is not None  # its bias was chosen
    if not _lost_when_stale(result) or result.verdict not in STALE or weighted:
        return ()
    return (Remedy(KEEP_TARGET, (STALE[result.verdict],), NOISY),)


def _lost_when_stale(result: "AuditResult") -> bool:
    """Whether stale samples leave no KL."""
    verdict = result.verdict_off_policy
    return not TARGETS[verdict].has_gradient or verdict in UNCORRECTED


def _finding(result: "AuditResult") -> str:
    a = result.anatomy
    if a.power and a.proved_fresh:
        return f"descends no divergence: {summary(a).removeprefix('none: ')}"
    if not a.deterministic:
        return "is not deterministic: the same batch gives different gradients, so there is no verdict"
    if not a.finite:
        return "gives NaN or inf in float64 (perhaps on a group of equal completions, with a deviation of 0)"
    if result.verdict == "nothing" or not result.depends_on_reference:
        if a.is_nothing and not a.constant and not any(a.entropy):
            return "regularises nothing: no gradient depends on ref"
        if a.anchor == "sampler":
            return "regularises nothing: the log-probs of the sampler are in the place of ref"
        return f"regularises nothing: {summary(a).removeprefix('nothing: ')}"
    if a.late and a.proved_fresh:
        return f"descends {summary(a).replace('none:', 'no divergence:')}"
    if TARGETS[result.verdict].climbed:
        return f"{TARGETS[result.verdict].does}: the sign is wrong"
    if not a.proved_fresh:
        return f"descends no divergence that is known: {summary(a).removeprefix('not known: ')}"
    if result.verdict in ("unknown", "sum-of-targets"):
        text = summary(a)
        if text.startswith(("climbs", "nothing")):
            return text if text.startswith("climbs") else f"regularises {text}"
        ahead = f"{a.horizon.discount or 0:g} a token"
        text = text.replace(f", {ahead} ahead", f", with later tokens discounted by {ahead}")
        beside = ", with an entropy term beside it" if any(a.entropy) else ""
        return f"descends {'' if text.startswith('a ') else 'the '}{text}{beside}"
    bound = a.samples.bound
    inside = ", where the ratio is within its bound" if bound is not None and bound.beyond is not None else ""
    return TARGETS[result.verdict].does + (" in large batches" if result.holds == "large-batches" else "") + inside


def _warnings(result: "AuditResult") -> list[str]:
    a = result.anatomy
    if not a.deterministic or not a.finite:
        return []
    texts = [sentence for _, sentence in findings(result) if sentence]
    is_lost = _lost_when_stale(result) and result.verdict_off_policy != "nothing"
    if a.proved_fresh and (is_lost if result.depends_on_reference else a.constant):
        texts.append(f"on stale samples: {summary(a, on_policy=False)}")
    return texts


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
        edges = (result.dead_below, result.dead_above, result.float32_wrong_from)
        if any(edge is not None for edge in edges) or not result.finite:
            expected = "a finite gradient without a dead zone, right in float32"
            differ.append(Difference(expected, ", ".join(notes(result))))
        if result.stumbles_over_gaps or result.finite_if_empty is False:
            expected = "the same gradient with masked gaps and empty completions"
            differ.append(Difference(expected, ", ".join(notes(result))))
    return differ


def _verdict(wanted: Verdict, got: Verdict, where: str, terms: dict[Verdict, KLTerm]) -> list[Difference]:
    if wanted == got:
        return []
    remedy = Remedy(f"for {wanted} {where}", (terms[wanted],)) if wanted in terms else None
    return [Difference(f"{wanted} {where}", got, remedy)]


def remedies(result: "AuditResult", differing: list[Difference]) -> list[Remedy]:
    """What to do about the differences, most important first.

    The audit's replacements are those for the reverse KL. Where another target is expected, they would be wrong, and
    are used only if there is no term for it.
    """
    advised = [remedy for remedy in result.advice.remedies if remedy.do != KEEP_TARGET]
    repairs = [remedy for remedy in advised if not remedy.use]
    replacements = [difference.remedy for difference in differing if difference.remedy is not None]
    return [*repairs, *replacements] or advised
