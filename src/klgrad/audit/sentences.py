"""The parts of a loss in words: a sentence for each part, the cells of a table, and what was expected of a part."""

import math
import re
from itertools import pairwise

import torch

from ..core.divergences import huber, named
from ..errors import MeaningError, UnknownNameError
from .parts import Anatomy, Baseline, Bound, Credit, MicroBatches, TopK, Unit
from .probes import ESTIMATES, REACH, TOKENS, Curve
from .subject import VOCABULARY

NAMES = {
    "reverse-kl": "reverse KL",
    "forward-kl": "forward KL",
    "chi-square": "χ² divergence",
    "hellinger": "Hellinger distance",
    "total-variation": "total variation",
    "jensen-shannon": "Jensen-Shannon divergence",
    "alpha": "α-divergence",
}
EXACT = {"reverse-kl": "KL(π‖ref)", "forward-kl": "KL(ref‖π)"}
"""The divergences that have a symbol."""


def report(a: Anatomy) -> list[tuple[str, str]]:
    """The report of one loss: a label and a sentence for each part."""
    if why := _why_untold(a):
        return [("divergence", why)]
    rows = [("divergence", divergence(a)), ("proved", proof(a))]
    if not a.proved_fresh:
        return rows
    parts = [("unit", unit(a.unit, a.micro_batches)), ("baseline", baseline(a))]
    if a.late:
        return [rows[0], ("samples", samples(a)), *parts, rows[1]]
    parts = [("samples", samples(a)), ("stale samples", stale(a)), *parts]
    parts = parts if a.is_nothing else [("looks ahead", horizon(a)), *parts]
    return [rows[0], *parts, ("scale", scale(a)), ("coefficient", _coefficient(a)), rows[1]]


def _why_untold(a: Anatomy) -> str:
    if not a.deterministic:
        return "none can be told: the same batch gives different gradients"
    return "" if a.finite else "none can be told: its gradient is NaN or infinite at usual inputs"


def summary(a: Anatomy, *, on_policy: bool = True) -> str:
    """What a loss descends, as one noun phrase: with samples from π, or from another policy."""
    if why := _why_untold(a):
        return why
    if not on_policy:
        return "; ".join([_descends_if_stale(a), *_beside_if_stale(a)])
    text, h, bound = divergence(a, brief=True), a.horizon, a.samples.bound
    if a.is_nothing or not a.proved_fresh or a.late:
        return divergence(a)
    if a.level == "token" and not h.fits:
        by = BY.get(h.estimate, h.estimate)
        is_mean = any(c.divided for c in a.credits)
        later = f"the mean of {by} over all its tokens" if is_mean else f"{by} of later tokens"
        text += f", token by token, plus {later} as a cost of each"
    elif a.level == "token":
        ahead = {"none": "token by token", "all": "whole completions", "discount": f"{h.discount or 0:g} a token ahead"}
        text += f", {ahead.get(h.kind, 'with a future of its own')}"
    text += {"completion-mean": ", mean per completion", "token-mean": ", mean over tokens"}.get(a.unit.name, "")
    if bound is not None and bound.beyond is not None:
        beyond = _sum(bound.beyond[0].shares) if bound.beyond[0].shares else "no KL"
        text += f", where the ratio is within its bound, and {beyond} beyond"
    return text + _centred(a) + (f", divided by {_divisor(a.baseline)}" if a.baseline.spread != "none" else "")


def cells(a: Anatomy) -> tuple[str, str, str, str, str]:
    """A row of a table: divergence, looks ahead, samples, unit, scale."""
    if _why_untold(a):
        return ("not told", "", "", "", "")
    first = divergence(a, brief=True)
    if not a.proved_fresh:
        return (first, "", "", "", "")
    units = {"sum": "sum", "completion-mean": "mean per completion", "token-mean": "mean over tokens"}
    by = units.get(a.unit.name, a.unit.name)
    if a.is_nothing:
        pushed = _constant_if_stale(a) if a.proved else "nothing"
        return (first, "", "" if pushed == "nothing" else f"if stale: {pushed.rpartition(': ')[2]}", by, "")
    s, h = a.samples, a.horizon
    weight = "no ratio" if s.ratio == "none" else f"{s.ratio} ratio"
    of = ", ".join(filter(None, [weight, _bounded(s.bound) if a.proved else "not proved if stale"]))
    ahead = {"none": "no", "discount": f"{h.discount or 0:g} a token"}.get(h.kind, h.kind)
    size = "spread" if a.baseline.spread != "none" else f"{a.scale:.3g}" if math.isfinite(a.scale) else "jump"
    return (first + _centred(a), ahead, of, by, size)


