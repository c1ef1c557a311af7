"""The parts of a loss in words: five lines and a formula, the cells of a table, and what was expected of a part."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from ..core.divergences import huber, named
from ..errors import MeaningError, UnknownNameError
from .anatomy import VOCABULARY
from .parts import Anatomy, Bound, Credit, Unit
from .probes import ESTIMATES, REACH, TOKENS

NAMES = {
    "reverse-kl": ("reverse KL, KL(π‖ref)", "reverse KL"),
    "forward-kl": ("forward KL, KL(ref‖π)", "forward KL"),
    "chi-square": ("half of χ²(π‖ref)", "χ²"),
    "hellinger": ("squared Hellinger distance", "Hellinger"),
    "total-variation": ("twice the total variation distance", "total variation"),
    "jensen-shannon": ("Jensen-Shannon divergence", "Jensen-Shannon"),
    "alpha": ("α-divergence", "α-divergence"),
}
"""The words of each divergence: in a report, and in a table."""

NOUNS = {"χ²": "χ² divergence", "Hellinger": "Hellinger distance", "Jensen-Shannon": "Jensen-Shannon divergence"}
"""The words of a table that are no nouns, in a sentence."""


def report(a: Anatomy) -> list[tuple[str, str]]:
    """The report of one loss: a label and a sentence for each part."""
    if not a.deterministic:
        return [("divergence", "none can be told: the same batch gives different gradients")]
    if not a.finite:
        return [("divergence", "none can be told: the gradient is NaN or infinite at usual inputs")]
    rows = [("divergence", divergence(a))]
    if not a.proved_fresh:
        if a.shares:
            known = f", as in {_sum(a.shares, brief=False)}" if _is_named(a) else ""
            rows.append(("one token", f"where it alone differs from ref, its coefficient is {formula(a)}{known}"))
        rows.append(("the rest", "not told: the parts that were read are not all of this loss"))
        return [*rows, ("proved", proof(a))]
    if a.late:
        return [*rows, ("ratio", ratio(a)), ("unit", unit(a.unit)), ("baseline", baseline(a)), ("proved", proof(a))]
    rows += [("looks ahead", horizon(a)), ("ratio", ratio(a))]
    rows += [] if a.is_nothing and not a.constant else [("stale samples", _stale(a, brief=False))]
    rows += [
        ("unit", f"{unit(a.unit)}{_of_micro_batches(a)}"),
        ("baseline", baseline(a)),
        ("scale", scale(a)),
        ("coefficient", _coefficient(a)),
    ]
    return [*rows, ("proved", proof(a))]


def _of_micro_batches(a: Anatomy) -> str:
    """What follows from the unit and the baseline for batches that are cut up, where the unit does not say it."""
    if a.baseline.name.startswith("batch") or a.baseline.name in ("return-mean", "token-mean"):
        return "; micro-batches of other sizes change its baseline"
    if a.unit.name == "fixed-length":
        return "; it changes with the longest completion of a micro-batch, unless all are padded alike"
    plain = a.baseline.name == a.baseline.spread == "none"
    if plain and a.unit.rows and a.unit.name in ("sum", "completion-mean"):
        return "; micro-batches of equally many completions change nothing"
    return ""


def summary(a: Anatomy, *, on_policy: bool = True) -> str:
    """What a loss descends, as one noun phrase: with samples from π, or from another policy."""
    if not a.deterministic:
        return "none can be told: the same batch gives different gradients"
    if not a.finite:
        return "none can be told: its gradient is NaN or infinite at usual inputs"
    if not on_policy:
        return _stale(a)
    if a.is_nothing or not a.proved_fresh or a.late:
        return divergence(a)
    text = divergence(a, brief=True).replace("one of its own", "a divergence of its own")
    for word, noun in NOUNS.items():
        text = text.replace(word, noun)
    h = a.horizon
    if a.level == "token" and not h.fits:
        text += f", token by token, and later tokens by {BY.get(h.estimate, h.estimate)}"
    elif a.level == "token":
        ahead = {"none": "token by token", "all": "whole completions", "discount": f"{h.discount or 0:g} a token ahead"}
        text += f", {ahead.get(h.kind, 'with a future of its own')}"
    text += {"completion-mean": ", mean per completion", "token-mean": ", mean over tokens"}.get(a.unit.name, "")
    bound = a.samples.bound
    if bound is not None and bound.beyond is not None:
        beyond = _sum(bound.beyond[0].shares, brief=True) if bound.beyond[0].shares else "no KL"
        text += f", where the ratio is within its bound, and {beyond} beyond"
    text += ", centred token by token" if a.baseline.name == "token-mean" else ""
    return text + _spread(a)


def percent(share: float) -> str:
    """A share in percent, with more digits if it is small, so that only 0 reads 0%."""
    if not math.isfinite(share):
        return "–"
    if share >= 0.01 or share <= 0:
        return f"{share:.0%}"
    return f"{share:.1%}" if share >= 0.0005 else f"{100 * share:.1g}%"


def _unexplained(a: Anatomy, *, stale: bool) -> str:
    return f"{percent(min(a.largest_gap(stale=stale), 1))} of the coefficient is not explained"


def _cause(a: Anatomy) -> str:
    """Why no divergence is known."""
    if a.top_k is not None:
        return f"in a vocabulary of {VOCABULARY} it sees {a.top_k} entries: a top-k, {TAILS[a.lumps_tail]}"
    if not a.matters:
        return _unexplained(a, stale=False)
    return f"its coefficient depends on {' and '.join(filter(None, [', '.join(a.matters[:-1]), a.matters[-1]]))}"


TAILS = {False: "whose tail is left out", True: "with the tail as one entry"}
"""What a top-k does with the other entries, by whether it adds them up."""

BY = {"exact": "their exact divergences", "excess": "f(u)/u", "other": "an estimate of its own"}
"""Estimates of later tokens in words."""


def _spread(a: Anatomy) -> str:
    return "" if a.baseline.spread == "none" else f", divided by {_divisor(a)}"


def _divisor(a: Anatomy) -> str:
    b = a.baseline
    divisor = "a number of the {}, which may be below 0, as a mean may" if b.signed else "the spread of the {}"
    return divisor.format(b.spread)


def _stale(a: Anatomy, *, brief: bool = True) -> str:
    """On samples of another policy μ; if not brief, first whether that is corrected, and functions are written out."""
    s, bounded = a.samples, _bound(a.samples.bound)
    carried = s.weight in ("token", "prefix", "sequence")
    if not a.proved_fresh:
        return "not known"
    if not a.proved:
        return f"not proved: {_unexplained(a, stale=True)}"
    if a.is_nothing:
        if not a.constant or (carried and s.constant and not a.looks_at_length and not bounded):
            return "nothing"
        if s.ratio != "none" or a.looks_at_length:
            return f"moves {'away from' if a.constant > 0 else 'to'} what was sampled"
        return f"{_climb(a.constant)}, {'away from' if a.constant > 0 else 'to'} what was sampled"
    if a.power:
        return "no objective that has a name"
    if a.anchor == "sampler":
        return "a divergence to the sampler"
    if s.weight == "none":
        text = _uncorrected(a, brief)
    elif s.ratio == "before":
        text = "no objective: the token itself is the sampler's"
    elif s.ratio == "mean":
        text = "no objective: a geometric mean of ratios is no importance weight"
    elif s.ratio == "token" and s.per_decision and a.credits:
        text = "no objective: each estimate has the ratio of its own token alone"
    else:
        text = _corrected(a)
    if bounded and (s.ratio != "mean" or s.weight == "none"):
        text += f"; {'the ratio is ' if s.weight != 'none' else 'by its ratio to π some is '}{bounded}, which adds bias"
    if s.frozen and text.startswith(("the mean", "climbs the mean")):
        text = "no objective: log π/ref is that of the sampler"
    elif s.frozen:
        text += "; log π/ref is that of the sampler"
    drifts = []
    if a.constant and not (carried and s.constant):
        is_kl = not a.looks_at_length and not bounded
        drifts.append(_climb(a.constant) if is_kl else "its constant adds a drift")
    if a.baseline_drifts:
        drifts.append("its baseline adds a drift")
    if a.has_past and (s.per_decision or not carried) and not text.startswith(("the mean", "climbs the mean")):
        drifts.append("the credit of earlier tokens adds a drift")
    if not brief:
        text = _with_verdict(a, text) + (", beside the entropy term" if any(a.entropy) else "")
    return "; ".join([text, *drifts])


def _with_verdict(a: Anatomy, text: str) -> str:
    """The same, after whether stale samples are corrected."""
    s = a.samples
    if text.startswith(("the mean", "climbs the mean")):
        return f"not corrected: {text}"
    if text.startswith("no objective"):
        return f"not the gradient of any objective{text.removeprefix('no objective')}"
    if not text.startswith("the same") or s.frozen:
        return text
    text = text.replace("the same", "the same divergence", 1)
    if s.weight == "none":
        return text
    for_what = " for the token" if s.ratio == "token" else ""
    return f"corrected{for_what}{' up to its bound' if s.bound is not None else ''}: {text}"


def _climb(constant: float) -> str:
    return f"{'climbs' if constant > 0 else 'descends'} KL(μ‖π)"


def _corrected(a: Anatomy) -> str:
    """With the ratio of the token, the tokens so far or the completion."""
    s = a.samples
    text = "the same on the sampler's prefixes" if s.ratio == "token" else "the same"
    if s.ratio == "sequence":
        return text
    if a.level != "token":
        return "no objective: the ratio of the whole completion is missing"
    rest = []
    if a.horizon.kind != "none" and not (s.ratio == "prefix" and s.per_decision):
        rest.append("later tokens")
    if a.looks_at_length:
        rest.append("lengths")
    return f"{text}; {' and '.join(rest)} are those of the sampler" if rest else text


def _uncorrected(a: Anatomy, brief: bool) -> str:
    """Without a ratio: a coefficient c(l) descends the mean of h(l) under the sampler, the integral of c."""
    own = a.own_shares
    is_bounded = a.has_edges or len(own) != 1
    ((name, weight),) = own.items() if len(own) == 1 else (("", 1.0),)
    descends = "the mean" if weight > 0 else "climbs the mean"
    if a.baseline.spread != "none":
        return "no objective: it is divided by a spread that the other samples decide"
    if a.level != "token":
        whole = "L = log π/ref of the completion" if a.level == "completion" else "L = the completion's mean log π/ref"
        return f"{descends} of {_mean_of(a, name, is_bounded, 'L', brief)} under the sampler, {whole}"
    if any(c.later or c.earlier for c in a.credits):
        if a.is_sum_of_all:
            return f"{descends} of L²/2 under the sampler, L = log π/ref of the completion"
        if a.horizon.kind != "none":
            return "no objective: later tokens are those of the sampler"
        return "no objective: without a ratio"
    texts = [] if a.own.is_zero else [f"{descends} of {_mean_of(a, name, is_bounded, 'l', brief)} under the sampler"]
    texts += ["the same on the sampler's prefixes"] if a.is_exact and not texts else []
    return texts[0] + (", and its exact part on the sampler's prefixes" if a.is_exact and not a.own.is_zero else "")


def _mean_of(a: Anatomy, name: str, is_bounded: bool, argument: str, brief: bool) -> str:
    """The function whose derivative is the coefficient, by the log-ratio of a token (l) or a completion (L)."""
    k3 = "k3" if argument == "l" else f"k3({argument})"
    known = {"reverse-kl": f"{argument}²/2", "forward-kl": k3, "total-variation": f"|{argument}|"}
    known |= {} if brief else {"chi-square": f"exp({argument}) - 1 - {argument}"}
    flat = (a.curve.low is not None and not a.curve.below) or (a.curve.high is not None and not a.curve.above)
    if name in known and not is_bounded:
        return known[name]
    if name in known and not brief and flat and not a.constant:
        ends = [(a.curve.low, a.curve.below, "below"), (a.curve.high, a.curve.above, "above")]
        places = " and ".join(f"{word} {edge:.4g}" for edge, pull, word in ends if edge is not None and not pull)
        return f"{known[name]}, which is flat for {argument} {places},"
    return f"h({argument}), the integral of c({argument}),"


def cells(a: Anatomy) -> tuple[str, str, str, str, str]:
    """A row of a table: divergence, looks ahead, samples, unit, scale."""
    if not (a.deterministic and a.finite):
        return ("not told", "", "", "", "")
    if not a.proved_fresh:
        return (divergence(a, brief=True), "", "", "", "")
    of = {"none": "fresh", "other": "other"}.get(a.samples.weight, f"{a.samples.ratio} ratio")
    of = f"fresh, {a.samples.ratio} ratio" if a.samples.weight != a.samples.ratio else of
    of = ", ".join(filter(None, [of, _bound(a.samples.bound) if a.proved else "not proved if stale"]))
    factor = "spread" if a.baseline.spread != "none" else f"{a.scale:.3g}" if math.isfinite(a.scale) else "jump"
    horizon_ = a.horizon
    ahead = {"none": "no", "all": "all", "discount": f"{horizon_.discount or 0:g} a token"}.get(
        horizon_.kind, horizon_.kind
    )
    units = {"sum": "sum", "completion-mean": "mean per completion", "token-mean": "mean over tokens"}
    return (
        divergence(a, brief=True),
        "" if a.is_nothing else ahead,
        "" if a.is_nothing else of,
        units.get(a.unit.name, a.unit.name),
        "" if a.is_nothing else factor,
    )


def divergence(a: Anatomy, *, brief: bool = False) -> str:
    """The divergence that the coefficient of a token's own log-ratio descends."""
    if a.is_nothing:
        return _nothing(a, brief)
    shares = a.shares
    if not a.proved_fresh:
        alone = f"; of one token alone: {_sum(shares, brief=True)}" if _is_named(a) else ""
        return f"not known{alone}" if brief else f"not known: {_cause(a)}"
    if not _is_named(a):
        if _is_flat_inside(a):
            return _nothing_inside(a, brief)
        own = "" if brief else ", whose slope is the coefficient below"
        text = f"one of its own{own}{' (not convex)' if brief and not a.curve.convex else ''}"
    else:
        text = _sum(shares, brief=brief)
    text += _level(a, brief)
    if a.top_k is not None:
        text += f", on {a.top_k} of {VOCABULARY} entries"
    if a.anchor == "sampler":
        text = text.replace("ref", "μ") + " to the sampler: the old log-probs are in the place of ref"
    if a.baseline.spread != "none":
        text += "" if brief else _spread(a)
    if not brief and a.shares and all(weight < 0 for weight in a.shares.values()):
        text += "; the sign is wrong"
    elif not brief:
        text += _away(a)
    text += _edges(a, brief)
    if a.power:
        power = "π" if a.power == 1 else f"π^{a.power:g}"
        text = f"none: {text} x {power}" if brief else f"none: the coefficient is that of the {text}, times {power}"
    return f"none: {_shift(a)}; at the same token it would be {text}" if a.late and not brief else text


