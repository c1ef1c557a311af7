"""The parts of a loss in words: five lines and a formula, the cells of a table, and what was expected of a part."""

import math
from dataclasses import dataclass

from ..core.divergences import huber
from ..errors import MeaningError, UnknownNameError
from .anatomy import VOCABULARY
from .parts import Anatomy, Bound, Unit
from .probes import divergence_of

TITLES = {
    "reverse-kl": "reverse KL, KL(π‖ref)",
    "forward-kl": "forward KL, KL(ref‖π)",
    "chi-square": "half of χ²(π‖ref)",
    "hellinger": "squared Hellinger distance",
    "total-variation": "twice the total variation distance",
    "jensen-shannon": "Jensen-Shannon divergence",
    "alpha": "α-divergence",
}

BRIEF = {
    "reverse-kl": "reverse KL",
    "forward-kl": "forward KL",
    "chi-square": "χ²",
    "hellinger": "Hellinger",
    "total-variation": "total variation",
    "jensen-shannon": "Jensen-Shannon",
    "alpha": "α-divergence",
}


def report(a: Anatomy) -> list[tuple[str, str]]:
    """The report of one loss: a label and a sentence for each part."""
    if not a.deterministic:
        return [("divergence", "none can be told: the same batch gives different gradients")]
    if not a.finite:
        return [("divergence", "none can be told: the gradient is NaN or infinite at usual inputs")]
    rows = [
        ("divergence", divergence(a)),
        ("looks ahead", horizon(a)),
        ("samples", samples(a)),
        ("unit", unit(a.unit)),
        ("baseline", baseline(a)),
        ("scale", scale(a)),
        ("coefficient", formula(a)),
    ]
    rows += [("beside it", text) for text in remarks(a)]
    return [*rows, ("proved", proof(a))]


def summary(a: Anatomy, *, on_policy: bool = True) -> str:
    """What a loss descends, as one noun phrase: with samples from π, or from another policy."""
    if not a.deterministic:
        return "none can be told: the same batch gives different gradients"
    if not a.finite:
        return "none can be told: its gradient is NaN or infinite at usual inputs"
    if not on_policy:
        return _stale(a)
    text = divergence(a, brief=True)
    if a.is_nothing or text.startswith("none"):
        return text
    h = a.horizon
    if a.level == "token":
        ahead = {"none": "token by token", "all": "whole completions", "discount": f"{h.discount or 0:g} a token ahead"}
        text += f", {ahead.get(h.kind, 'with a future of its own')}"
    text += {"completion-mean": ", mean per completion", "token-mean": ", mean over tokens"}.get(a.unit.name, "")
    text += ", divided by its spread" if a.baseline.spread != "none" else ""
    return text if a.proved_fresh else f"{text} ({min(a.largest_gap(stale=False), 1):.0%} not explained)"


def _stale(a: Anatomy) -> str:
    """On samples of another policy μ."""
    ratio, bound = a.samples.ratio, a.samples.bound
    if a.is_nothing or a.anchor == "sampler":
        if a.is_nothing and (not a.constant or ratio in ("token", "prefix", "sequence")):
            return "nothing"
        if a.is_nothing:
            away = "climbs KL(μ‖π), away from" if a.constant > 0 else "descends KL(μ‖π), to"
            return f"{away} what was sampled"
        return "a divergence to the sampler"
    if a.largest_gap(stale=True) > a.allowed:
        return f"not proved: {min(a.largest_gap(stale=True), 1):.0%} of the coefficient is not explained"
    biased = f"{_bound(bound)}" if bound else ""
    frozen = ", with log π/ref of the sampler" if a.samples.frozen else ""
    if ratio in ("prefix", "sequence"):
        return f"the same{biased}{frozen}"
    if ratio == "token":
        future = "" if a.horizon.kind == "none" else ", the future that of the sampler"
        return f"the same on the sampler's prefixes{biased}{frozen}{future}"
    if ratio == "mean":
        return f"not corrected: a geometric mean of ratios{biased}{frozen}"
    return f"{_uncorrected(a)}{frozen}"


FREE = "h(l), h' = c,"
"""The function whose mean a coefficient c without a name descends."""


