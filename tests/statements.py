"""What the words of a report claim, as gradients: each is computed from the words alone, by sums over all completions.

No part of a loss is used, and no code of the audit: a problem has the log-probs of every completion under π, ref and
the sampler, and an objective that a sentence names is differentiated by autograd.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property

import torch

LOG2 = math.log(2)

SLOPES = {
    "reverse KL": lambda l: l,
    "forward KL": lambda l: 1 - torch.exp(-l),
    "χ² divergence": lambda l: torch.exp(l) - 1,
    "Hellinger distance": lambda l: 2 * (1 - torch.exp(-l / 2)),
    "total variation": lambda l: torch.sign(l),
}
"""f'(u) at u = exp(l), by the words of a report."""


def slope_of(title):
    """The slope of a divergence by its words."""
    title = title.split(", KL(")[0].strip()
    if title in SLOPES:
        return SLOPES[title]
    kind, _, number = title.partition(" (")
    order = float(number.split("= ")[1].rstrip(")")) if number else 0.5
    if kind == "α-divergence":
        return lambda l: (1 - torch.exp(-(1 - order) * l)) / (1 - order)
    assert kind == "Jensen-Shannon divergence", title
    # β KL(ref‖m) + (1 - β) KL(π‖m), m = β ref + (1 - β) π: f'(u) = (1 - β) log(u / (β + (1 - β) u)).
    return lambda l: (1 - order) * (l - torch.logaddexp(torch.full_like(l, math.log(order)), math.log1p(-order) + l))


NUMERICAL = "float32|is empty|masked positions inside|values at masked|log μ/ref"
"""Findings that say nothing of the gradient of live tokens in float64."""


@dataclass(frozen=True)
class Claim:
    """A gradient, what it may be a multiple of, and whether a drift is said to be added."""

    gradient: torch.Tensor
    drifts: bool = False
    free: bool = False


class Report:
    """The rows of a report, taken at their words."""

    def __init__(self, rows, columns=0):
        self.columns = columns
        self.rows = {label: text for label, text in rows if label != "also"}
        self.beside = [text for label, text in rows if label == "also" and not re.search(NUMERICAL, text)]

    @property
    def is_quiet(self):
        """Whether nothing is said beside the parts but a constant."""
        others = re.search("probability|temperature", self.rows["divergence"])
        return not others and all(text.startswith("a constant of") for text in self.beside)

    @property
    def constant(self):
        found = [re.match(r"a constant of (\S+)", text) for text in self.beside]
        return next((float(m[1]) for m in found if m), 0.0)

    @cached_property
    def own(self):
        """The slope that the divergence line names, up to a positive factor; None if it names none."""
        text = re.sub(r"; it pushes.*|, of (each|whole) .*", "", self.rows["divergence"])
        text = re.split(r" where |, constant ", text)[0]
        if text.startswith(("none", "a divergence of its own", "nothing", "not known")):
            return None
        sign = 1.0
        if text.startswith("climbs the "):
            sign, text = -1.0, text.removeprefix("climbs the ").removesuffix("; the sign is wrong")
        slopes = []
        for word in re.split(r" (?=plus |minus )", text):
            factor = -1.0 if word.startswith("minus ") else 1.0
            word = re.sub(r"^(plus|minus) ", "", word)
            times = re.match(r"(\S+) x ", word)
            if times:
                factor, word = factor * float(times[1]), word[times.end() :]
            slopes.append((sign * factor, slope_of(word)))
        total = lambda l: sum(factor * slope(l) for factor, slope in slopes)
        found = re.search(
            r"where (?:(\S+) < (?:l_t|L) < (\S+)|(?:l_t|L) ([<>]) (\S+)), else (.*?)(?=[),]|$)",
            self.rows["coefficient"],
        )
        if found:
            low, high, sign, edge, beyond = found.groups()
            low, high = (edge, None) if sign == ">" else (None, edge) if sign == "<" else (low, high)
            pulls = beyond.split(" and ")
            for side, at, pull in (("below", low, pulls[0]), ("above", high, pulls[-1])):
                total = total if at is None else _cut(total, side, float(at), float(pull) / (self.scale or 1.0))
        return total

    @property
    def scale(self):
        """The factor on β near ref, if it is a number."""
        m = re.match(r"(\S+) x the pull", self.rows["scale"])
        return float(m[1]) if m else None

    def weigh(self, world, size):
        """(N,) what the unit multiplies the tokens of each completion by, in a batch of `size` rows."""
        text = self.rows["unit"]
        rows = 1.0 if "averaged over completions" in text or "all tokens" in text else float(size)
        if text.startswith("mean over each"):
            return rows / world.lengths
        if text.startswith("mean over all"):
            return torch.full_like(world.lengths, 1.0 / float(world.sampler @ world.lengths))
        return torch.full_like(world.lengths, rows / (world.mask.shape[1] if "padded" in text else 1.0))