def _level(a: Anatomy, brief: bool) -> str:
    """What a divergence is one of: tokens, completions; and of which policies."""
    h = a.horizon
    levels = {"none": ", of each token", "discount": ", of each token and its discounted future"}
    text = "" if brief or a.level != "token" else levels.get(h.kind, "")
    if a.level == "mean":
        text = ", of each completion's mean log π/ref"
    elif a.level == "completion" or (not brief and h.kind == "all" and h.fits):
        text = ", of whole completions"
    if a.temperature != 1:
        text += f", at temperature {a.temperature:g}"
    return text


def _shift(a: Anatomy) -> str:
    return f"token t is compared with ref's log-prob of token t{'-' if a.late > 0 else '+'}{abs(a.late)}"


def _away(a: Anatomy) -> str:
    """Which tokens are pushed away from ref: on the one side of it where the coefficient has the other's sign."""
    curve, texts = a.curve, []
    if not curve.shares or a.constant or curve.convex:
        return ""
    for sign, word in ((-1.0, "<"), (1.0, ">")):
        side = sign * torch.linspace(1e-3, REACH, 3000, dtype=torch.float64)
        away = curve(side) * sign < -1e-12
        if bool(away.any()):
            first = float(side[away.nonzero()[0, 0]])
            texts.append(f"l {word} {0 if abs(first) < 2e-3 else first:.2g}")
    return f"; it pushes tokens away from ref where {' and '.join(texts)}" if texts else ""


