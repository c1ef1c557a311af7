"""What a whole policy loss is made of, in words: a sentence for each part, and the cells of a table."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..policy_losses import Weight
from .policy import Drift, PolicyAnatomy, PolicyResult
from .sentences import OF, remarks, scale, summary, unit
from .terminal import CellTable, markdown_table, panel

RATIOS = {
    "none": "none: the samples are used as if they were those of π",
    **{name: f"r = {OF[name]}" for name in ("token", "prefix", "sequence")},
    "mean": "r = the geometric mean of π/μ over the completion's tokens",
    "other": "no single one: the weight of a token depends on several, such as its own and that of its completion",
}
SUBTRACTED = {
    "none": "as they are",
    "group-mean": "minus the mean of the group",
    "leave-one-out": "minus the mean of the others of the group",
    "batch-mean": "minus the mean of the batch",
    "batch-leave-one-out": "minus the mean of the others of the batch",
    "other": "none that is known",
}
CORRECTIONS = {
    "none": "not corrected: samples of μ are used as if they were those of π",
    "token": "each token is corrected, the tokens before and after it are those of μ",
    "prefix": "each prefix is corrected, the advantage is that of μ's continuations",
    "sequence": "as on fresh samples: the whole completion is corrected",
    "mean": "not corrected: a geometric mean of ratios is no importance weight",
}
"""What a ratio without bounds does on samples of another policy."""


def report(r: PolicyResult) -> list[tuple[str, str]]:
    """The report of one loss: a label and a sentence for each part."""
    a = r.policy
    if not (a.deterministic and a.finite):
        why = "NaN or infinite at usual inputs" if a.deterministic else "different each time the same batch is given"
        return [("update", f"none can be told: the gradient is {why}"), ("called", r.call)]
    if a.is_nothing:
        rows = [("update", "none: no advantage has an effect")]
    else:
        two = "; π is compared with old_logp and with behavior_logp: what is told is where both are μ"
        rows = [
            ("fresh samples", fresh(a)),
            ("stale samples", stale(a)),
            ("drift", drift(a)),
            ("ratio", RATIOS[a.parts.ratio] + (two if len(a.compares) > 1 else "")),
            ("weight", weight(a)),
            ("advantages", advantages(a)),
            ("unit", unit(a.unit) if a.parts.unit != "other" else "none that is known"),
        ]
    rows.append(("KL", kl(r)))
    if r.kl is not None:
        rows += [("its scale", scale(r.kl)), *(("beside it", text) for text in remarks(r.kl))]
    if a.leaks:
        rows.append(("beside it", "masked positions have a gradient: multiply by the mask before summing"))
    if not a.finite_if_equal:
        rows.append(("beside it", "NaN where all rewards of a group are equal: add a small number to the deviation"))
    return [*rows, ("proved", proof(a)), ("called", r.call)]


def weight(a: PolicyAnatomy) -> str:
    """The weight of a token's score as a function of r, for each sign of the advantage."""
    if a.parts.ratio == "other":
        return "no function of one ratio"
    up, down = map(_of_ratio, (a.parts.positive, a.parts.negative))
    text = up if a.parts.positive == a.parts.negative and "its own" not in up else f"A > 0: {up}; A < 0: {down}"
    if a.parts.centred_score:
        text += "; the sampler's mean score at each prefix is subtracted"
    return text + (f"; depends on {a.parts.depends_on}" if a.parts.depends_on else "")


def _of_ratio(w: Weight) -> str:
    if w.inside == "other":
        return "a curve of its own"
    if w.factor == 0:
        return "0"
    texts = [w.inside]
    for edge, level, word, bound in ((w.low, w.below, "below", "at least"), (w.high, w.above, "above", "at most")):
        if edge is not None:
            is_bound = w.inside == "r" and level == edge
            texts.append(f"{bound} {edge:.5g}" if is_bound else f"{level:.4g} {word} {edge:.5g}")
    text = ", ".join(texts)
    return text if w.factor == 1 else f"{w.factor:.4g} x ({text})"


def advantages(a: PolicyAnatomy) -> str:
    """What becomes of the advantages."""
    text = SUBTRACTED[a.parts.baseline]
    if a.parts.divided == "none":
        return text
    small = f", plus {a.epsilon:.3g}" if a.epsilon else ""
    return f"{text}, divided by the deviation of the {a.parts.divided} (over {'n' if a.population else 'n - 1'}{small})"


def fresh(a: PolicyAnatomy) -> str:
    """The update on samples of π."""
    known = [gap for name, gap in a.unexplained.items() if "stale" not in name and "group" not in name]
    if max(known) > a.allowed or a.leaks:
        return "none that is known"
    up, down = a.curve(1, 0.0)[1][:, 0].tolist()
    text = "the policy gradient" if a.scale * up > 0 else "minus the policy gradient: the sign is wrong"
    if abs(up - down) > a.allowed:
        text = f"the policy gradient of advantages that are weighted {up:.4g} if positive, {down:.4g} if not"
    text += ", prompts with a small deviation weighing more" if a.parts.divided == "group" else ""
    if a.parts.unit == "completion-mean":
        text += ", tokens of short completions weighing more"
        if a.parts.baseline == "none":
            text += ": one A > 0 for all prefers short completions, one A < 0 long ones"
    return text