def _cut(curve, side, edge, pull):
    is_beyond = (lambda l: l < edge) if side == "below" else (lambda l: l > edge)
    return lambda l: torch.where(is_beyond(l), torch.full_like(l, pull), curve(l))


class World:
    """The policies of a problem at every completion, with gradients towards π."""

    def __init__(self, problem):
        self.problem, self.mask = problem, problem.space.mask
        self.parameters = problem.logits.detach().clone().requires_grad_()
        live = problem.with_logits(self.parameters)
        self.logp = live.log_probs(self.parameters)
        self.l = torch.where(self.mask, self.logp - problem.ref_logp, 0.0)
        self.log_weight = torch.where(self.mask, self.logp - problem.behavior_logp, 0.0).detach()
        self.sampler = problem.behavior_logp.sum(-1).exp()
        self.policy = self.logp.sum(-1).exp()
        self.ref = problem.ref_logp.sum(-1).exp()
        self.lengths = self.mask.sum(-1).double()
        # of every prefix: log π/ref of each next token
        tables = [torch.log_softmax(x, -1) for x in (self.parameters, problem.ref_logits)]
        self.next, self.next_ratio = tables[0], tables[0] - tables[1]

    def by(self, value):
        """The gradient of a number, with 0 on the padding."""
        (found,) = torch.autograd.grad(value, self.parameters, retain_graph=True)
        return torch.cat([found.flatten(), found.new_zeros(self.mask.shape[1])])

    def on_scores(self, probability, coefficients):
        """E[Σ_t c_t ∇log π_t]."""
        return self.by((probability.detach()[:, None] * coefficients.detach() * self.logp * self.mask).sum())

    def at_prefixes(self, probability, per_prefix):
        """E[Σ_t x at the prefix before token t], the visits held fixed."""
        visits = probability.detach()[:, None] * self.mask
        return (visits * per_prefix[self.problem.space.prefix]).sum()


def excess_of(slope):
    """Of every prefix, the mean of a function whose derivative along π is that of the divergence: Σ_v π_v c(l_v)."""
    return lambda w: (w.next.exp() * slope(w.next_ratio).detach()).sum(-1)


def kl_at(w, forward=False):
    """(N, T) KL(π‖ref), or KL(ref‖π), of the next token at each token's prefix."""
    ref = (w.next - w.next_ratio).exp()
    each = (ref * -w.next_ratio if forward else w.next.exp() * w.next_ratio).sum(-1)
    return torch.where(w.mask, each[w.problem.space.prefix], 0.0)


def future_of(report, w):
    """(N, T) the later tokens' estimates, or None if there are none or the words do not say what they add up to."""
    text = report.rows["looks ahead"]
    if text.startswith("no"):
        return torch.zeros_like(w.l)
    discount = re.match(r"discounted by (\S+) a token", text)
    by = re.search(r"by (k1|k2|k3|their exact divergences)(?=,|;|$)", text)
    if not by or "no estimate" in text or not (discount or text.startswith("to the end of the completion, by")):
        return None
    l, live = w.l.detach(), w.mask
    exact = kl_at(w, forward="forward" in report.rows["divergence"]).detach()
    each = {"k1": l, "k2": l**2 / 2, "k3": torch.exp(-l) - 1 + l}.get(by[1], exact)
    each = torch.where(live, each, 0.0)
    factor, found = float(discount[1]) if discount else 1.0, [torch.zeros_like(each[:, 0])]
    for column in reversed(each.unbind(1)[1:]):
        found.append(factor * (column + found[-1]))
    return torch.stack(found[::-1], 1)