def _is_named(a: Anatomy) -> bool:
    return bool(a.shares) and "other" not in a.shares


def _is_flat_inside(a: Anatomy) -> bool:
    """Whether a token's own log-ratio has an effect beyond both edges only."""
    c = a.curve
    if c.low is None or c.high is None:
        return False
    inside = (c.points[0] > c.low) & (c.points[0] < c.high)
    return not bool(c.points[1][inside].any())


def _nothing_inside(a: Anatomy, brief: bool) -> str:
    c = a.curve
    text = f"nothing where l > {c.low:.3g} and l < {c.high:.3g}"
    if c.low == c.high:
        text = f"nothing but a step at l = {c.low:.3g}"
    if brief:
        return text
    beyond = (f"{pull + a.constant:.4g} {word}" for pull, word in ((c.below, "below"), (c.above, "above")))
    return f"{text}: ref has no effect there; the coefficient is {a.constant:.4g}, and {', '.join(beyond)}"


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


def _sum(shares: dict[str, float], *, brief: bool) -> str:
    if len(shares) == 1:
        ((name, weight),) = shares.items()
        return f"climbs the {_title(name, brief)}" if weight < 0 else _title(name, brief)
    largest = max(abs(w) for w in shares.values())
    texts = []
    for name, weight in sorted(shares.items(), key=lambda pair: -pair[1]):
        factor = "" if abs(abs(weight) - largest) <= 1e-9 * largest else f"{abs(weight) / largest:.3g} x "
        sign = "minus " if weight < 0 else "plus " if texts else ""
        texts.append(f"{sign}{factor}{_title(name, brief)}")
    return " ".join(texts)