def _uncorrected(a: Anatomy) -> str:
    """Without a ratio: a coefficient c(l) descends the mean of h(l) under the sampler, h' = c."""
    drifts = []
    if a.constant:
        drifts.append(f"{'climbs' if a.constant > 0 else 'descends'} KL(μ‖π)")
    if a.baseline.name != "none":
        drifts.append("drifts by its baseline")
    if a.own.is_zero and not a.credits:
        text = "the same on the sampler's prefixes"
    elif a.level == "completion" or (a.has_past and a.horizon.kind == "all" and a.own.shares == {"reverse-kl": 1.0}):
        text = "the mean of L²/2 under the sampler" if set(a.shares) == {"reverse-kl"} else "the mean of h(L), h' = c"
        text += ", L = log π/ref of the completion"
    elif a.horizon.kind == "none" and not a.has_past:
        known = {"reverse-kl": "l²/2", "forward-kl": "k3"}
        own = known.get(next(iter(a.shares)), "") if len(a.shares) == 1 else ""
        text = f"the mean of {own or FREE} under the sampler"
    else:
        text = "not corrected: later tokens are those of the sampler"
    return "; ".join([text, *drifts])


def cells(a: Anatomy) -> tuple[str, str, str, str, str]:
    """A row of a table: divergence, looks ahead, samples, unit, scale."""
    if not (a.deterministic and a.finite):
        return ("not told", "", "", "", "")
    ratio = {"none": "fresh", "other": "other"}.get(a.samples.ratio, f"{a.samples.ratio} ratio")
    factor = "spread" if a.baseline.spread != "none" else f"{a.scale:.3g}" if math.isfinite(a.scale) else "jump"
    horizon_ = a.horizon
    ahead = {"none": "no", "all": "all", "discount": f"{horizon_.discount or 0:g} a token"}.get(
        horizon_.kind, horizon_.kind
    )
    units = {"sum": "sum", "completion-mean": "mean per completion", "token-mean": "mean over tokens"}
    return (
        divergence(a, brief=True),
        "" if a.is_nothing else ahead,
        "" if a.is_nothing else ratio + _bound(a.samples.bound),
        units.get(a.unit.name, a.unit.name),
        "" if a.is_nothing else factor,
    )


def divergence(a: Anatomy, *, brief: bool = False) -> str:
    """The divergence that the coefficient of a token's own log-ratio descends."""
    if a.is_nothing:
        return _nothing(a)
    if not a.proved_fresh and not a.shares:
        return "none that the probes can name"
    shares = a.shares
    if "other" in shares or not shares:
        own = "" if brief else ", of which the coefficient below is the slope"
        text = f"one of its own{own}{'' if a.own.convex else ' (not convex)'}"
    else:
        text = _sum(shares, BRIEF if brief else TITLES)
    if a.level == "completion":
        text += ", between completions"
    if a.top_k is not None:
        text += f", {a.top_k} of {VOCABULARY} entries"
    if a.anchor == "sampler":
        text = text.replace("ref", "μ") + " to the sampler: the old log-probs are in the place of ref"
    if a.baseline.spread != "none":
        text += ", divided by its own spread" if not brief else ""
    return text + _edges(a, brief)


def _nothing(a: Anatomy) -> str:
    if not a.constant and not any(a.entropy):
        return "nothing: no gradient depends on ref"
    if a.constant and a.unit.name == "completion-mean":
        return "nothing: ref has no effect; it lowers E[1/length], which asks for longer completions"
    return "nothing: ref has no effect"


def _sum(shares: dict[str, float], titles: dict[str, str]) -> str:
    signs = {name: math.copysign(1.0, w) for name, w in shares.items()}
    if len(shares) == 1:
        ((name, weight),) = shares.items()
        return f"climbs the {_title(name, titles)}: the sign is wrong" if weight < 0 else _title(name, titles)
    largest = max(abs(w) for w in shares.values())
    texts = []
    for name, weight in sorted(shares.items(), key=lambda pair: -pair[1]):
        factor = "" if abs(abs(weight) - largest) <= 1e-9 * largest else f"{abs(weight) / largest:.3g} x "
        word = ("minus " if signs[name] < 0 else "plus ") if texts else ("minus " if signs[name] < 0 else "")
        texts.append(f"{word}{factor}{_title(name, titles)}")
    return " ".join(texts)


def _title(name: str, titles: dict[str, str]) -> str:
    kind, _, order = name.rstrip(")").partition("(")
    return titles[kind] + (f" ({'α' if kind == 'alpha' else 'β'} = {order})" if order else "")


def _edges(a: Anatomy, brief: bool) -> str:
    texts = []
    for edge, pull, word, sign in ((a.own.low, a.own.below, "below", ">"), (a.own.high, a.own.above, "above", "<")):
        if edge is None:
            continue
        level = "no pull" if pull == 0 else f"a constant pull of {pull:.3g}"
        texts.append(f"l {sign} {edge:.3g}" if brief else f"{word} log π/ref = {edge:.4g} {level}")
    if not texts:
        return ""
    return f" where {' and '.join(texts)}" if brief else f"; {', '.join(texts)}"


