"""What a whole policy loss is made of, in words: for a terminal, as Markdown, as JSON and as an HTML page."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..policy_losses import Weight
from ..support import finite
from .page import Frame, Plot, environment
from .policy import Drift, PolicyAnatomy, PolicyResult
from .sentences import OF, remarks, scale, summary, unit
from .terminal import markdown_table

# The parts in words.

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
    "other": "none that is known: no baseline, deviation and unit explain the weights",
}
ALSO = {
    "probability": "it depends on the probability of the token too: what is told is that of unlikely tokens",
    "several ratios": "it depends on several ratios",
    "other completions": "it depends on the ratios of other completions too",
    "vocabulary": "it depends on the whole vocabulary too",
}
COMPARED = (
    "; it is compared with old_logp and with behavior_logp, two ratios: what is told is where both are the sampler"
)


def report(r: PolicyResult) -> list[tuple[str, str]]:
    """The report of one loss: a label and a sentence for each part."""
    a = r.policy
    if not (a.deterministic and a.finite):
        why = "NaN or infinite at usual inputs" if a.deterministic else "different each time the same batch is given"
        return [("update", f"none can be told: the gradient is {why}")]
    if a.is_nothing:
        rows = [("update", "none: no advantage has an effect")]
    else:
        rows = [
            ("ratio", RATIOS[a.parts.ratio] + (COMPARED if len(a.compares) > 1 else "")),
            ("weight", weight(a)),
            ("advantages", advantages(a)),
            ("unit", unit(a.unit) if a.parts.unit != "other" else "none that is known"),
            ("fresh samples", fresh(a)),
            ("stale samples", stale(a)),
            ("drift", drift(a)),
        ]
    rows.append(("KL", kl(r)))
    if r.kl is not None:
        rows += [("its scale", scale(r.kl)), *(("beside it", text) for _, text in remarks(r.kl) if text)]
    if a.leaks:
        rows.append(("beside it", "masked positions have a gradient: multiply by the mask before summing"))
    if not a.finite_if_equal:
        rows.append(("beside it", "NaN where all rewards of a group are equal: add a small number to the deviation"))
    return [*rows, ("proved", proof(a))]


def cells(r: PolicyResult) -> tuple[str, ...]:
    """A row of a table: ratio, weight, advantages, unit, drift, KL."""
    a = r.policy
    if not (a.deterministic and a.finite):
        return ("not told", "", "", "", "", "")
    if a.is_nothing:
        return ("", "0", "", "", "none", kl(r))
    ratio = {"mean": "geometric mean", "sequence": "completion", "other": "several"}.get(a.parts.ratio, a.parts.ratio)
    also = a.parts.depends_on and a.parts.depends_on != "several ratios"
    text = f"{weight(a, brief=True)}; depends on {a.parts.depends_on}" if also else weight(a, brief=True)
    return (ratio, text, advantages(a, brief=True), a.parts.unit, drift(a, brief=True), kl(r))


def weight(a: PolicyAnatomy, *, brief: bool = False) -> str:
    """The weight of a token's score as a function of r, for each sign of the advantage."""
    if a.parts.ratio == "other":
        return "no function of one ratio"
    up, down = map(_of_ratio, (a.parts.positive, a.parts.negative))
    text = up if a.parts.positive == a.parts.negative and "its own" not in up else f"A > 0: {up}; A < 0: {down}"
    if a.parts.centred_score:
        text += "; the sampler's mean score at each prefix is subtracted"
    if a.parts.depends_on and not brief:
        text += f"; {ALSO[a.parts.depends_on]}"
    return text


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


def advantages(a: PolicyAnatomy, *, brief: bool = False) -> str:
    """What becomes of the advantages."""
    text = SUBTRACTED[a.parts.baseline]
    if brief:
        text = text.split(":")[0]
    if a.parts.divided == "none":
        return text
    of = f"the deviation of the {a.parts.divided}"
    if brief:
        return f"{text}, / {of.removeprefix('the ')}"
    n = "n" if a.population else "n - 1"
    return f"{text}, divided by {of} (over {n}{f', plus {a.epsilon:.3g}' if a.epsilon else ''})"