def _title(name: str, brief: bool) -> str:
    kind, _, order = name.rstrip(")").partition("(")
    return NAMES[kind][brief] + (f" ({'α' if kind == 'alpha' else 'β'} = {order})" if order else "")


def _edges(a: Anatomy, brief: bool) -> str:
    texts = []
    c = a.curve
    flat: list[str] = []
    symbol = "l" if a.level == "token" else "L"
    for edge, pull, word, sign in ((c.low, c.below, "below", ">"), (c.high, c.above, "above", "<")):
        if edge is None:
            continue
        has_none = pull == 0 or abs(pull + a.constant) <= a.allowed * abs(a.constant)
        if not brief:
            level = "no pull" if has_none else f"a constant pull of {pull:.3g}"
            texts.append(f"{word} log π/ref = {edge:.4g} {level}")
        elif has_none:
            texts.append(f"{symbol} {sign} {edge:.3g}")
        else:
            flat.append(f"{word} {'' if flat else f'{symbol} = '}{edge:.3g}")
    if not brief:
        return f"; {', '.join(texts)}" if texts else ""
    return (f" where {' and '.join(texts)}" if texts else "") + (f", constant {' and '.join(flat)}" if flat else "")


def horizon(a: Anatomy) -> str:
    """What of later tokens is in the coefficient of a token."""
    if a.is_nothing:
        return "no"
    h = a.horizon
    if a.level != "token":
        return "to the end: it is a function of the whole completion"
    noise = "adds a pull on lengths" if a.looks_at_length else "only adds noise on fresh samples"
    past = f"; the credit of earlier tokens is in it too, which {noise}" if a.has_past else ""
    if h.kind == "none":
        return f"no: what a token does to later tokens is left out{past}"
    by = BY.get(h.estimate, h.estimate)
    is_bounded = any(c.source == "sampled" and c.curve is not None and c.curve.has_edges for c in a.credits)
    by += ", bounded" if is_bounded else ""
    is_reverse = h.estimate in ("k1", "k3") and not is_bounded and not any(c.divided for c in a.credits)
    estimates = "an estimate of the reverse KL" if is_reverse else "no estimate of the divergence above"
    fits = "" if h.fits else f", which is {estimates}"
    if any(c.divided for c in a.credits):
        return f"to the end of the completion, by the mean of {by} over its tokens{fits}{past}"
    if h.kind == "all":
        return f"to the end of the completion, by {by}{fits}{past}"
    if h.kind == "discount":
        return f"discounted by {h.discount:g} a token, by {by}{fits}{past}"
    return f"with weights {', '.join(f'{w:.3g}' for w in h.weights)} by distance, by {by}{fits}{past}"