def horizon(a: Anatomy) -> str:
    """What of later tokens is in the coefficient of a token."""
    if a.is_nothing:
        return "no"
    h = a.horizon
    if a.level == "completion":
        return "to the end: one divergence between whole completions"
    past = "; earlier tokens are in it too, which only adds noise on fresh samples" if a.has_past else ""
    if h.kind == "none":
        return f"no: each token's effect on later tokens is left out{past}"
    by = {"exact": "by their exact divergences", "other": "by an estimate of its own"}.get(
        h.estimate, f"by {h.estimate}"
    )
    if h.kind == "all":
        return f"to the end of the completion, {by}{past}"
    if h.kind == "discount":
        return f"discounted by {h.discount:g} a token, {by}{past}"
    return f"with weights {', '.join(f'{w:.3g}' for w in h.weights)} by distance, {by}{past}"


def samples(a: Anatomy) -> str:
    """Which samples the loss is right for, and what it descends on others."""
    s = a.samples
    if a.is_nothing and not a.constant:
        return "any: there is nothing to weigh"
    if s.ratio == "other":
        return "fresh ones only: how it depends on π/μ is none of token, prefix, sequence and mean ratio"
    frozen = "; log π/ref is frozen at the sampler, a stale target" if s.frozen else ""
    if s.ratio == "none":
        return f"fresh ones only: no importance ratio; on stale ones {_stale(a)}"
    exactly = {
        "token": "stale ones on the sampler's prefixes: the ratio of the token itself",
        "prefix": "stale ones too: the ratio of the tokens so far",
        "sequence": "stale ones too: the ratio of the whole completion",
        "mean": "fresh ones only: the geometric mean of the ratios is no importance weight",
    }[s.ratio]
    bound = f"{_bound(s.bound)}, which adds bias" if s.bound else ""
    return f"{exactly}{bound}{frozen}"


BOUNDS = {"truncate": "truncated", "clip": "clipped", "mask": "masked", "ppo": "clipped as in PPO"}


def _bound(bound: Bound | None) -> str:
    if bound is None:
        return ""
    word = BOUNDS.get(bound.kind, "bounded")
    ends = [f"{x:.4g}" for x in (bound.low, bound.high) if x is not None]
    return f", {word} at {' and '.join(ends)}"


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
        "group-mean": "the mean of the group, itself included: 1 - 1/n of the scale is left",
        "batch-mean": "the mean of the batch, itself included",
        "batch-leave-one-out": "the mean of the other completions of the batch",
        "return-mean": "the mean over all tokens of the batch",
        "token-mean": "the mean over the batch's tokens before they are summed: it pays for length",
    }.get(a.baseline.name, "completions influence each other in a way that no known baseline does")
    return text if a.baseline.spread == "none" else f"{text}; divided by the spread of the {a.baseline.spread}"


def scale(a: Anatomy) -> str:
    """The factor on β near ref."""
    if a.is_nothing:
        return "0: β has no effect"
    if a.baseline.spread != "none":
        return "depends on the spread: β has no fixed meaning"
    return f"{a.scale:.4g} x β near ref" if math.isfinite(a.scale) else "jumps at ref: as strong beside it as far away"


SYMBOLS = {"token": "r_t", "prefix": "w_t", "sequence": "w_T", "mean": "w_T^(1/T)"}


def formula(a: Anatomy) -> str:
    """The coefficient of token t's score, with l_t = log π/ref."""
    terms = []
    argument = "L" if a.level == "completion" else "l_t"
    for name, weight in a.own.shares.items():
        terms.append(_times(weight, _slope(name).replace("l", argument)))
    if not a.own.shares and not a.own.is_zero:
        terms.append("c(l_t)")
    for name, weight in zip(("KL(π‖ref)_t", "KL(ref‖π)_t"), a.exact, strict=True):
        if weight:
            terms.append(_times(weight, f"∇{name}"))
    if a.full is not None:
        terms.append("∇D_t over the vocabulary")
    part = a.future
    if part is not None and a.level == "token":
        h = a.horizon
        estimate = {"k1": "l_s", "k2": "k2(l_s)", "k3": "k3(l_s)", "exact": "D_s"}.get(h.estimate, "e(l_s)")
        power = f"{h.discount:g}^(s-t) " if h.kind == "discount" else "" if h.kind == "all" else "w_(s-t) "
        later = "all s ≠ t" if a.has_past else "s > t"
        factor = next(iter(a.shares.values()), 1.0) if len(a.shares) == 1 else 1.0
        terms.append(_times(factor, f"Σ_({later}) {power}{estimate}"))
    text = " + ".join(terms) or "0"
    if a.samples.ratio in SYMBOLS:
        bounded = SYMBOLS[a.samples.ratio] if a.samples.bound is None else f"bound({SYMBOLS[a.samples.ratio]})"
        text = f"{bounded} ({text})" if len(terms) > 1 or a.own.shares else f"{bounded} {text}"
    if a.baseline.name not in ("none", "other"):
        text += " - baseline"
    if a.constant:
        text = _times(a.constant, "1") if text == "0" else f"{text} + {a.constant:g}"
    if a.level == "completion":
        text += ", L = Σ l_s"
    ends = [f"l_t {sign} {edge:.4g}" for edge, sign in ((a.own.low, ">"), (a.own.high, "<")) if edge is not None]
    return f"{text} where {' and '.join(ends)}" if ends else text