# The divergence.


def divergence(a: Anatomy, *, brief: bool = False) -> str:
    """The divergence that the coefficient of a token's own log-ratio descends."""
    if a.is_nothing:
        return _nothing(a, brief)
    is_named = bool(a.shares) and "other" not in a.shares
    if not a.proved_fresh:
        return f"not known: {_cause(a)}" + (f"; of one token alone: {_sum(a.shares)}" if is_named else "")
    if is_named:
        text, alone = _sum(a.shares), len(a.shares) == 1 and not brief
        text += "".join(f", {EXACT[name]}" for name in a.shares if alone and name in EXACT)
    elif _is_flat_inside(a.curve):
        text = "nothing"
    else:
        text = "a divergence of its own" if a.curve.convex else "a divergence of its own (not convex)"
    text += _edges(a) + (", of whole completions" if a.level == "completion" else "")
    if a.top is not None:
        text += f"{'' if a.own.is_zero else ', its exact part'}{_over(a.top, brief)}"
    text += f", at temperature {a.temperature:g}" if a.temperature != 1 else ""
    if a.anchor == "sampler":
        text = text.replace("ref", "μ") + " to the sampler: the old log-probs are in the place of ref"
    if a.late:
        shift = f"token t is compared with ref's log-prob of token t{-a.late:+d}"
        return f"none: {shift}; at the same token it would be {text}"
    return text if brief else text + _away(a)


def _nothing(a: Anatomy, brief: bool) -> str:
    if not a.proved_fresh:
        return "nothing: ref has no effect" + ("" if brief else f"; {_cause(a)}")
    if not a.constant and not any(a.entropy):
        return "nothing: no gradient depends on ref"
    if a.constant and (a.unit.name == "completion-mean" or (a.unit.name == "token-mean" and not brief)):
        of = "1/length" if a.unit.name == "completion-mean" else "1/tokens of the batch"
        does = f"lowers E[{of}], which asks for longer" if a.constant > 0 else f"raises E[{of}], which asks for shorter"
        little = "" if a.unit.name == "completion-mean" else ", little in large batches"
        return f"nothing: ref has no effect; it {does} completions{little}"
    return "nothing: ref has no effect"


def _cause(a: Anatomy) -> str:
    """Why no divergence is known."""
    if a.top is not None:
        return f"in a vocabulary of {VOCABULARY} it sees {a.top.size} entries"
    if a.matters:
        return f"its coefficient depends on {', '.join(a.matters)}"
    return _unexplained(a, stale=False)


TAIL = {
    "lumped": "the others as one",
    "left-out": "the others left out",
    "ref-renormalised": "the others left out, ref's probabilities of these divided by their sum",
    "renormalised": "the others left out, the probabilities of these divided by their sum, of π and of ref",
}
"""What becomes of the tokens that are not on a list of the most likely ones."""


def _over(top: TopK, brief: bool) -> str:
    whose = "ref's" if top.of == "ref" else "the policy's"
    return f" over {whose} top {top.size}" if brief else f" over {whose} {top.size} likeliest tokens, {TAIL[top.tail]}"


def _unexplained(a: Anatomy, *, stale: bool) -> str:
    return f"{percent(min(a.largest_gap(stale=stale), 1))} of the coefficient is not explained"


def percent(share: float) -> str:
    """A share in percent, with more digits if it is small, so that only 0 reads 0%."""
    if share >= 0.01 or share <= 0:
        return f"{share:.0%}"
    return f"{share:.1%}" if share >= 0.0005 else f"{100 * share:.1g}%"


def _sum(shares: dict[str, float]) -> str:
    if len(shares) == 1:
        ((name, weight),) = shares.items()
        return f"climbs the {_title(name)}" if weight < 0 else _title(name)
    largest = max(abs(w) for w in shares.values())
    texts = []
    for name, weight in sorted(shares.items(), key=lambda pair: -pair[1]):
        factor = "" if abs(abs(weight) - largest) <= 1e-9 * largest else f"{abs(weight) / largest:.3g} x "
        sign = "minus " if weight < 0 else "plus " if texts else ""
        texts.append(f"{sign}{factor}{_title(name)}")
    return " ".join(texts)


def _title(name: str) -> str:
    kind, _, order = name.rstrip(")").partition("(")
    return NAMES[kind] + (f" ({'α' if kind == 'alpha' else 'β'} = {order})" if order else "")


def _is_flat_inside(c: Curve) -> bool:
    """Whether a token's own log-ratio has an effect beyond both edges only."""
    if c.low is None or c.high is None:
        return False
    return not bool(c.points[1][(c.points[0] > c.low) & (c.points[0] < c.high)].any())