def ratio(a: Anatomy) -> str:
    """Which importance ratio π/μ there is."""
    s = a.samples
    if a.is_nothing and not a.constant:
        return "none, and none is needed"
    if s.weight == "none":
        if s.bound is None and (any(a.exact) or a.full is not None) and a.own.is_zero and not a.credits:
            return "none, and none is needed for the token: the sum over the vocabulary does not read which was sampled"
        if s.bound is None:
            return "none: samples are taken as drawn from π"
        left_out = "tokens" if s.ratio == "token" else "completions"
        ends = outside(s.bound.low, s.bound.high, "{:.4g}".format)
        return f"none weighs: {left_out} are left out where {OF[s.ratio]} is {ends}"
    if s.ratio == "other":
        return "it depends on π/μ in another way than by a token, prefix, sequence or mean ratio"
    text = f"{OF[s.ratio]}, {_bound(s.bound)}" if s.bound is not None else OF[s.ratio]
    if s.bound is not None and s.bound.beyond is not None:
        text += f"; it is differentiated, so that beyond its bound another coefficient is left: {_beyond(a)}"
    return text


OF = {
    "token": "π/μ of the token itself",
    "prefix": "π/μ of the tokens so far",
    "before": "π/μ of the tokens before, without the token itself",
    "sequence": "π/μ of the whole completion",
    "mean": "the geometric mean of π/μ over the completion",
}
"""The ratios in words."""


def _beyond(a: Anatomy) -> str:
    """The coefficient beyond the bound of a ratio that is differentiated."""
    assert a.samples.bound is not None
    assert a.samples.bound.beyond is not None
    curve, constant = a.samples.bound.beyond
    terms = [_times(weight, _slope(name).replace("l", "l_t")) for name, weight in curve.shares.items()]
    terms += [] if curve.shares or curve.is_zero else ["c(l_t)"]
    terms += [f"{constant:.4g}"] if constant else []
    text = " + ".join(terms) or "0"
    return f"bound x ({text})" if " " in text else f"bound x {text}"