def _slope(name: str) -> str:
    if name in ("k2", "k3"):
        return f"{name}(l)"
    return divergence_of(name).formula


def _times(weight: float, text: str) -> str:
    if weight == 1:
        return text
    return f"{weight:.4g} ({text})" if " " in text else f"{weight:.4g} {text}"


def remarks(a: Anatomy) -> list[str]:
    """What is neither the KL nor its form: constants, an entropy bonus, misplaced inputs, leaks."""
    texts = []
    if a.constant and not a.is_nothing:
        texts.append(f"a constant of {a.constant:g} on every score: nothing on fresh samples, a drift on stale ones")
    if any(a.entropy):
        bonus = sum(a.entropy)
        texts.append(f"an entropy {'bonus' if bonus > 0 else 'penalty'} of {abs(bonus):g}")
    if a.late:
        texts.append(f"the reference is one token {'late' if a.late > 0 else 'early'}: shift its log-probs")
    if not a.ends:
        texts.append("the last token of a completion has no gradient")
    if not a.cut_off:
        texts.append("completions that fill the batch's width, as those that were cut off, have no gradient")
    if a.top_k is not None:
        texts.append(f"of {VOCABULARY} entries of the vocabulary it sees {a.top_k}: a top-k, whose tail is left out")
    if a.leaks:
        texts.append("masked positions have a gradient: multiply by the mask before summing")
    return texts


def proof(a: Anatomy) -> str:
    """Whether the formula is the loss."""
    if a.proved:
        largest = max(a.unexplained.values())
        return f"at {len(a.unexplained)} sets of inputs, fresh and stale; largest difference {largest:.0e}"
    name, worst = max(a.unexplained.items(), key=lambda pair: pair[1])
    if a.proved_fresh:
        return f"on fresh samples; on stale ones {min(worst, 1):.0%} of the coefficient is not explained"
    return f"no: at {name}, {min(worst, 1):.0%} of the coefficient is not explained by these parts"


# Expectations of parts.

PARTS = ("divergence", "horizon", "samples", "unit", "baseline")


@dataclass(frozen=True)
class PartDifference:
    """One part that is not as expected."""

    part: str
    expected: str
    received: str

    def __str__(self) -> str:
        return f"expected {self.part}={self.expected}, found {self.part}={self.received}"


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
    if a.own.low is not None or a.own.high is not None:
        low, high = a.own.low, a.own.high
        is_huber = low is not None and high is not None and low == -high and name == "reverse-kl" and a.own.below != 0
        name = huber(high).name if is_huber and high else f"bounded {name}"
    name = f"{name} to the sampler" if a.anchor == "sampler" else name
    name = f"{name}, shifted" if a.late else name
    h, bound = a.horizon, a.samples.bound
    return {
        "divergence": name,
        "horizon": f"{h.discount:g}" if h.kind == "discount" and h.discount is not None else h.kind,
        "samples": a.samples.ratio + ("" if bound is None else f" {bound.kind}"),
        "unit": a.unit.name,
        "baseline": a.baseline.name + ("" if a.baseline.spread == "none" else f" / {a.baseline.spread} spread"),
    }


def part_differences(a: Anatomy, wanted: dict[str, str]) -> list[PartDifference]:
    """The parts that are not as expected; a loss whose formula is not proved meets no expectation."""
    values = part_values(a)
    if not a.proved_fresh:
        return [PartDifference(name, value, "not proved") for name, value in wanted.items()]
    return [PartDifference(name, value, values[name]) for name, value in wanted.items() if values[name] != value]