def _edges(a: Anatomy) -> str:
    """Where the coefficient ends: it is 0 beyond some log-ratios, or constant."""
    symbol, ((low, below), (high, above)) = "l" if a.level == "token" else "L", _ends(a.curve)
    if low is None and high is not None and high == a.curve.low:
        return f" but a step at {symbol} = {high:.3g}"
    is_zero = lambda pull: abs(pull + a.constant) <= a.allowed * abs(a.constant)
    inside = (low if is_zero(below) else None, high if is_zero(above) else None)
    text = f" where {between(*inside, symbol)}" if any(edge is not None for edge in inside) else ""
    flat = [f"below {symbol} = {low:.3g}"] if low is not None and inside[0] is None else []
    flat += [f"above {'' if flat else f'{symbol} = '}{high:.3g}"] if high is not None and inside[1] is None else []
    return text + (f", constant {' and '.join(flat)}" if flat else "")


def _ends(c: Curve) -> tuple[tuple[float | None, float], tuple[float | None, float]]:
    """The edges of a curve and its values beyond them; a step has one edge."""
    return (None if c.low == c.high else c.low, c.below), (c.high, c.above)


def between(low: float | None, high: float | None, symbol: str) -> str:
    """A range that is open on one side or on none.

    Example:
        >>> between(-2.61, 11.0, "l"), between(-2.61, None, "l")
        ('-2.61 < l < 11', 'l > -2.61')
    """
    if low is not None and high is not None:
        return f"{low:.3g} < {symbol} < {high:.3g}"
    return f"{symbol} > {low:.3g}" if low is not None else f"{symbol} < {high:.3g}"


def _away(a: Anatomy) -> str:
    """Which tokens are pushed away from ref: where the coefficient has not the sign of the log-ratio."""
    if a.shares and all(weight < 0 for weight in a.shares.values()):
        return "; the sign is wrong"
    if a.constant or a.curve.convex or not a.curve.shares:
        return ""
    at = torch.linspace(-REACH, REACH, 6001, dtype=torch.float64)
    away = at[a.curve(at) * at.sign() < -1e-12]
    near = {"<": away[away < 0].flip(0)[:1], ">": away[away > 0][:1]}
    sides = [f"l {sign} {round(float(x), 1) + 0.0:g}" for sign, ends in near.items() for x in ends]
    return f"; it pushes tokens away from ref where {' and '.join(sides)}" if sides else ""


def _centred(a: Anatomy) -> str:
    acts = ", which acts on lengths" if a.horizon.kind != "none" else ""
    return f", centred token by token{acts}" if a.baseline.name == "token-mean" else ""


# Later tokens, and samples of another policy.

BY = {"exact": "the exact divergence", "excess": "f(u)/u", "other": "an estimate of its own"}
"""Estimates of later tokens in words."""


def horizon(a: Anatomy) -> str:
    """What of later tokens is in the coefficient of a token."""
    h = a.horizon
    if a.level != "token":
        return "to the end: it is a function of the whole completion"
    noise = "also changes lengths" if a.looks_at_length else "only adds noise on fresh samples"
    past = f"; the KL of earlier tokens is in it too, which {noise}" if a.has_past else ""
    if h.kind == "none":
        return f"no: what a token does to later tokens is left out{past}"
    is_bounded = any(c.source == "sampled" and c.curve.has_edges for c in a.credits)
    is_mean = any(c.divided for c in a.credits)
    by = BY.get(h.estimate, h.estimate) + (", bounded" if is_bounded else "")
    is_reverse = h.estimate in ("k1", "k3") and not is_bounded and not is_mean
    of = "an estimate of the reverse KL" if is_reverse else "no estimate of the divergence above"
    fits = past if h.fits else f", which is {of}{past}"
    if is_mean:
        return f"to the end of the completion, by the mean of {by} over all its tokens, this one included{fits}"
    far = {"all": "to the end of the completion", "discount": f"discounted by {h.discount or 0:g} a token"}
    weights = f"with weights {', '.join(f'{w:.3g}' for w in h.weights)} by distance"
    return f"{far.get(h.kind, weights)}, by {by}{fits}"


OF = {
    "token": "π/μ of the token itself",
    "prefix": "π/μ of the tokens so far",
    "sequence": "π/μ of the whole completion",
    "mean": "the geometric mean of π/μ over the completion",
}
"""The ratios in words."""