def fresh(a: PolicyAnatomy) -> str:
    """The update on samples of π."""
    known = [gap for name, gap in a.unexplained.items() if "stale" not in name and "group" not in name]
    if max(known) > a.allowed or a.leaks:
        return "none that is known"
    up, down = (a.ask(torch.zeros(1))[i, 0] if w.inside == "other" else w(torch.zeros(1)).double()[0]
                for i, w in enumerate((a.parts.positive, a.parts.negative)))  # fmt: skip
    text = "the policy gradient" if a.scale * float(up) > 0 else "minus the policy gradient: the sign is wrong"
    if abs(float(up - down)) > a.allowed:
        text = (
            f"the policy gradient of advantages that are weighted {float(up):.4g} if positive, {float(down):.4g} if not"
        )
    if a.parts.divided == "group":
        text += ", prompts with a small deviation weighing more"
    if a.parts.unit == "completion-mean":
        text += ", tokens of short completions weighing more"
        if a.parts.baseline == "none":
            text += ": one A > 0 for all prefers short completions, one A < 0 long ones"
    return text


def stale(a: PolicyAnatomy) -> str:
    """The update on samples of another policy."""
    if not a.proved:
        return "not proved: the formula does not explain it"
    texts = {
        "none": "not corrected: E_μ[A Σ ∇log π_t], samples of μ used as if they were those of π",
        "token": "E_μ[A Σ r_t ∇log π_t]: each token is corrected, the tokens before and after it are those of μ",
        "prefix": "each prefix is corrected, the advantage is that of μ's continuations",
        "sequence": "as on fresh samples: the whole completion is corrected",
        "mean": "not corrected: a geometric mean of ratios is no importance weight",
    }
    used = [w for w in (a.parts.positive, a.parts.negative) if w.factor]
    bounded = [w for w in used if w.is_bounded or w.inside != "r"]
    if a.parts.centred_score:
        return "the covariance of advantage and score under μ at each prefix, which is no policy gradient"
    if a.parts.ratio in ("none", "mean") or not bounded:
        return texts[a.parts.ratio]
    if all(w.inside == "1" for w in used):
        return "not corrected: samples of μ are used as if they were those of π, without those outside the bounds"
    if not all(w.inside == "r" for w in used):
        return "not corrected: the weight is no importance weight"
    if all((w.high or math.inf) <= 1 or (w.low or 0) >= 1 for w in bounded):
        return f"{texts[a.parts.ratio]}; at r = 1 it is at its bound, and one side of it is not corrected at all"
    return f"{texts[a.parts.ratio]}; its bounds add bias"


def drift(a: PolicyAnatomy, *, brief: bool = False) -> str:
    """What one advantage for all completions does on stale samples, where a right policy gradient does nothing."""
    if not a.drift:
        return "cannot be told: NaN where all rewards are equal"
    if a.removes_drift:
        why = "one advantage for all becomes 0" if a.is_centred else "its mean is 0 at every prefix"
        return "none" if brief else f"none: {why}"
    up, down = (_direction(d, brief) for d in a.drift)
    text = up if up == down else f"A > 0: {up}; A < 0: {down}"
    if brief:
        return text
    problems = " (on the small problems of the proof)" if "%" in text else ""
    return f"with the same advantage for all completions the mean update should be 0, and is not: {text}{problems}"


def _direction(d: Drift, brief: bool) -> str:
    if abs(d.size - 1) < 1e-6 and abs(d.towards_sampler) > 1 - 1e-6:
        to = d.towards_sampler > 0
        if brief:
            return "to μ" if to else "away from μ"
        return f"{'descends KL(μ‖π), to' if to else 'climbs KL(μ‖π), away from'} what was sampled"
    if d.size == 0:
        return "0%" if brief else "nothing"
    size = "" if math.isinf(d.size) else f"{d.size:.0%} " if d.size >= 0.005 else f"{d.size:.1g} "
    aside = abs(d.towards_sampler) < 0.2
    to = "elsewhere" if aside else "to μ" if d.towards_sampler > 0 else "away from μ"
    return f"{size}{to}" if brief else f"{to}, {size}as large as without a ratio" if size else to


def kl(r: PolicyResult) -> str:
    """What the loss does without advantages."""
    if not r.policy.finite_if_equal:
        return "cannot be told: NaN without advantages"
    if r.kl is None:
        return "none"
    other = " (not KL(π‖ref))" if set(r.kl.shares) == {"forward-kl"} else ""
    return f"{summary(r.kl)}{other}; on stale samples {summary(r.kl, on_policy=False)}"


def proof(a: PolicyAnatomy) -> str:
    """Whether the formula is the loss."""
    if a.proved:
        largest = max(a.unexplained.values())
        return f"at {len(a.unexplained)} sets of inputs, fresh and stale; largest difference {largest:.0e}"
    if a.leaks:
        return "no: masked positions have a gradient, which the formula does not have"
    name, worst = next((name, gap) for name, gap in a.unexplained.items() if not gap <= a.allowed)
    return f"no: at {name}, {min(worst, 1):.0%} of the weight is not explained by these parts"


# The results of `audit_whole` for a terminal, as Markdown and as JSON.