def outside(below: float | None, above: float | None, number: Callable[[float], str] = "{:.3g}".format) -> str:
    """A range that is open on one or both sides; `number` writes its ends. Empty if there is none.

    Example:
        >>> outside(-2.61, 11.0)
        'below -2.61 or above 11'
    """
    ends = (("below", below), ("above", above))
    return " or ".join(f"{word} {number(end)}" for word, end in ends if end is not None)


BOUNDS = {"truncate": "truncated", "clip": "clipped", "ppo": "clipped as in PPO"}


def _bound(bound: Bound | None) -> str:
    if bound is None:
        return ""
    word = BOUNDS.get(bound.kind, "bounded")
    if bound.kind in ("mask", "gate"):
        word = "masked" if bound.kind == "mask" else "left out"
        return f"{word} {outside(bound.low, bound.high, '{:.4g}'.format)}"
    if bound.kind == "value":
        return f"0 where r x {bound.estimate} > {bound.high:.4g}"
    ends = [f"{x:.4g}" for x in (bound.low, bound.high) if x is not None]
    dual = "" if bound.dual is None else f", with a dual clip at {bound.dual:.4g}"
    return f"{word} at {' and '.join(ends)}{dual}"


def unit(u: Unit) -> str:
    """What the loss divides by."""
    over = "averaged over completions" if u.rows else "summed over completions"
    return {
        "sum": f"summed over the completion, {over}",
        "completion-mean": f"mean over each completion's tokens, {over}: tokens of short completions weigh more",
        "token-mean": "mean over all tokens of the batch: micro-batches of other sizes change it",
        "fixed-length": f"summed over the completion and divided by the padded length, {over}",
    }.get(u.name, "none of sum, mean per completion, mean over tokens and fixed length")


def baseline(a: Anatomy) -> str:
    """What is subtracted, and divided by."""
    text = {
        "none": "none",
        "leave-one-out": "the mean of the other completions of the group",
        "group-mean": "the mean of the group, itself included",
        "batch-mean": "the mean of the batch, itself included",
        "batch-leave-one-out": "the mean of the other completions of the batch",
        "return-mean": "the mean over all tokens of the batch",
        "token-mean": "the mean over the batch's tokens before they are summed: it pays for length",
    }.get(a.baseline.name, "completions influence each other in a way that no known baseline does")
    if a.baseline.covers != "all" and a.baseline.name != "none":
        text += ", of the detached credit alone"
    elif a.baseline.name in ("group-mean", "batch-mean"):
        text += f": a {a.baseline.name.removesuffix('-mean')} of one has no gradient"
    return text if a.baseline.spread == "none" else f"{text}; divided by {_divisor(a)}"


def scale(a: Anatomy) -> str:
    """The factor on β near ref."""
    if a.is_nothing:
        return "0: on fresh samples it adds noise, and no pull" if a.constant else "0: it has no effect"
    if a.baseline.spread != "none":
        return f"none that is fixed: the pull is divided by {_divisor(a)}, so that it is as strong at a small KL"
    at = "ref" if a.anchor == "ref" else "the sampler"
    if math.isinf(a.scale):
        return f"infinite: the pull jumps at {at}, and is as strong beside it as far away"
    if a.power:
        return "none: a token's pull is proportional to a power of its own probability"
    if not a.scale:
        return f"0: there is no pull near {at}"
    among = {"group-mean": "group", "batch-mean": "batch"}.get(a.baseline.name)
    pull = f"{a.scale:.4g} x the pull of KL(π‖{'ref' if a.anchor == 'ref' else 'μ'}) near {at}"
    return f"{pull}, times 1 - 1/n, with n completions in a {among}" if among else pull


SYMBOLS = {"token": "r_t", "prefix": "w_t", "before": "w_(t-1)", "sequence": "w_T", "mean": "w_T^(1/T)"}


ESTIMATORS = {
    "1": "k1 as a loss",
    "l_t": "k2 as a loss",
    "1 - exp(-l_t)": "k3 as a loss",
    "exp(l_t) - 1": "k3 as a loss with π and ref swapped",
}
"""Well-known losses by their coefficient."""