def stale(a: PolicyAnatomy) -> str:
    """The update on samples of another policy."""
    if not a.proved:
        return "not proved: the formula does not explain it"
    used = [w for w in (a.parts.positive, a.parts.negative) if w.factor]
    bounded = [w for w in used if w.is_bounded or w.inside != "r"]
    if a.parts.centred_score:
        return "the covariance of advantage and score under μ at each prefix, which is no policy gradient"
    if a.parts.ratio in ("none", "mean") or not bounded:
        return CORRECTIONS[a.parts.ratio]
    if all(w.inside == "1" for w in used):
        return f"{CORRECTIONS['none']}, without those outside the bounds"
    if not all(w.inside == "r" for w in used):
        return "not corrected: the weight is no importance weight"
    if all((w.high or math.inf) <= 1 or (w.low or 0) >= 1 for w in bounded):
        return f"{CORRECTIONS[a.parts.ratio]}; at r = 1 it is at its bound, and one side of it is not corrected at all"
    return f"{CORRECTIONS[a.parts.ratio]}; its bounds add bias"


def drift(a: PolicyAnatomy) -> str:
    """What one advantage for all completions does on stale samples, where a right policy gradient does nothing."""
    if not a.drift:
        return "cannot be told: NaN where all rewards are equal"
    if a.removes_drift:
        return "none"
    up, down = map(_direction, a.drift)
    return up if up == down else f"A > 0: {up}; A < 0: {down}"


def _direction(d: Drift) -> str:
    if d.size == 0:
        return "0%"
    aside = abs(d.towards_sampler) < 0.2
    to = "elsewhere" if aside else "to μ" if d.towards_sampler > 0 else "away from μ"
    whole = math.isinf(d.size) or (abs(d.size - 1) < 1e-6 and abs(d.towards_sampler) > 1 - 1e-6)
    return to if whole else f"{d.size:.0%} {to}" if d.size >= 0.005 else f"{d.size:.1g} {to}"


def kl(r: PolicyResult) -> str:
    """What the loss does without advantages."""
    if not r.policy.finite_if_equal:
        return "cannot be told: NaN without advantages"
    if r.kl is None:
        return "none"
    return f"{summary(r.kl)}; on stale samples {summary(r.kl, on_policy=False)}"


def proof(a: PolicyAnatomy) -> str:
    """Whether the formula is the loss."""
    if a.proved:
        largest = max(a.unexplained.values())
        return f"at {len(a.unexplained)} sets of inputs, fresh and stale; largest difference {largest:.0e}"
    if a.leaks:
        return "no: masked positions have a gradient, which the formula does not have"
    name, worst = next((name, gap) for name, gap in a.unexplained.items() if not gap <= a.allowed)
    return f"no: at {name}, {min(worst, 1):.0%} of the weight is not explained by these parts"


# The report and the table as they are shown.

COLUMNS = ("loss", "ratio", "weight of the score", "advantages", "unit", "drift on stale samples", "KL")

LEGEND = (
    "The update of a token is its advantage A times its weight, a function of the ratio r = π/μ to the sampler μ, an "
    "older policy. Drift: the update on stale samples if every completion has the same advantage, which should be 0, "
    "in percent of that without a ratio, averaged over small problems. l = log π/ref of a token, k3 = exp(-l) - 1 + l."
)
CAPTION = f"{LEGEND} `klgrad audit NAME --whole` shows everything about one loss."


def cells_of(r: PolicyResult) -> tuple[str, ...]:
    """The row of a table, in the order of `COLUMNS`; a name that is not proved has a mark."""
    a = r.policy
    if not (a.deterministic and a.finite):
        return (r.name, "not told", "", "", "", "", "")
    if a.is_nothing:
        return (r.name, "", "0", "", "", "none", kl(r))
    ratio = {"mean": "geometric mean", "sequence": "completion", "other": "several"}.get(a.parts.ratio, a.parts.ratio)
    ratio += "" if a.proved else " (not proved)"
    of = SUBTRACTED[a.parts.baseline] + ("" if a.parts.divided == "none" else f", / deviation of the {a.parts.divided}")
    return (r.name, ratio, weight(a), of, a.parts.unit, drift(a), kl(r))


def overview(results: Sequence[PolicyResult]) -> RenderableType:
    """One table."""
    return Group(CellTable(COLUMNS, [cells_of(r) for r in results]), Text(CAPTION, style="dim"))


def in_full(r: PolicyResult) -> RenderableType:
    """Everything about one loss."""
    return panel(r.name, about(r), report(r), LEGEND, "" if r.policy.proved else "bold yellow")


def about(r: PolicyResult) -> list[str]:
    """What the loss is, and where it was published."""
    return [r.summary, f"Source: {r.source}" if r.source else ""]


def to_markdown(results: Sequence[PolicyResult]) -> str:
    """One table, with the source of each loss that has one."""
    sourced = any(r.source for r in results)
    rows = [[*cells_of(r), *([r.source] if sourced else [])] for r in results]
    return markdown_table(rows, (*COLUMNS, "source") if sourced else COLUMNS)