COLUMNS = ("loss", "ratio", "weight of the score", "advantages", "unit", "drift on stale samples", "KL")

CAPTION = (
    "The update of a token is its advantage A times its weight, a function of the ratio r = π/μ to the sampler μ. Read "
    "from the derivatives of the loss in float64, and compared with its gradient summed over every outcome of small "
    "problems. Drift: what one advantage for all completions does, in percent of that without a ratio, averaged over "
    "these problems. `klgrad audit NAME --whole` shows everything about one loss."
)


def overview(results: Sequence[PolicyResult]) -> RenderableType:
    """One table."""
    return table_of([cells_of(r) for r in results])


def cells_of(r: PolicyResult) -> tuple[str, ...]:
    """The row of a table, in the order of `COLUMNS`; a name that is not proved has a mark."""
    first, *rest = cells(r)
    return (r.name, first if r.policy.proved else f"{first} (not proved)", *rest)


SHORT = 16
"""Characters of names that are not broken over lines."""


def table_of(rows: Iterable[Sequence[str]]) -> RenderableType:
    """The table of these rows, with what its columns mean."""
    table = Table(box=None, padding=(0, 1, 1, 0), pad_edge=False)
    for title in COLUMNS:
        table.add_column(title, overflow="fold", ratio=3 if title == "loss" or "weight" in title else 2)
    rows = list(rows)
    table.columns[0].no_wrap = all(len(row[0]) <= SHORT for row in rows)
    for row in rows:
        table.add_row(*row)
    return Group(table, Text(CAPTION, style="dim"))


def in_full(r: PolicyResult) -> RenderableType:
    """Everything about one loss."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    for label, sentence in report(r):
        facts.add_row(label, Text(sentence, style="" if label != "proved" or r.policy.proved else "bold yellow"))
    facts.add_row("called", Text(r.call, style="dim"))
    head = [Text(x, style="italic") for x in (r.summary, r.source and f"Source: {r.source}") if x]
    body = Group(*head, *[""] * bool(head), facts, "", Text(LEGEND, style="dim"))
    return Panel(body, title=Text(r.name, style="bold"), title_align="left")


LEGEND = (
    "The update of a token is its advantage A times its weight, a function of the ratio r = π/μ to the sampler μ, an "
    "older policy. E_μ is the mean over its samples; l = log π/ref of a token, k3 = exp(-l) - 1 + l."
)
"""What the symbols of the report of one loss mean."""


def to_markdown(results: Sequence[PolicyResult]) -> str:
    """One table, with the source of each loss that has one."""
    sourced = any(r.source for r in results)
    rows = [[*cells_of(r), *([r.source] if sourced else [])] for r in results]
    return markdown_table(rows, (*COLUMNS, "source") if sourced else COLUMNS)


def to_json(results: Sequence[PolicyResult]) -> str:
    """`{"results": [{"name", "source", "policy", "kl"}, ...]}`; numbers that are not finite are null."""
    return json.dumps(finite({"results": [r.to_dict() for r in results]}), indent=2) + "\n"


# The page of `klgrad audit --whole`: a card with the curves of the weights for each policy loss.

REACH = 2.5
"""The largest |log r| of the figure."""

RATIOS_SHOWN = (0.1, 0.2, 0.5, 1, 2, 5, 10)
WEIGHT = Frame(RATIOS_SHOWN, (0, 1, 2, 3), (math.exp(-REACH), math.exp(REACH)), (-0.2, 3.2), "r = π/μ", math.log)


def plot_of(r: PolicyResult) -> Plot | None:
    """The weight of a score against the ratio, where the advantage is positive and negative; None without a curve."""
    if r.policy.parts.ratio == "other" or not r.policy.scale:
        return None
    log_ratios, values = r.policy.curve(401, REACH)
    up, down = (list(zip(log_ratios.exp().tolist(), y.tolist(), strict=True)) for y in values)
    return Plot(WEIGHT, [("line", up), ("line negative", down)], f"{r.name}: the weight of a score against the ratio")


def to_html(results: Sequence[PolicyResult], not_audited: Mapping[str, str] | None = None) -> str:
    """Render one page with a card for each policy loss.

    Args:
        results: of `audit_whole`.
        not_audited: losses that could not be audited, and why.

    Returns:
        The page, which needs no network, no scripts and no fonts.
    """
    title = results[0].name if len(results) == 1 else f"{len(results)} policy losses"
    page = environment().get_template("policy.html")
    return page.render(
        title=f"What {title} {'is' if len(results) == 1 else 'are'} made of",
        cards=[(r, report(r), plot_of(r)) for r in results],
        not_audited=not_audited or {},
        caption=CAPTION,
    )