def _coefficient(a: Anatomy) -> str:
    """The formula with what is beside the KL in it, and whose it is."""
    if a.full is not None and a.own.is_zero and not a.credits:
        return "none: the gradient is Σ_t ∇D_t, with D_t summed over the vocabulary"
    text = formula(a)
    bonus, of_entries = a.entropy
    if bonus:
        logp = "Σ_s log π_s" if a.entropy_of_whole else "log π_t"
        return f"{text} {'-' if bonus < 0 else '+'} {abs(bonus):.4g} {logp}"
    if of_entries:
        return f"{text} {'+' if of_entries < 0 else '-'} {_times(abs(of_entries), '∇entropy_t')}"
    plain, edges = text.split(", with c(l) = ")[-1].split(", but ")[0], a.has_edges and not a.constant
    name = ESTIMATORS.get(plain.replace("l)", "l_t)") if edges else plain)
    if not name or (a.has_edges and not edges):
        return text
    return f"{text}: that of {name}{_clamp(a, name) if edges else ''}"


def _clamp(a: Anatomy, name: str) -> str:
    """At which value an estimate is clamped, from where its slope ends."""
    value = {"k2 as a loss": lambda x: x * x / 2, "k3 as a loss": lambda x: math.exp(-x) - 1 + x}.get(name)
    ends = [edge for edge in (a.curve.low, a.curve.high) if edge is not None]
    if value is None or a.curve.below or a.curve.above:
        return ""
    values = [value(edge) for edge in ends]
    return f" clamped at {values[0]:.3g}" if max(values) - min(values) < 1e-3 * max(values) else ", cut off"


def formula(a: Anatomy) -> str:
    """The coefficient of token t's score, with l_t = log π/ref."""
    bound = a.samples.bound
    if bound is not None and bound.kind == "value":
        ratio = SYMBOLS[a.samples.ratio]
        return f"{formula(a.without_value_bound())} where {ratio} {bound.estimate}(l_t) <= {bound.high:.4g}, else 0"
    terms = []
    argument = "l_t" if a.level == "token" else "L"
    if (a.has_edges or not a.own.shares) and not a.own.is_zero:
        terms.append(f"c({argument})")
    else:
        terms += [_times(weight, _slope(name).replace("l", argument)) for name, weight in a.own_shares.items()]
    for name, weight in zip(("KL(π‖ref)_t", "KL(ref‖π)_t"), a.exact, strict=True):
        if weight:
            terms.append(_times(weight, f"∇{name}"))
    if a.full is not None:
        terms.append("∇D_t over the vocabulary")
    for part in a.credits:
        terms += _credit_terms(part)
    text = " + ".join(terms).replace("+ -", "- ") or "0"
    if a.baseline.name not in ("none", "other"):
        text += " - baseline"
    if a.baseline.spread != "none":
        text = f"({text}) / {'mean' if a.baseline.signed else 'spread'}"
    if a.samples.weight in SYMBOLS:
        is_alike = a.samples.bound is None or a.samples.bound.beyond is not None
        bounded = SYMBOLS[a.samples.ratio] if is_alike else f"bound({SYMBOLS[a.samples.ratio]})"
        text = f"{bounded} ({text})" if len(terms) > 1 or " " in text else f"{bounded} {text}"
    if a.constant:
        text = f"{a.constant:.4g}" if text == "0" else f"{text} {'-' if a.constant < 0 else '+'} {abs(a.constant):.4g}"
    if a.power:
        text = f"{'π_t' if a.power == 1 else f'π_t^{a.power:g}'} ({text})"
    if bound is not None and bound.beyond is not None:
        text += f"; beyond the bound of {SYMBOLS[a.samples.ratio]}: {_beyond(a)}"
    if a.level != "token":
        text += ", L = Σ l_s" if a.level == "completion" else ", L = Σ l_s / T"
    return text + (f", with c(l) = {_cut_curve(a)}" if a.has_edges and (a.own.shares or _is_flat_inside(a)) else "")


def _cut_curve(a: Anatomy) -> str:
    """A curve with its edges, as text."""
    curve = " + ".join(_times(weight, _slope(name)) for name, weight in a.own.shares.items()) or "0"
    edges = ((a.own.low, a.own.below, "<"), (a.own.high, a.own.above, ">"))
    edges = tuple(edge for edge in edges if edge[0] is not None and (edge[1] or curve != "0"))
    ends = [f"{pull:.4g} where l {sign} {edge:.4g}" for edge, pull, sign in edges]
    return f"{curve}, but {' and '.join(ends)}"


