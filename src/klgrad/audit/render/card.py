"""The card of one loss: what `templates/card.html` shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...remedies import as_code, capitalised
from ...targets import TARGETS, Role, Target
from ..audit_result import AuditResult
from ..curve import Curve, per_unit
from ..numbers import apart, at_and_beyond, listed, outside, percent
from ..partly import partly
from ..problems import group_sizes
from ..verdict import MATCH
from ..words import in_sum, nearest, small_batches
from .chart import Chart, chart_of
from .environment import number
from .fixes import Fix, own_lines


@dataclass(frozen=True)
class VerdictView:
    """A verdict with its heading and sentence."""

    where: str
    role: Role
    title: str
    sentence: str


@dataclass(frozen=True)
class Distance:
    """A relative distance to a target; `text` is None where there is no finite number, as to the sampler on-policy."""

    bias: float | None

    @property
    def is_match(self) -> bool:
        """Whether the gradients agree."""
        return self.bias is not None and self.bias <= MATCH

    @property
    def text(self) -> str | None:
        """In words or percent."""
        if self.bias is None or not math.isfinite(self.bias):
            return None
        return "match" if self.is_match else percent(self.bias)


@dataclass(frozen=True)
class Fact:
    """A measurement; a fault is shown in bold."""

    name: str
    text: str
    is_fault: bool = False


@dataclass(frozen=True)
class Card:
    """Everything about one loss.

    Attributes:
        result: the audit of the loss.
        anchor: its id on the page.
        summary: one line about the loss, or empty.
        verdicts: on-policy, then off-policy.
        own_lines: lines of its framework, each with a sentence that introduces it.
        terms: label and code of the terms to use, where there are no own lines.
        chart: the coefficient curve, or None where there is none.
        dead: its dead zones in words, or empty.
        has_gaps: whether the coefficient is not finite somewhere.
        distances: to each target, on-policy and off-policy.
        facts: the other measurements.
    """

    result: AuditResult
    anchor: str
    summary: str
    verdicts: tuple[VerdictView, VerdictView]
    own_lines: list[tuple[Fix, str]]
    terms: list[tuple[str, str]]
    chart: Chart | None
    dead: str
    has_gaps: bool
    distances: list[tuple[Target, tuple[Distance, Distance]]]
    facts: list[Fact]

    @property
    def label(self) -> str:
        """The curve in words, for screen readers."""
        return f"{self.result.name}: {f'no gradient {self.dead}' if self.dead else 'no dead zone'}"


def card_of(r: AuditResult, curve: Curve, anchor: str, summary: str, fixes: Sequence[Fix]) -> Card:
    """Build the card of a loss.

    Args:
        r: the audit of the loss.
        curve: its coefficient curve, empty where it has none.
        anchor: its id on the page.
        summary: one line about it, or empty.
        fixes: what to write in its framework; empty for other losses.
    """
    dead = outside(r.dead_below, r.dead_above, number)
    return Card(
        result=r,
        anchor=anchor,
        summary=summary,
        verdicts=(_view(r, on_policy=True), _view(r, on_policy=False)),
        own_lines=own_lines(r, fixes) if fixes else [],
        terms=[(x.do or "instead", as_code(term)) for x in r.advice.remedies for term in x.terms],
        chart=chart_of(per_unit(curve), r.dead_below, r.dead_above) if curve else None,
        dead=dead,
        has_gaps=any(y is None for _, y in curve),
        distances=[
            (TARGETS[name], (Distance(r.bias.get(name)), Distance(off))) for name, off in r.bias_off_policy.items()
        ],
        facts=_facts(r, dead),
    )


def _view(r: AuditResult, *, on_policy: bool) -> VerdictView:
    target = TARGETS[r.verdict if on_policy else r.verdict_off_policy]
    title, sentence = target.title, target.sentence
    found = r.decomposition if on_policy else r.decomposition_off_policy
    if target.name == "unknown":
        title, sentence = _unknown(r, on_policy)
    elif target.name == "sum-of-targets" and found is not None:
        title = capitalised(in_sum(found))
    elif on_policy and small_batches(r):
        title, sentence = f"{title}, in large batches", f"{capitalised(small_batches(r))}; nothing in the limit."
    elif not on_policy and r.holds_off_policy == "large-batches":
        title = f"{title}, in large batches"
    elif (r.holds if on_policy else r.holds_off_policy) == "small-batches":
        title = f"{title}, in batches of {group_sizes()} completions"
    elif target.name == "nothing" and not r.has_gradient:
        sentence = "No gradient reaches the log-probs."
    return VerdictView("On-policy" if on_policy else "Off-policy", target.role, title, sentence)


def _unknown(r: AuditResult, on_policy: bool) -> tuple[str, str]:
    target = r.nearest if on_policy else r.nearest_off_policy
    bias = r.bias if on_policy else r.bias_off_policy
    name, off = TARGETS[target].title_in_sentence, percent(bias[target])
    if not r.deterministic:
        return "No verdict", "The same batch gives different gradients."
    if not r.finite_in_float64:
        return "No verdict", "The gradient is not a finite number on some group."
    if on_policy and not r.depends_on_reference:
        return "No KL", "Its gradient is the same for every reference."
    part = partly(r) if on_policy else None
    if part is not None:
        of_all = f"Over all standard problems: {off} off the {name}." if TARGETS[part.verdict].has_gradient else ""
        return capitalised(part.words), of_all
    return TARGETS["unknown"].title, capitalised(nearest(r, on_policy=on_policy)) + "."


def _facts(r: AuditResult, dead: str) -> list[Fact]:
    wrong = r.float32_wrong_from
    precision = "keeps its digits" if wrong is None else f"wrong {at_and_beyond(wrong, number)}"
    found = [
        Fact("Variance", f"{number(r.variance)}, near ref {number(r.variance_near)}"),
        Fact("Scale", _scale(r)),
        Fact("Lengths", _lengths(r), r.length_sensitive),
        Fact("Dead zone", f"no gradient for log π/ref {dead}" if dead else "none", bool(dead)),
        Fact("float32", precision, wrong is not None),
        Fact("Finite", "always" if r.finite else "overflows, or 0/0", not r.finite),
        Fact("Padding", "gets gradient" if r.touches_padding else "gets none", r.touches_padding),
        Fact("Depends on ref", "yes" if r.depends_on_reference else "no", not r.depends_on_reference),
    ]
    if r.off_with:
        found.append(Fact("Off with", listed(r.off_with), is_fault=True))
    if not r.deterministic:
        found.append(Fact("Deterministic", "no", is_fault=True))
    return found


def _scale(r: AuditResult) -> str:
    if not TARGETS[r.verdict].has_gradient or r.scale is None:
        return "none without a target"
    if r.scale_range is None:
        return f"{number(r.scale)} × the target"
    low, high = apart(*r.scale_range)
    return f"{low} to {high} × the target, depending on the shape of the batch"


def _lengths(r: AuditResult) -> str:
    if not r.length_sensitive:
        return "do not change the verdict"
    return f"change the verdict; equal ones give: {TARGETS[r.verdict_fixed_lengths].title}"
