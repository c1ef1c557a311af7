"""The results of `audit_whole` in words."""

from fractions import Fraction

from ...policy_losses import PolicyGradientName, WholeVerdict
from ...targets import TARGETS
from ..numbers import listed, percent
from .table import POLICY_GRADIENTS
from .weighting import Weighting
from .whole_result import Drift, Side, WholeResult

CLEAR = 0.2
"""A drift whose mean cosine is smaller has no clear direction to or from the sampler."""

NEARLY_ONE = 0.99
"""A larger cosine would be rounded to 1, which an update with no verdict does not have."""

PULL, PUSH = "forward-kl-sampler-sequence", "climbs forward-kl-sampler-sequence"


def kl_in_words(verdict: WholeVerdict) -> str:
    """What the loss does without advantages."""
    if verdict == "nothing":
        return "none"
    for name, target in TARGETS.items():
        if name == verdict:
            return target.title_in_sentence
    raise AssertionError(verdict)  # at zero advantages there is no policy gradient


def drift_in_words(drift: Drift, weighting: Weighting | None) -> str:
    """What the loss does where all completions have the same advantage."""
    if drift.verdict == "nothing":
        return "no drift"
    if drift.verdict in (PULL, PUSH):
        return "pulls π to the sampler" if drift.verdict == PULL else "pushes π away from the sampler"
    if drift.verdict != "unknown":
        return kl_in_words(drift.verdict)
    if drift.size is None:  # on-policy, where there is no other policy to drift to
        return "prefers some lengths" if weighting and weighting.length_biased else "drifts, though it should not"
    return f"drift of {percent(drift.size)} {_direction(drift)}"


def _direction(drift: Drift) -> str:
    if drift.towards_sampler is None or abs(drift.towards_sampler) < CLEAR:
        return "in another direction"
    return "to the sampler" if drift.towards_sampler > 0 else "away from the sampler"


def update_in_words(side: Side) -> str:
    """What the loss does where the advantages differ."""
    verdict = side.update.verdict
    if verdict == "nothing":
        return "nothing"
    if verdict == "unknown":
        nearest, cosine = max(side.update.cosine.items(), key=lambda item: item[1])
        shown = f"{cosine:.2f}" if cosine < NEARLY_ONE else f"above {NEARLY_ONE}"
        return f"none known; cosine {shown} with {POLICY_GRADIENTS[nearest].short}"
    climbs = verdict.startswith("climbs ")
    name: PolicyGradientName = verdict.removeprefix("climbs ")  # type: ignore[assignment]
    return f"minus {POLICY_GRADIENTS[name].short}" if climbs else POLICY_GRADIENTS[name].short


def weighting_in_words(weighting: Weighting | None) -> str:
    """How the loss weights the advantages; empty if it takes them as they are."""
    if weighting is None:
        return "the weights are not those of the advantages"
    found = []
    if weighting.baseline != "none":
        found.append(f"centred in each {weighting.baseline}")
    if weighting.divided_by_deviation:
        found.append("divided by the deviation of the group")
    if weighting.length_biased:
        weights = ", ".join(_fraction(x) for x in weighting.by_length.values())
        found.append(f"weighted {weights} for {listed([str(n) for n in weighting.by_length])} tokens")
    return ", ".join(found)


def _fraction(x: float) -> str:
    near = Fraction(x).limit_denominator(9)
    return str(near) if abs(near - x) < 1e-3 else f"{x:.3g}"


def drifts_in_words(side: Side) -> str:
    """Both drifts, as one text where they are equal or opposite."""
    found = [drift_in_words(drift, side.update.weighting) for drift in (side.positive, side.negative)]
    if found[0] == found[1]:
        return found[0]
    opposite = {PULL: PUSH, PUSH: PULL}.get(side.positive.verdict) == side.negative.verdict
    sizes = [None if drift.size is None else percent(drift.size) for drift in (side.positive, side.negative)]
    if opposite or sizes[0] == sizes[1]:
        return f"{found[0]}; the opposite if A < 0"
    return f"{found[0]}; {found[1]} if A < 0"


def row_of(r: WholeResult) -> tuple[str, str, str, str]:
    """The row of a table: name, on-policy, drift off-policy, update off-policy."""
    on = [update_in_words(r.on_policy)]
    on += [x for x in (weighting_in_words(r.on_policy.update.weighting),) if x]
    if r.on_policy.kl != "nothing":
        on.append(f"KL: {r.on_policy.kl_in_words}")
    if {r.on_policy.positive.verdict, r.on_policy.negative.verdict} != {"nothing"}:
        on.append(drifts_in_words(r.on_policy))
    off = [update_in_words(r.off_policy)]
    if r.off_policy.kl != "nothing":
        off.append(f"KL: {r.off_policy.kl_in_words}")
    return r.name, "; ".join(on), drifts_in_words(r.off_policy), "; ".join(off)