def _credit_terms(part: Credit) -> list[str]:
    """The sums over other tokens that an estimate enters, as text."""
    names = {"exact-reverse": "KL(π‖ref)_s", "exact-forward": "KL(ref‖π)_s", "full": "D_s"}
    shares = {} if part.source != "sampled" or part.curve is None else part.curve.shares
    name, weight = next(iter(shares.items())) if len(shares) == 1 else ("", 1.0)
    sampled = {"reverse-kl": "l_s", "k2": "k2(l_s)", "k3": "k3(l_s)"}.get(name, "e(l_s)")
    sampled = "c(l_s)" if part.curve is not None and part.curve.has_edges else sampled
    estimate = names.get(part.source, sampled)
    weight *= TOKENS if part.divided else 1
    terms = []
    both = part.later == part.earlier
    sides = [(part.later, "≠")] if both else [(part.later, ">"), (part.earlier, "<")]
    for weights, sign in sides:
        if not any(weights):
            continue
        steps = {round(b / a, 6) if a else 0.0 for a, b in pairwise(weights)}
        (step,) = steps if len(steps) == 1 else (0.0,)
        distance = "|s-t|" if sign == "≠" else "(s-t)" if sign == ">" else "(t-s)"
        first = weights[0] / step if step else 1.0
        power = "" if step == 1 else f"{step:g}^{distance} " if step else f"w_{distance} "
        own = part.divided or (part.now and part.now == first)
        over = "all s" if own and both else f"s {sign.replace('>', '≥')} t" if own and sign == ">" else f"s {sign} t"
        terms.append(_times(weight * first, f"{'1/T ' if part.divided else ''}Σ_({over}) {power}{estimate}"))
    if part.now and not (terms and any(mark in terms[0] for mark in ("≥", "all s"))):
        terms.append(_times(part.now, estimate.replace("_s", "_t")))
    return terms


def _slope(name: str) -> str:
    if name in ("k2", "k3"):
        return f"{name}(l)"
    if name in ESTIMATES:
        return "f(u)/u"
    return named(name).formula


def _times(weight: float, text: str) -> str:
    if abs(weight - 1) < 1e-6:
        return text
    if abs(weight + 1) < 1e-6:
        return f"-({text})" if " " in text else f"-{text}"
    return f"{weight:.4g} ({text})" if " " in text else f"{weight:.4g} {text}"


def remarks(a: Anatomy) -> list[tuple[str, str]]:
    """What is neither the KL nor its form: constants, an entropy bonus, misplaced inputs, leaks.

    Returns:
        For each a note, for a table, and a sentence; either may be empty.
    """
    pairs = []
    if a.matters and a.proved_fresh and not a.proved:
        pairs.append(("", _cause(a)))
    if not a.proved_fresh:  # what was read of the rest is not what the loss does
        pass
    elif a.constant and a.power and not a.is_nothing:
        does = "flattens" if a.constant > 0 else "sharpens"
        pairs.append(
            ("", f"a constant of {a.constant:g} x its probability on each token's score, which {does} the policy")
        )
    elif a.constant and not a.is_nothing:
        fresh = "a pull on lengths" if a.looks_at_length else "nothing"
        sentence = f"a constant of {a.constant:g} on every score: {fresh} on fresh samples, {_constant_drift(a)}"
        pairs.append((f"constant {a.constant:g}", sentence))
    if a.baseline.name == "token-mean":
        pairs.append(("centred token by token", ""))
    if any(a.entropy) and a.proved_fresh:
        bonus = sum(a.entropy)
        kind = "bonus" if bonus > 0 else "penalty"
        whole = " over whole completions" if a.entropy_of_whole else ""
        pairs.append((f"entropy {kind} {abs(bonus):g}", f"an entropy {kind} of {abs(bonus):g}{whole}"))
    if a.late:
        pairs.append(("ref one token off", ""))
    if not a.ends and a.proved_fresh:
        pairs.append(("no gradient at the end token", "the last token of a completion has no gradient"))
    if not a.cut_off:
        pairs.append(("", "completions that fill the batch's width, as those that were cut off, have no gradient"))
    if a.top_k is not None:
        pairs.append((f"{a.top_k} entries of the vocabulary only", ""))
    if a.leaks:
        pairs.append(("touches padding", "masked positions have a gradient"))
    return pairs


def _constant_drift(a: Anatomy) -> str:
    weighed = a.samples.weight in ("token", "prefix", "sequence") and a.samples.constant
    return "and on stale ones, by its ratio" if weighed else "a drift on stale ones"


def proof(a: Anatomy) -> str:
    """Whether the formula is the loss."""
    if a.proved:
        largest = max(a.unexplained.values())
        summed = f", and summed over every outcome of {a.problems} small problems" if a.problems else ""
        tokens = ", at the tokens that are not masked" if a.leaks else ""
        return (
            f"these parts give its gradient: at random inputs{summed}, fresh and stale{tokens}; "
            f"largest difference {largest:.0e}"
        )
    name, worst = next((name, gap) for name, gap in a.unexplained.items() if not gap <= a.allowed)
    if a.proved_fresh:
        return f"on fresh samples; on stale ones {_unexplained(a, stale=True)}"
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