def fresh_claim(report, w, size, *, probability=None, weights=None, prefixes=None):
    """The gradient that the parts name with samples from π; None if they name none.

    Args:
        report: the words.
        w: the problem.
        size: rows of the batch.
        probability: (N,) of the completions; by default under π.
        weights: (N, T) of the tokens.
        prefixes: whether the exact divergence at the prefixes of `probability` is claimed.
    """
    p = w.policy.detach() if probability is None else probability
    if "scale" not in report.rows:  # it is not proved
        return None
    if report.rows["divergence"].startswith("nothing: "):
        if "E[1/length]" in report.rows["divergence"]:
            sign = 1.0 if "lowers" in report.rows["divergence"] else -1.0
            return Claim(sign * w.by((w.policy / w.lengths).sum()), free=True)
        return Claim(torch.zeros(w.parameters.numel() + w.mask.shape[1], dtype=torch.float64))
    if "none that is fixed" in report.rows["scale"] or "before they are summed" in report.rows["baseline"]:
        return None
    if report.own is None or not report.is_quiet:
        return None
    unit = report.weigh(w, size)
    if "function of the whole completion" in report.rows["looks ahead"]:
        whole = w.l.sum(-1, keepdim=True)
        whole = whole / w.lengths[:, None] if "mean log π/ref" in report.rows["divergence"] else whole
        c = report.own(whole).expand_as(w.l)
        gradient = w.on_scores(p * unit, c)
    else:
        future = future_of(report, w)
        if future is None:
            return None
        is_exact, even = "∇" in report.rows["coefficient"], len(set(unit.tolist())) == 1
        scale = report.scale if report.scale else 1.0
        near = _slope_at_zero(report.own)
        factor = abs(scale / near) if near and report.scale else 1.0
        weigh = weights if weights is not None else torch.ones_like(w.l)
        if even and weights is None:  # the objective itself
            per_prefix = excess_of(report.own)(w)
            own = w.by(w.at_prefixes(p * unit, per_prefix))
        elif is_exact:
            each = excess_of(report.own)(w)[w.problem.space.prefix]
            own = w.by(((p * unit)[:, None] * weigh * w.mask * each).sum())
        else:
            own = w.on_scores(p * unit, weigh * report.own(w.l))
        strength = -abs(scale) if "climbs" in report.rows["divergence"] else abs(scale)  # that of the own part
        gradient = own * factor + w.on_scores(p * unit, weigh * future) * strength
        return _centred(report, Claim(gradient, free=not (near and report.scale)), w, size)
    near = _slope_at_zero(report.own)
    free = not (near and report.scale)
    return _centred(report, Claim(gradient * (1.0 if free else abs(report.scale / near)), free=free), w, size)


def _centred(report, claim, w, size):
    """What is left of the scale where the mean of a group includes the completion."""
    text = report.rows["baseline"]
    if "the completion included" not in text:
        return claim
    if "detached credit alone" in text:
        return None
    return Claim(claim.gradient, claim.drifts, free=True)


def _slope_at_zero(own):
    up, down = (float(own(torch.tensor([x], dtype=torch.float64))) for x in (1e-5, -1e-5))
    return 0.0 if abs(up - down) > 1e-3 else (up - down) / 2e-5


MEANS = {
    "l²/2": lambda w: (w.l**2 / 2 * w.mask).sum(-1),
    "|l|": lambda w: (w.l.abs() * w.mask).sum(-1),
    "k3": lambda w: ((torch.exp(-w.l) - 1 + w.l) * w.mask).sum(-1),
    "L²/2": lambda w: w.l.sum(-1) ** 2 / 2,
    "k3(L)": lambda w: torch.exp(-w.l.sum(-1)) - 1 + w.l.sum(-1),
}
"""The functions whose means under the sampler a report names."""


