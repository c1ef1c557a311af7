"""What an audit found, in words: shared by the advice, the terminal, Markdown and the page."""

from typing import Literal

from ..targets import TARGETS, TargetName
from .audit_result import AuditResult
from .decomposition import Decomposition
from .in_large_batches import LargeBatchResult
from .numbers import listed, outside, percent
from .partly import partly
from .problems import group_sizes
from .verdict import MATCH

Standing = Literal["right", "large", "else", "nothing"]
"""How a loss stands as a reverse KL: it is one, it is one in large batches, it is something else, or it is nothing."""

STANDINGS: dict[Standing, str] = {
    "right": "The reverse KL",
    "large": "The reverse KL in large batches",
    "else": "Something else",
    "nothing": "Nothing",
}
"""The heading of each, in the order of a report."""


def standing(r: AuditResult) -> Standing:
    """How a loss stands on fresh samples."""
    target = TARGETS[r.verdict]
    if target.role == "nothing" or ignores_reference(r):
        return "nothing"
    if target.role != "reverse":
        return "else"
    return "large" if r.holds == "large-batches" else "right"


def ignores_reference(r: AuditResult) -> bool:
    """Whether the gradient is known not to depend on the reference; one that is not finite cannot be compared."""
    return r.finite_in_float64 and not r.depends_on_reference


def in_words(r: AuditResult, *, on_policy: bool = True) -> str:
    """What the loss descends, as a noun phrase, with the percentage by which it is off."""
    verdict = r.verdict if on_policy else r.verdict_off_policy
    found = r.decomposition if on_policy else r.decomposition_off_policy
    if verdict == "sum-of-targets" and found is not None:
        return in_sum(found)
    if verdict == "unknown":
        part = partly(r) if on_policy else None
        return part.words if part is not None else _without_verdict(r, on_policy=on_policy)
    holds = r.holds if on_policy else r.holds_off_policy
    off = f" ({small_batches(r)})" if on_policy and small_batches(r) else ""
    has_own_scale = r.scale_varies if on_policy else r.scale_varies_off_policy
    varies = ", at a scale that depends on the batch" if has_own_scale else ""
    large = f", in large batches{off}" if holds == "large-batches" else ""
    large = f", in batches of {group_sizes()} completions" if holds == "small-batches" else large
    return f"{TARGETS[verdict].title_in_sentence}{large}{varies}"


def _without_verdict(r: AuditResult, *, on_policy: bool) -> str:
    if not r.deterministic:
        return "no verdict: the same batch gives different gradients"
    if not r.finite_in_float64:
        return "no verdict: its gradient is NaN or infinite on some group"
    if on_policy and ignores_reference(r):
        return "no KL: its gradient is the same for every ref"
    return f"no known divergence ({nearest(r, on_policy=on_policy)})"


def in_sum(found: Decomposition) -> str:
    """A sum of two targets, such as "reverse KL, whole completions, minus forward KL, token by token"."""
    one, other = found.parts
    if other.scale is None:
        return f"{TARGETS[one.verdict].title_in_sentence}, plus a drift to or from the sampler"
    if TARGETS[one.verdict].climbed and not TARGETS[other.verdict].climbed:
        one, other = other, one
    first, second = TARGETS[one.verdict], TARGETS[other.verdict]
    sign = "minus" if second.climbed and not first.climbed else "plus"
    named = TARGETS[second.climbed] if second.climbed and sign == "minus" else second
    shares = [part.scale for part in (one, other) if part.scale is not None]
    equal = max(shares) - min(shares) <= SAME_SHARE * max(shares)
    return f"{first.title_in_sentence}, {sign} {'' if equal else 'a multiple of the '}{named.title_in_sentence}"


SAME_SHARE = 1e-3
"""Shares of a sum that differ by less, relatively, are shown as equal."""


def small_batches(r: AuditResult | LargeBatchResult) -> str:
    """By how much small batches are off, such as "9% off with 2 completions, 6% with 3"; empty if not at all."""
    if r.holds != "large-batches" or not r.bias_by_batch or r.scale_varies:
        return ""
    sizes = [(size, x) for size, x in r.bias_by_batch.items() if size != "limit"]
    first, *others = [f"{percent(x)}{' off' if i == 0 else ''} with {size}" for i, (size, x) in enumerate(sizes)]
    return ", ".join([f"{first} completions", *others])


def nearest(r: AuditResult, *, on_policy: bool = True) -> str:
    """The nearest target of an unknown verdict, with its distance near ref and far from it where these differ."""
    name: TargetName = r.nearest if on_policy else r.nearest_off_policy
    bias = (r.bias if on_policy else r.bias_off_policy)[name]
    by_distance = r.bias_by_distance if on_policy else {}
    if not by_distance or bias >= 1:
        return f"nearest: {TARGETS[name].title_in_sentence}, {percent(bias)} off"
    near, far = by_distance["near"], by_distance["far"]
    if near <= MATCH:
        return f"nearest: {TARGETS[name].title_in_sentence}, exact near ref and {percent(far)} off far from it"
    return f"nearest: {TARGETS[name].title_in_sentence}, {percent(near)} off near ref and {percent(far)} far from it"


def notes(r: AuditResult, *, lengths: bool = True) -> list[str]:
    """Findings beside the verdict, in a few words each.

    Args:
        r: the audit of the loss.
        lengths: whether to include what varying lengths change.
    """
    found = []
    if not r.deterministic:
        found.append("not deterministic")
    if ignores_reference(r):
        found.append("ignores ref" if r.has_gradient else "no gradient")
    part = partly(r)
    if r.length_sensitive and lengths and r.verdict == r.verdict_fixed_lengths == "unknown" and part is None:
        found.append("length-sensitive")
    if r.off_with and (part is None or part.where != "most problems"):
        found.append(f"off with {listed(r.off_with)}")
    if r.is_wrong_before_dead:
        found.append(f"float32 fails from l = {r.float32_wrong_from:g}")
    if r.dead_zone:
        found.append(f"dead for l {outside(r.dead_below, r.dead_above)}")
    if not r.finite:
        found.append("overflows")
    if r.touches_padding:
        found.append("touches padding")
    if r.reads_masked:
        found.append("reads masked positions")
    elif r.stumbles_over_gaps:
        found.append("masked gaps change it")
    if r.finite_if_empty is False:
        found.append("not finite if a completion is empty")
    if r.order_matters:
        found.append("order of rows matters")
    return found