def samples(a: Anatomy) -> str:
    """Which importance ratio π/μ there is."""
    s = a.samples
    if s.ratio == "none":
        is_needless = (a.is_nothing and not a.constant) or a.is_of_entries
        needless = "and it needs none" if a.is_nothing else "and a sum over the vocabulary needs none for its own token"
        return f"no ratio{f', {needless}' if is_needless else ': samples are taken as drawn from π'}"
    if s.ratio == "other":
        return "it depends on π/μ in another way than by a token, prefix, sequence or mean ratio"
    if not a.proved:
        return OF[s.ratio]
    text = OF[s.ratio] + (f", {_bounded(s.bound)}" if s.bound is not None else "")
    if s.bound is not None and s.bound.beyond is not None:
        curve, constant = s.bound.beyond
        left = [_times(weight, _slope(name, "l_t")) for name, weight in curve.shares.items()] or ["c(l_t)"] * (
            not curve.is_zero
        )
        left += [f"{constant:.4g}"] if constant else []
        text += f"; it is differentiated: beyond its bound the coefficient is bound x ({' + '.join(left) or '0'})"
    return text


def _bounded(bound: Bound | None) -> str:
    if bound is None:
        return ""
    if bound.kind == "mask":
        ends = (("below", bound.low), ("above", bound.high))
        return f"masked {' or '.join(f'{word} {end:.4g}' for word, end in ends if end is not None)}"
    if bound.kind == "value":
        return f"0 where r x {bound.estimate} > {bound.high:.4g}"
    if bound.kind == "probability":
        ends = (("<", bound.low), (">", bound.high))
        return f"0 where {' or '.join(f'π - μ {sign} {end:.4g}' for sign, end in ends if end is not None)}"
    word = {"truncate": "truncated", "clip": "clipped", "ppo": "clipped as in PPO"}.get(bound.kind, "bounded")
    ends = [f"{x:.4g}" for x in (bound.low, bound.high) if x is not None]
    dual = "" if bound.dual is None else f", with a dual clip at {bound.dual:.4g}"
    return f"{word} at {' and '.join(ends)}{dual}"


MEANS = ("the mean", "half the variance", "climbs the mean", "climbs half the variance")
"""How a sentence begins about what is descended under the sampler; the first two descend it."""


def stale(a: Anatomy) -> str:
    """What it descends on samples of another policy μ, after whether that is corrected."""
    text, *rest = [*_descends_if_stale(a).split("; "), *_beside_if_stale(a)]
    if text.startswith(MEANS):
        rises = a.curve.convex or (bool(a.curve.shares) and not _away(a))
        pulls = text.startswith(MEANS[:2]) and rises and not a.constant and not a.baseline_drifts
        text = f"not corrected: {text}{', which still pulls to ref and is no KL' if pulls else ''}"
    elif a.samples.frozen:
        text = f"not corrected: {text}, which also pushes away from μ"
    elif text.startswith("the same") and a.samples.ratio != "none":
        text = f"corrected{' in part' if a.samples.bound is not None else ''}: {text}"
    return "; ".join([text, *rest, *["the entropy term is there too"] * any(a.entropy)])


FROZEN = "log μ/ref in the place of log π/ref"
"""A KL that was computed when the completions were sampled."""


def _descends_if_stale(a: Anatomy) -> str:
    s = a.samples
    if not a.proved_fresh:
        return "not known"
    if not a.proved:
        return f"not proved: {_unexplained(a, stale=True)}"
    if a.is_nothing:
        return _constant_if_stale(a)
    if a.anchor == "sampler":
        return "a divergence to the sampler"
    if why := _why_no_objective(a):
        return f"no KL: {why}"
    if s.ratio == "none":
        return _without_ratio(a)
    rest = []
    if a.horizon.kind != "none" and s.ratio != "sequence" and not (s.ratio == "prefix" and s.per_decision):
        rest.append("later tokens")
    if a.looks_at_length and s.ratio != "sequence":
        rest.append("lengths")
    text = "the same" if not s.frozen else f"the same with {FROZEN}"
    if s.frozen and set(a.shares) == {"reverse-kl"} and a.horizon.fits and not a.has_edges:
        text = "KL(π‖ref) minus KL(π‖μ)"
    text += " on the sampler's prefixes" if s.ratio == "token" else ""
    return f"{text}; {' and '.join(rest)} are those of the sampler" if rest else text


def _beside_if_stale(a: Anatomy) -> list[str]:
    """What else there is on stale samples: bias of a bound, a frozen log-ratio, drifts."""
    s = a.samples
    if not a.proved or a.is_nothing or a.anchor == "sampler":
        return []
    texts = []
    if s.bound is not None and s.ratio != "mean":
        texts.append(f"the ratio is {_bounded(s.bound)}, which adds bias")
    is_carried = s.ratio in ("token", "prefix", "sequence")
    if a.constant and not is_carried:
        is_kl = not a.looks_at_length and s.bound is None
        texts.append(_climb(a.constant) if is_kl else "its constant adds a drift")
    texts += [f"a divergence to μ is beside it: {_pull(a)} on the score"] if s.pull is not None else []
    texts += ["its baseline adds a drift"] if a.baseline_drifts else []
    is_mean = _descends_if_stale(a).startswith(MEANS)
    if a.has_past and (s.per_decision or not is_carried) and not is_mean:
        texts.append("the KL of earlier tokens adds a drift")
    return texts