def stale_claim(report, text, w, size):
    """The gradient that a sentence about samples of another policy names; None if it names none."""
    if "adds bias" in text or "log μ/ref in the place" in text or not report.is_quiet:
        return None
    if text == "KL(π‖ref) minus KL(π‖μ)":
        return Claim(w.by((w.policy * (w.sampler.log() - w.ref.log())).sum()), free=True)
    if text == "KL(π‖ref) minus KL(π‖μ) on the sampler's prefixes":
        away = torch.log_softmax(w.problem.behavior_logits, -1) - (w.next - w.next_ratio).detach()
        return Claim(w.by(w.at_prefixes(w.sampler, (w.next.exp() * away).sum(-1))), free=True)
    main, *rest = text.split("; ")
    drifts = any("adds a drift" in x for x in rest)
    unit = report.weigh(w, size)
    zero = torch.zeros(w.parameters.numel() + w.mask.shape[1], dtype=torch.float64)
    up = w.on_scores(w.sampler * unit, torch.ones_like(w.l))
    if main == "nothing":
        return Claim(zero)
    if main.endswith(("climbs KL(μ‖π)", "descends KL(μ‖π)")):
        away = w.by(-(w.sampler * (w.sampler.log() - w.logp.sum(-1))).sum())
        return Claim(away if "climbs" in main else -away, free=True)
    mean = re.match(r"(climbs )?the mean of (.*?),? under the sampler", main)
    if mean:
        if mean[2] in MEANS and "mean log π/ref" not in main:
            claim = Claim(
                w.by((w.sampler * unit * MEANS[mean[2]](w)).sum()) * (-1 if mean[1] else 1) * abs(report.scale or 1.0),
                free=report.scale is None,
            )
        elif report.own is None:
            return None
        else:
            whole = w.l.sum(-1, keepdim=True).expand_as(w.l)
            whole = whole / w.lengths[:, None] if "mean log π/ref" in main else whole
            at = whole if "h(L)" in mean[2] else w.l
            near = _slope_at_zero(report.own)
            gradient = w.on_scores(w.sampler * unit, report.own(at))
            claim = Claim(
                gradient * (report.scale / near if near and report.scale else 1.0), free=not (near and report.scale)
            )
    elif main == "the same on the sampler's prefixes":
        weights = None if report.rows["samples"].startswith("no ratio") else w.log_weight.exp()
        claim = fresh_claim(report, w, size, probability=w.sampler, weights=weights)
    elif main == "the same":
        claim = fresh_claim(report, w, size)
        if "π/μ of the tokens so far" in report.rows["samples"] and any("those of the sampler" in x for x in rest):
            claim = fresh_claim(report, w, size, probability=w.sampler, weights=w.log_weight.cumsum(-1).exp())
    else:
        return None
    if claim is None:
        return None
    gradient = claim.gradient
    if any(x.startswith(("climbs KL(μ‖π)", "descends KL(μ‖π)")) for x in rest):
        gradient = gradient + report.constant * up
    return Claim(gradient, drifts, claim.free)


def contradiction(report, claim, measured, typical, rounding=1e-6):
    """How far a measured gradient is from a claim, as text; None if it is what the claim says.

    Numbers in words have four digits: a scale is compared up to that, and so are edges.
    """
    if claim is None:
        return None
    a, b = measured, claim.gradient
    if any("masked positions have a gradient" in text for text in report.beside):
        a, b = a[: -report.columns], b[: -report.columns]
    if float(b.norm()) > rounding * typical and not claim.drifts:
        factor = float(a @ b / b.square().sum())
        if factor <= 0 and float(a.norm()) > 10 * rounding * typical:
            return "the other direction"
        if not claim.free and abs(factor - 1) > SHORT:
            return f"{factor:.4g} times as large"
        b = b * factor
    off = float((a - b).norm()) / max(float(a.norm()), float(b.norm()), rounding * typical, 1e-300)
    if claim.drifts:
        return "no drift" if off < rounding else None
    allowed = SHORT if re.search(r" where |constant | x ", report.rows["divergence"]) else 10 * rounding
    return f"{off:.2g} off" if off > allowed else None


SHORT = 2e-3
"""Relative difference of two numbers that read the same."""