def _pull(a: Anatomy) -> str:
    """What a divergence to the sampler adds to the coefficient."""
    shares = {} if a.samples.pull is None else a.samples.pull.shares
    return " + ".join(_times(weight, _slope(name, "log(π_t/μ_t)")) for name, weight in shares.items())


def _constant_if_stale(a: Anatomy) -> str:
    """What a constant coefficient does, where ref has no effect."""
    s = a.samples
    is_carried = s.ratio in ("token", "prefix", "sequence") and s.bound is None
    if not a.constant or (is_carried and not a.looks_at_length):
        return "nothing"
    pushes = f"pushes π {'away from' if a.constant > 0 else 'to'} what was sampled"
    return pushes if s.ratio != "none" or a.looks_at_length else f"{pushes}: {_climb(a.constant)}"


def _climb(constant: float) -> str:
    return f"{'climbs' if constant > 0 else 'descends'} KL(μ‖π)"


def _why_no_objective(a: Anatomy) -> str:
    """Why the gradient on stale samples is that of nothing; empty if it is that of something."""
    s, is_bare = a.samples, a.samples.ratio == "none"
    has_future = is_bare and bool(a.credits) and not a.is_sum_of_all
    reasons = {
        "a geometric mean of ratios is no importance weight": s.ratio == "mean",
        "each estimate has the ratio of its own token alone": s.ratio == "token" and s.per_decision and a.credits,
        "the ratio of the whole completion is missing": s.ratio in ("token", "prefix") and a.level != "token",
        "the spread that divides it is that of the sampler's completions": is_bare and a.baseline.spread != "none",
        f"there is {FROZEN}": is_bare and s.frozen,
        "later tokens are those of the sampler": has_future and a.horizon.kind != "none",
        "the divergences in the coefficient are those of the sampler's tokens": has_future,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _without_ratio(a: Anatomy) -> str:
    """Without a ratio: a coefficient c(l) descends the mean of h(l) under the sampler, the integral of c."""
    ((name, weight),) = a.own_shares.items() if len(a.own_shares) == 1 else (("", 1.0),)
    name = "" if a.has_edges else name
    descends = "the mean of" if weight > 0 else "climbs the mean of"
    if a.level != "token":
        return f"{descends} {_integral(name, 'L')} under the sampler, L = log π/ref of the completion"
    if a.is_sum_of_all:
        of = "half the variance of L" if a.is_log_variance else "the mean of L²/2"
        return f"{'' if weight > 0 else 'climbs '}{of} under the sampler, L = log π/ref of the completion"
    if a.own.is_zero:
        return "the same on the sampler's prefixes"
    exact = ", and its exact part on the sampler's prefixes" if a.is_exact else ""
    return f"{descends} {_integral(name, 'l')} under the sampler{exact}"


def _integral(name: str, argument: str) -> str:
    k3 = "k3" if argument == "l" else f"k3({argument})"
    known = {"reverse-kl": f"{argument}²/2", "forward-kl": k3, "total-variation": f"|{argument}|"}
    return known.get(name, f"h({argument}), whose derivative is the coefficient,")


# Unit, baseline and scale.


def unit(u: Unit, split: MicroBatches | None = None) -> str:
    """What a loss divides by, and whether micro-batches change it, if that is known."""
    over = "averaged over completions" if u.rows else "summed over completions"
    length = "a constant length" if split and split.change is False else "the padded width, or a fixed length"
    text = {
        "sum": f"summed over the completion, {over}",
        "completion-mean": f"mean over each completion's tokens, {over}: tokens of short completions weigh more",
        "token-mean": "mean over all tokens of the batch",
        "fixed-length": f"summed over the completion and divided by {length}, {over}",
    }.get(u.name, "none of sum, mean per completion, mean over tokens and fixed length")
    if split is None or split.change is None:
        return text
    return f"{text}; micro-batches change {'it' if split.change else 'nothing'}{split.why}"


def in_micro_batches(a: Anatomy) -> MicroBatches:
    """What the parts say of the mean over micro-batches of a loss that is called on each."""
    u, b = a.unit, a.baseline
    reasons = {
        "each divides by its own tokens": u.name == "token-mean",
        "each divides by its own width, unless all are padded alike": u.name == "fixed-length",
        "each has its own baseline": b.name in ("batch-mean", "return-mean", "token-mean") or b.spread == "batch",
    }
    if a.proved_fresh and any(reasons.values()):
        return MicroBatches(True, ": " + "; ".join(reason for reason, holds in reasons.items() if holds))
    if not a.proved_fresh or not u.rows or "other" in (u.name, b.name):
        return MicroBatches()
    in_groups = b.name in ("group-mean", "leave-one-out") or b.spread == "group"
    return MicroBatches(False, f", if all have equally many {'whole groups' if in_groups else 'completions'}")


def baseline(a: Anatomy) -> str:
    """What is subtracted, and divided by."""
    b = a.baseline
    text = {
        "none": "none",
        "leave-one-out": "the mean of the other completions of the group",
        "group-mean": "the mean of the group, the completion included",
        "batch-mean": "the mean of the batch, the completion included",
        "return-mean": "the mean over all tokens of the batch",
        "token-mean": "the mean over the batch's tokens before they are summed"
        + ("" if a.horizon.kind == "none" else ": longer completions are paid where it is positive"),
    }.get(b.name, "completions influence each other in a way that no known baseline does")
    if not b.covers_all and b.name != "none":
        text += ", of the detached credit alone"
    elif b.name in ("group-mean", "batch-mean"):
        text += f": a {b.name.removesuffix('-mean')} of one has no gradient"
    return text if b.spread == "none" else f"{text}; divided by {_divisor(b)}"


def _divisor(b: Baseline) -> str:
    return f"a number of the {b.spread}, which may be below 0" if b.signed else f"the spread of the {b.spread}"


def scale(a: Anatomy) -> str:
    """The factor on β near ref."""
    if a.is_nothing:
        return "0: on fresh samples it adds noise, and no pull" if a.constant else "0: it has no effect"
    if a.baseline.spread != "none":
        where, divisor = a.baseline.spread, _divisor(a.baseline)
        same = f"so that its strength differs from {where} to {where}: alone, a small KL pulls as hard as a large one"
        return f"none that is fixed: the pull is divided by {divisor}, {same}"
    at = "ref" if a.anchor == "ref" else "μ"
    tempered = "" if a.temperature == 1 else f", at temperature {a.temperature:g}"
    if math.isinf(a.scale):
        return f"none that is fixed: the pull does not vanish towards {at}, but is as strong beside it as far away"
    if not a.scale:
        return f"0: there is no pull near {at}"
    among = {"group-mean": "group", "batch-mean": "batch"}.get(a.baseline.name)
    of_n = f", times 1 - 1/n, with n completions in a {among}" if among else ""
    if a.top is not None and a.top.tail == "ref-renormalised":
        return "none that is fixed: it depends on ref's probability of these tokens, and ref is not where the pull ends"
    of_tail = ""
    if a.top is not None and a.top.constant:
        of_tail = f"; but at {at} too it makes the other tokens {'more' if a.top.constant > 0 else 'less'} likely"
    return f"{a.scale:.4g} x the pull of KL(π‖{at}) near {at}{tempered}, in this unit{of_n}{of_tail}"


# The formula.

RATIO_SYMBOLS = {"token": "r_t", "prefix": "w_t", "sequence": "w_T", "mean": "w_T^(1/T)"}
ESTIMATORS = {"1": "k1", "l_t": "k2", "1 - exp(-l_t)": "k3", "exp(l_t) - 1": "k3 with π and ref swapped"}
"""The estimator whose derivative a coefficient is."""


def _coefficient(a: Anatomy) -> str:
    """The formula with what is beside the KL in it, and whose derivative it is."""
    if a.full is not None and a.is_of_entries and a.samples.ratio == "none" and not any(a.entropy):
        each = formula(a) if set(a.full.shares) <= set(EXACT) else "∇D_t"
        tokens = "the vocabulary" if a.top is None else "these tokens"
        return f"none: the gradient is Σ_t {f'({each})' if ' ' in each else each}, of sums over {tokens}"
    text, (bonus, of_entries) = formula(a), a.entropy
    if bonus:
        logp = "Σ_s log π_s" if a.entropy_of_whole else "log π_t"
        return f"{text} {'-' if bonus < 0 else '+'} {abs(bonus):.4g} {logp}"
    if of_entries:
        return f"{text} {'+' if of_entries < 0 else '-'} {_times(abs(of_entries), '∇entropy_t')}"
    return f"{text}, the derivative of {ESTIMATORS[text]}" if text in ESTIMATORS else text


def formula(a: Anatomy) -> str:
    """The coefficient of token t's score, with l_t = log π/ref."""
    s, bound = a.samples, a.samples.bound
    if bound is not None and bound.kind == "value":
        ratio = RATIO_SYMBOLS[s.ratio]
        return f"{formula(a.without_value_bound())} where {ratio} {bound.estimate}(l_t) <= {bound.high:.4g}, else 0"
    terms = [] if a.own.is_zero else [_own_term(a)]
    if a.full is not None:
        known = a.full.shares if set(a.full.shares) <= set(EXACT) else {}
        terms += [_times(weight, f"∇{EXACT[name]}_t") for name, weight in known.items()]
        terms += [] if known else ["∇D_t over the vocabulary"]
    for part in a.credits:
        terms += _credit_terms(part)
    text = " + ".join(terms).replace("+ -", "- ") or "0"
    if a.baseline.name == "token-mean":  # of every token, before the tokens are summed
        text = " + ".join(re.sub(r"\bl_(\w)", r"(l_\1 - baseline)", term) for term in terms)
    elif a.baseline.name not in ("none", "other"):
        text += " - baseline"
    if a.baseline.spread != "none":
        text = f"({text}) / {'mean' if a.baseline.signed else 'spread'}"
    if a.constant:  # it carries the ratio
        text = f"{a.constant:.4g}" if text == "0" else f"{text} {'-' if a.constant < 0 else '+'} {abs(a.constant):.4g}"
    if s.ratio in RATIO_SYMBOLS:
        is_alike = bound is None or bound.beyond is not None
        bounded = RATIO_SYMBOLS[s.ratio] if is_alike else f"bound({RATIO_SYMBOLS[s.ratio]})"
        text = f"{bounded} ({text})" if " " in text else f"{bounded} {text}"
    if a.own.has_edges and text == _own_term(a):
        text = text[1:-1]
    text = f"{text} + {_pull(a)}" if s.pull is not None else text
    return f"{text}, L = Σ l_s" if a.level == "completion" else text


def _own_term(a: Anatomy) -> str:
    """The coefficient of the token's own log-ratio, with its edges."""
    c, symbol = a.own, "l_t" if a.level == "token" else "L"
    shares = c.shares if c.has_edges else a.own_shares
    text = " + ".join(_times(weight, _slope(name, symbol)) for name, weight in shares.items()).replace("+ -", "- ")
    if not c.has_edges:
        return text or f"c({symbol})"
    text = text or ("0" if _is_flat_inside(c) else f"c({symbol})")
    (low, _), (high, _) = ends = _ends(c)
    beyond = dict.fromkeys(f"{pull + 0.0:.3g}" for edge, pull in ends if edge is not None)
    return f"({text} where {between(low, high, symbol)}, else {' and '.join(beyond)})"


def _credit_terms(part: Credit) -> list[str]:
    """The sums over other tokens that an estimate enters, as text."""
    shares = part.curve.shares
    name, weight = next(iter(shares.items())) if len(shares) == 1 else ("", 1.0)
    sampled = {"reverse-kl": "l_s", "k2": "k2(l_s)", "k3": "k3(l_s)"}.get(name, "e(l_s)")
    sampled = "c(l_s)" if part.curve.has_edges else sampled
    estimate = f"{EXACT.get(name, 'D')}_s" if part.source == "full" else sampled
    weight *= TOKENS if part.divided else 1
    terms = []
    both = part.later == part.earlier
    sides = [(part.later, "≠")] if both else [(part.later, ">"), (part.earlier, "<")]
    for weights, sign in sides:
        if not any(weights):
            continue
        steps = {round(b / a, 6) if a else 0.0 for a, b in pairwise(weights)}
        (step,) = steps if len(steps) == 1 else (0.0,)
        distance = {"≠": "|s-t|", ">": "(s-t)", "<": "(t-s)"}[sign]
        first = weights[0] / step if step else 1.0
        power = "" if step == 1 else f"{step:g}^{distance} " if step else f"w_{distance} "
        own = part.divided or (part.now and part.now == first)
        over = "all s" if own and both else f"s {sign.replace('>', '≥')} t" if own and sign == ">" else f"s {sign} t"
        terms.append(_times(weight * first, f"{'1/T ' if part.divided else ''}Σ_({over}) {power}{estimate}"))
    if part.now and not (terms and any(mark in terms[0] for mark in ("≥", "all s"))):
        terms.append(_times(part.now, estimate.replace("_s", "_t")))
    return terms


def _slope(name: str, symbol: str) -> str:
    if name in ("k2", "k3"):
        return f"{name}({symbol})"
    return "f(u)/u" if name in ESTIMATES else named(name).formula.replace("l", symbol)


def _times(weight: float, text: str) -> str:
    if abs(weight - 1) < 1e-6:
        return text
    if abs(weight + 1) < 1e-6:
        return f"-({text})" if " " in text else f"-{text}"
    return f"{weight:.4g} ({text})" if " " in text else f"{weight:.4g} {text}"


# What is neither the KL nor its form, and the proof.


def remarks(a: Anatomy) -> list[str]:
    """Constants, an entropy bonus, tokens that are left out, and leaks."""
    texts = []
    if a.proved_fresh:
        texts += [_cause(a)] if a.matters and not a.proved else []
        texts += [FROZEN] if a.samples.frozen else []
        if a.constant and not a.is_nothing:
            texts.append(f"a constant of {a.constant:g} on every score")
        if any(a.entropy):
            bonus = sum(a.entropy)
            whole = " over whole completions" if a.entropy_of_whole else ""
            texts.append(f"an entropy {'bonus' if bonus > 0 else 'penalty'} of {abs(bonus):g}{whole}")
        texts += [] if a.ends else ["the last token of a completion has no gradient"]
        texts += [] if a.cut_off else ["completions that fill the batch's width have no gradient"]
    return [*texts, "masked positions have a gradient"] if a.leaks else texts


def proof(a: Anatomy) -> str:
    """Whether the formula is the loss."""
    if a.proved:
        summed = f", and summed over every outcome of {a.problems} small problems" if a.problems else ""
        tokens = ", at the tokens that are not masked" if a.leaks else ""
        largest = max(a.unexplained.values())
        left = f"; what is left is rounding, at most {largest:.0e}" if largest else ""
        return f"these parts give its gradient at random inputs{summed}{tokens}{left}"
    if a.proved_fresh:
        return f"on fresh samples; on stale ones {_unexplained(a, stale=True)}"
    name, worst = next((name, gap) for name, gap in a.unexplained.items() if not gap <= a.allowed)
    return f"no: at {name} the parts leave {percent(min(worst, 1))} of the coefficient unexplained"


# Expectations of parts.

PARTS: tuple[str, ...] = ("divergence", "horizon", "samples", "unit", "baseline", "scale")


def parse_parts(text: str) -> dict[str, str]:
    """Read `divergence=reverse-kl,horizon=all`.

    Raises:
        UnknownNameError: for a part that does not exist.
        MeaningError: for a word without `=`.
    """
    wanted = {}
    for word in text.split(","):
        name, equals, value = (x.strip() for x in word.partition("="))
        if not equals:
            raise MeaningError("PART=VALUE", repr(word), "write for example divergence=reverse-kl,horizon=all")
        if name not in PARTS:
            raise UnknownNameError("part", name, PARTS)
        wanted[name] = value
    return wanted


def part_values(a: Anatomy) -> dict[str, str]:
    """The short value of each part, as `--expect` takes it."""
    shares = a.shares
    ((name, weight),) = shares.items() if len(shares) == 1 else (("nothing" if not shares else "sum", 1.0),)
    name = name if weight > 0 else f"climbs {name}"
    low, high = a.curve.low, a.curve.high
    if a.has_edges:
        is_huber = low is not None and high is not None and low == -high and name == "reverse-kl" and a.curve.below != 0
        name = huber(high).name if is_huber and high else f"bounded {name}"
    name = f"{name} to the sampler" if a.anchor == "sampler" else name
    name = f"{name}, shifted" if a.late else name
    name = f"{name} at temperature {a.temperature:g}" if a.temperature != 1 else name
    name = f"{name} over a top-k" if a.top is not None else name
    h, bound = a.horizon, a.samples.bound
    name = f"{name}, on masked tokens too" if a.leaks else name
    return {
        "divergence": name,
        "horizon": (f"{h.discount:g}" if h.kind == "discount" else h.kind) + ("" if h.fits else f" by {h.estimate}"),
        "samples": a.samples.ratio + ("" if bound is None else f" {bound.kind}"),
        "unit": a.unit.name,
        "scale": "spread" if a.baseline.spread != "none" else f"{a.scale:g}",
        "baseline": a.baseline.name + ("" if a.baseline.spread == "none" else f" / {a.baseline.spread} spread"),
    }


def part_differences(a: Anatomy, wanted: dict[str, str]) -> list[tuple[str, str]]:
    """What was expected of a part and what it is, where they differ; a loss that is not proved meets no expectation."""
    values = part_values(a) if a.proved_fresh else dict.fromkeys(PARTS, "not proved")
    return [(f"{name}={value}", values[name]) for name, value in wanted.items() if values[name] != value]
