"""Take a loss apart: divergence, horizon, samples, unit and baseline, each read by a probe of its own.

The parts are a formula for the coefficient of every token. What the formula predicts is compared with the loss at
random inputs, token by token, so that a part that was misread, or that no probe looks for, shows as a difference.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from .gradients import evaluate
from .probes import (
    DEPTH,
    EXACT,
    GRID,
    GROUP,
    HIGHEST_TWIN,
    ODDS,
    ROWS,
    SINGLE,
    TOKENS,
    WIDTH,
    Curve,
    Derivatives,
    ProbeInputs,
    Read,
    divergence_of,
    function_of,
    read_curve,
    reader_of,
    round_short,
)
from .subject import Subject

PLACE = (0, 4)
"""The token whose log-ratio is moved: it has four tokens before it, four after it, and other rows."""

STEP = 0.75
"""A log-ratio at which the known functions differ, and a log importance ratio that no usual bound cuts off."""

# The parts.


@dataclass(frozen=True)
class Unit:
    """What a loss divides by.

    Attributes:
        name: `sum` over the completion, `completion-mean`, `token-mean` over the batch, `fixed-length` (by the width
            of the batch), or `other`.
        rows: whether it is a mean over the completions of the batch, and no sum.
    """

    name: str
    rows: bool = True

    def shares(self, inputs: ProbeInputs) -> Tensor:
        """(B, 1) what each completion's coefficients are multiplied by."""
        lengths = inputs.mask.sum(-1, keepdim=True).double()
        rows = len(lengths) if self.rows else 1
        if self.name == "completion-mean":
            return 1 / (rows * lengths)
        if self.name == "token-mean":
            return torch.ones_like(lengths) / lengths.sum()
        if self.name == "fixed-length":
            return torch.ones_like(lengths) / (rows * inputs.mask.shape[1])
        return torch.ones_like(lengths) / rows


UNITS = tuple(Unit(name, rows) for name in ("sum", "completion-mean", "fixed-length") for rows in (True, False))
UNITS += (Unit("token-mean"),)


@dataclass(frozen=True)
class Bound:
    """A bound on a ratio: `truncate` from above, `clip` on both sides, or `mask`, which is 0 outside."""

    kind: str
    low: float | None
    high: float | None

    def __call__(self, ratio: Tensor) -> Tensor:
        """The ratio within its bound."""
        if self.kind == "mask":
            low, high = self.low or 0.0, math.inf if self.high is None else self.high
            return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
        return ratio.clamp(self.low, self.high)


@dataclass(frozen=True)
class Samples:
    """How the ratio π/μ to the sampler enters.

    Attributes:
        ratio: `none`, `token`, `prefix`, `sequence`, `mean` (a geometric mean over the completion) or `other`.
        per_decision: whether the estimate of a later token carries the ratio of that token's own prefix.
        bound: of the ratio, or None.
        before: whether an exact term carries the ratio of the tokens before it only, its own being summed over.
        constant: whether a constant carries the ratio too.
        on_baseline: what carries the ratio where there is a baseline: the `difference` from it, the `credit` of each
            completion, or `both`, the credits and then the mean of the others.
        frozen: whether log π/ref is that of the sampler, which does not move with π.
    """

    ratio: str = "none"
    per_decision: bool = False
    bound: Bound | None = None
    before: bool = False
    constant: bool = True
    on_baseline: str = "difference"
    frozen: bool = False

    def weights(self, inputs: ProbeInputs, *, before: bool = False) -> Tensor:
        """(B, T) the ratio of each token."""
        log_weight = torch.where(inputs.mask, inputs.log_weight, 0.0)
        total = log_weight.sum(-1, keepdim=True).expand_as(log_weight)
        running = log_weight.cumsum(-1)
        logs = {
            "none": torch.zeros_like(log_weight),
            "other": torch.zeros_like(log_weight),
            "token": log_weight,
            "prefix": running - log_weight if before else running,
            "sequence": total,
            "mean": total / inputs.mask.sum(-1, keepdim=True),
        }[self.ratio]
        return logs.exp() if self.bound is None else self.bound(logs.exp())


@dataclass(frozen=True, eq=False)
class Credit:
    """An estimate of each token's divergence, which stands on the scores of other tokens.

    Attributes:
        source: `sampled`, `exact-reverse`, `exact-forward` or `full`.
        curve: the estimate as a function of the log-ratio, for `sampled`; the divergence's slope for `full`.
        now: weight on the token's own score; that of `sampled` is in the own curve.
        later: weights of the tokens after it, by distance.
        earlier: weights of the tokens before it, by distance.
        divided: whether the weights, and the part of the own curve that is this estimate, are divided by the length of
            the completion; they are given for a completion of `TOKENS` tokens.
    """

    source: str
    curve: Curve | None
    now: float
    later: tuple[float, ...]
    earlier: tuple[float, ...]
    divided: bool = False

    def values(self, inputs: ProbeInputs) -> Tensor:
        """(B, T) the estimates, 0 where masked."""
        if self.source == "exact-reverse":
            values = inputs.token_reverse_kl
        elif self.source == "exact-forward":
            values = inputs.token_forward_kl
        elif self.source == "full":
            assert self.curve is not None
            values = tilted_divergence(self.curve, inputs)
        else:
            assert self.curve is not None
            values = self.curve(inputs.log_ratio)
        return torch.where(inputs.mask, values, 0.0)

    def matrix(self, width: int) -> Tensor:
        """(T, T) the weight of the estimate at column s on the score at row t."""
        lag = torch.arange(width)[None, :] - torch.arange(width)[:, None]
        weights = [_weight_at(self.earlier, k) for k in range(width - 1, 0, -1)]
        weights += [self.now, *(_weight_at(self.later, k) for k in range(1, width))]
        return torch.tensor(weights, dtype=torch.float64)[lag + width - 1]


def _weight_at(weights: tuple[float, ...], lag: int) -> float:
    """The weight at a lag; beyond those that were read the last step is repeated."""
    if lag <= len(weights):
        return weights[lag - 1]
    if len(weights) < 2 or weights[-1] == 0:
        return 0.0
    return weights[-1] if weights[-2] == 0 else weights[-1] * (weights[-1] / weights[-2]) ** (lag - len(weights))


@dataclass(frozen=True)
class Baseline:
    """What is subtracted from the credit of a token.

    Attributes:
        name: `none`, `leave-one-out`, `group-mean`, `batch-mean`, `batch-leave-one-out`, `token-mean` (the mean of
            the batch's tokens, before they are summed) or `other`.
        ended: how a completion that has ended enters the mean: with its `credit`, as `zero`, or it is `left-out`.
        covers: `all` of the coefficient, or only the `credit` that stands in a reward, with or `beside` the token's
            own.
        spread: `none`, or the `group` or `batch` by whose spread the rest is divided.
    """

    name: str = "none"
    ended: str = "credit"
    covers: str = "all"
    spread: str = "none"

    def centre(self, credit: Tensor, inputs: ProbeInputs) -> Tensor:
        """(B, T) the credit without the baseline."""
        if self.name in ("none", "other", "token-mean"):
            return credit
        same = inputs.group[:, None] == inputs.group[None, :] if "batch" not in self.name else torch.ones(1, 1)
        weights = same.double().expand(len(credit), len(credit)).clone()
        if "leave" in self.name:
            weights.fill_diagonal_(0.0)
        live = inputs.mask.double()
        total = weights @ (live if self.ended == "left-out" else torch.ones_like(credit))
        counted = credit if self.ended == "credit" else credit * live
        return credit - torch.where(total > 0, weights @ counted / total.clamp(min=1), 0.0)

    def own_share(self) -> float:
        """Which share of a token's own response is left in the probes' batch."""
        return {"group-mean": 1 - 1 / GROUP, "batch-leave-one-out": ROWS / (ROWS - 1)}.get(self.name, 1.0)


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What a loss is made of. `derivatives` is the formula that the parts are.

    Attributes:
        own: the coefficient of a token's score as a function of its own log-ratio.
        level: `token`, or `completion` where it is a function of the completion's summed log-ratio.
        exact: weights of the full-vocabulary reverse and forward KL that are differentiated.
        full: the coefficient of an entry of the logits as a function of its log-ratio, or None.
        credits: what stands on the scores of other tokens.
        unit, samples, baseline: as their classes say.
        constant: the coefficient at ref.
        entropy: weight of the log-prob itself in the coefficient of the score, and in that of an entry of the logits:
            that of an entropy bonus.
        late: by how many tokens the reference is late; 0 where it is in its place.
        anchor: `ref`, or `sampler` where the log-probs of the sampler are in the place of ref.
        ends: whether the last token of a completion has a coefficient.
        leaks: whether masked positions have one.
        deterministic, finite: whether the same inputs give the same finite numbers.
        unexplained: by probe, the share of the coefficients that the formula does not have.
        allowed: the share that rounding may leave.
    """

    own: Curve
    level: str
    exact: tuple[float, float]
    full: Curve | None
    credits: tuple[Credit, ...]
    unit: Unit
    samples: Samples
    baseline: Baseline
    constant: float
    entropy: tuple[float, float] = (0.0, 0.0)
    late: int = 0
    anchor: str = "ref"
    ends: bool = True
    leaks: bool = False
    deterministic: bool = True
    finite: bool = True
    unexplained: dict[str, float] = field(default_factory=dict)
    allowed: float = EXACT

    def derivatives(self, inputs: ProbeInputs) -> Derivatives:
        """What the parts predict at any inputs."""
        if self.samples.frozen:
            inputs = replace(inputs, log_ratio=inputs.log_ratio - inputs.log_weight)
        mask, shares = inputs.mask, self.unit.shares(inputs)
        weights = self.samples.weights(inputs)
        before = self.samples.weights(inputs, before=True) if self.samples.before else weights
        inner, outer = (
            (weights, torch.ones_like(weights)) if self.samples.per_decision else (torch.ones_like(weights), weights)
        )
        if self.level == "completion":
            own = self.own(torch.where(mask, inputs.log_ratio, 0.0).sum(-1, keepdim=True)).expand_as(mask)
        else:
            own = torch.where(mask, self.own(inputs.log_ratio), 0.0)
        if self.baseline.name == "token-mean":
            own = torch.where(mask, own - own[mask].mean(), 0.0)
        by_length = TOKENS / mask.sum(-1, keepdim=True)
        for part in self.credits:
            own = own + part.values(inputs) * (by_length - 1) if part.divided else own
        path = torch.zeros_like(own)
        if self.baseline.covers != "all":
            own, path = torch.zeros_like(own), own
            if self.baseline.covers == "credit":
                own = sum((c.values(inputs) for c in self.credits if c.source == "sampled"), own)
                path = path - own
        credit = own * inner
        for part in self.credits:
            values = part.values(inputs)
            if self.baseline.name == "token-mean":
                values = torch.where(mask, values - values[mask].mean(), 0.0)
            of_later = before if part.source != "sampled" and self.samples.per_decision else inner
            summed = (values * of_later) @ part.matrix(mask.shape[1]).T
            credit = credit + (summed * by_length if part.divided else summed)
        centred = self.baseline.centre
        if self.samples.on_baseline == "difference":
            score = outer * centred(credit, inputs)
        else:
            credit = outer * credit
            mean = credit - centred(credit, inputs)
            score = credit - mean * (weights if self.samples.on_baseline == "both" else 1.0)
        score = score + path * weights
        if self.constant:
            score = score + self.constant * (weights if self.samples.constant else 1.0)
        if self.entropy[0]:
            score = score + self.entropy[0] * inputs.logp * (weights if self.samples.constant else 1.0)
        if not self.ends:
            score = score * (mask.cumsum(-1) < mask.sum(-1, keepdim=True))
        live = lambda x: torch.where(mask, x, 0.0) * shares
        reverse, forward = (live(weight * before) for weight in self.exact)
        return Derivatives(live(score), reverse, forward, live(self._full_difference(inputs) * before))

    def _full_difference(self, inputs: ProbeInputs) -> Tensor:
        bonus = self.entropy[1] * inputs.odds
        if self.full is None:
            return bonus
        third, fourth = tilted_log_ratios(inputs)
        return self.full(third) - self.full(fourth) + bonus

    @property
    def shares(self) -> dict[str, float]:
        """The divergences that the coefficient of a token's own log-ratio is the slope of, with their weights.

        The value of k3 is the slope of the reverse KL minus that of the forward KL. `other` stands for a curve that
        is no sum of known slopes.
        """
        totals: dict[str, float] = {}
        known = [(self.own.shares, self.own)] + ([] if self.full is None else [(self.full.shares, self.full)])
        for shares, curve in known:
            if not shares and not curve.is_zero:
                return {"other": 1.0}
            for name, weight in shares.items():
                pair = {"reverse-kl": weight, "forward-kl": -weight} if name == "k3" else {name: weight}
                for each, w in pair.items():
                    totals[each] = totals.get(each, 0.0) + w
        for name, weight in zip(("reverse-kl", "forward-kl"), self.exact, strict=True):
            totals[name] = totals.get(name, 0.0) + weight
        totals = {name: round_short(w) for name, w in totals.items() if abs(w) > self.allowed}
        return {"other": 1.0} if "k2" in totals else totals

    @property
    def scale(self) -> float:
        """By which factor the loss multiplies β near ref, in its unit."""
        curves = [c for c in (self.own, self.full) if c is not None and not c.is_zero]
        total = sum((c.scale for c in curves), sum(self.exact))
        return 0.0 if abs(total) < 1e-6 else round_short(total, 1e-6)

    @property
    def future(self) -> Credit | None:
        """What later tokens add to the coefficient of a token; None if nothing."""
        return next((c for c in self.credits if any(c.later)), None)

    @property
    def horizon(self) -> "Horizon":
        """How far a token looks ahead."""
        if self.level == "completion":
            return Horizon("all", (1.0,), None, "exact")
        part = self.future
        if part is None:
            return Horizon("none", (), None, "")
        shares = {} if part.curve is None else part.curve.shares
        estimate = "exact" if part.source != "sampled" else SHORT.get(next(iter(shares), ""), "other")
        strength = next(iter(shares.values())) if part.source == "sampled" and len(shares) == 1 else 1.0
        whole = sum(self.shares.values()) if "other" not in self.shares else 0.0
        relative = strength / whole if whole else strength
        weights = tuple(round_short(w * relative, 1e-6) for w in part.later)
        steps = [b / a for a, b in pairwise((1.0, *weights)) if a]
        if all(abs(step - steps[0]) <= 1e-6 for step in steps) and len(steps) == len(weights):
            same = abs(steps[0] - 1) <= 1e-6
            return Horizon(
                "all" if same else "discount", weights, None if same else round_short(steps[0], 1e-6), estimate
            )
        is_window = weights[0] == 1 and set(weights) == {0.0, 1.0} and list(weights) == sorted(weights, reverse=True)
        return Horizon("window" if is_window else "other", weights, None, estimate)

    @property
    def has_past(self) -> bool:
        """Whether earlier tokens add to the coefficient of a token: mean zero on fresh samples, not on stale ones."""
        return self.level == "completion" or any(any(c.earlier) for c in self.credits)

    @property
    def is_nothing(self) -> bool:
        """Whether no log-ratio has an effect."""
        return not self.shares and not self.credits

    @property
    def proved_fresh(self) -> bool:
        """Whether the formula predicts every coefficient on fresh samples."""
        gaps = [gap for name, gap in self.unexplained.items() if name not in STALE_PROBES]
        return self.deterministic and self.finite and max(gaps, default=1.0) <= self.allowed

    @property
    def proved(self) -> bool:
        """Whether the formula predicts every coefficient, on stale samples too."""
        gaps = [gap for name, gap in self.unexplained.items() if name in STALE_PROBES]
        return self.proved_fresh and max(gaps, default=0.0) <= self.allowed

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        horizon, bound = self.horizon, self.samples.bound
        return {
            "divergence": self._divergence(),
            "horizon": {
                "kind": horizon.kind,
                "discount": horizon.discount,
                "weights": list(horizon.weights),
                "estimate": horizon.estimate or None,
            },
            "past_credit": self.has_past,
            "samples": {
                "ratio": self.samples.ratio,
                "per_decision": self.samples.per_decision,
                "frozen_log_ratio": self.samples.frozen,
                "bound": None if bound is None else {"kind": bound.kind, "low": bound.low, "high": bound.high},
            },
            "unit": self.unit.name,
            "mean_over_rows": self.unit.rows,
            "baseline": self.baseline.name,
            "divided_by_spread": self.baseline.spread != "none",
            "constant": self.constant,
            "entropy": sum(self.entropy),
            "additive": self.level == "token" and self.baseline.spread == "none",
            "anchor": self.anchor,
            "reference_late_by": self.late,
            "end_token_has_gradient": self.ends,
            "masked_tokens_leak": self.leaks,
            "deterministic": self.deterministic,
            "proved": self.proved,
            "unexplained": max(self.unexplained.values(), default=0.0),
            "unexplained_by_probe": self.unexplained,
        }

    def _divergence(self) -> dict[str, object]:
        shares = self.shares
        each = [_named_part(name, weight) for name, weight in shares.items()]
        if self.own.shares == {} and not self.own.is_zero:
            each = [{"name": "other", "curve": [x.tolist() for x in self.own.points]}]
        named = each[0] if len(each) == 1 else {"name": "sum", "parts": each} if each else {"name": "nothing"}
        scale = self.scale
        return named | {
            "scale": scale if math.isfinite(scale) else None,
            "level": self.level,
            "flat_below": self.own.low,
            "flat_above": self.own.high,
            "pull_below": None if self.own.low is None else self.own.below,
            "pull_above": None if self.own.high is None else self.own.above,
            "convex": all(c.convex for c in (self.own, self.full) if c is not None),
        }


def _named_part(name: str, weight: float) -> dict[str, object]:
    kind, _, order = name.rstrip(")").partition("(")
    parameter = {"alpha": "alpha", "jensen-shannon": "beta"}.get(kind) if order else None
    scale = weight * divergence_of(name).scale if name != "other" else 0.0
    return {"name": kind, "scale": scale if math.isfinite(scale) else None} | (
        {parameter: float(order)} if parameter else {}
    )


STALE_PROBES = ("stale samples", "enumerated, stale samples")

SHORT = {"reverse-kl": "k1", "k2": "k2", "k3": "k3"}
"""Names of the functions of a later token's log-ratio that stand for its KL."""


@dataclass(frozen=True)
class Horizon:
    """How the tokens after it enter the coefficient of a token.

    Attributes:
        kind: `none`, `all`, `discount`, `window` or `other`.
        weights: by distance, relative to the token's own part.
        discount: of one step, for kind `discount`.
        estimate: of a later token's divergence: `k1`, `k2`, `k3`, `exact` or `other`; empty for kind `none`.
    """

    kind: str
    weights: tuple[float, ...]
    discount: float | None
    estimate: str


def tilted_log_ratios(inputs: ProbeInputs) -> tuple[Tensor, Tensor]:
    """(B, T) log π/ref of the third and of the fourth entry of the probes' logits."""
    batch = inputs.batch()
    log_ratio = batch.logits.detach().log_softmax(-1) - batch.ref_logits.log_softmax(-1)
    return log_ratio[..., 2], log_ratio[..., 3]


def tilted_divergence(curve: Curve, inputs: ProbeInputs) -> Tensor:
    """(B, T) the full-vocabulary divergence of the probes' logits."""
    batch = inputs.batch()
    policy = batch.logits.detach().log_softmax(-1)
    log_ratio = policy - batch.ref_logits.log_softmax(-1)
    values = sum(
        (w * divergence_of(name).excess(log_ratio) for name, w in curve.shares.items()), torch.zeros_like(policy)
    )
    return (policy.exp() * values).sum(-1)


# Reading.

SHAPES = (
    ([9] * 8, 10, (0, 4)),
    ([9, 7, 9, 4, 9, 9, 5, 9], 10, (0, 4)),
    ([4, 9, 9, 3, 4, 9, 9, 6, 9, 9, 9, 2], 10, (0, 4)),
    ([4, 6, 6, 3, 4, 6, 6, 6], 12, (0, 4)),
)
"""Lengths of completions, the padded width, and two rows of equal length in different groups."""

MIXED = [9, 7, 9, 4, 9, 8, 5, 9]


class PartReader:
    """Reads each part of one loss by its own probe."""

    def __init__(self, subject: Subject) -> None:
        subject = subject.large()  # a batch is one call
        self.read: Read = reader_of(subject)
        self.base = ProbeInputs.at_reference([TOKENS] * ROWS, WIDTH)
        random = ProbeInputs.at_random([TOKENS] * ROWS, WIDTH, highest=HIGHEST_TWIN)
        answers = [self.read(random), self.read(random)]
        self.takes_logits = bool(evaluate(subject, random.batch())[1].logits.any())
        # The logits of the probes have twins of the sampled tokens, so that these have a probability below one half.
        self.highest = HIGHEST_TWIN if self.takes_logits else -1e-6
        self.deterministic = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*answers, strict=True))
        self.finite = all(bool(torch.isfinite(x).all()) for x in answers[0])
        is_single = all(torch.equal(x, x.float().double()) for x in answers[0]) and any(
            bool(x.any()) for x in answers[0]
        )
        self.same = SINGLE if is_single else EXACT
        self.unit = Unit("sum")
        self.late, self.anchor = 0, "ref"

    # One response at a time.

    def shares(self) -> Tensor:
        """(B, 1) what the unit multiplies each completion's coefficients by."""
        return self.unit.shares(self.base)

    def start(self) -> Derivatives:
        """The derivatives at ref."""
        return self.read(self.base)

    def responses(self, name: str, entries: dict[tuple[int, int], float]) -> Derivatives:
        """What these entries of one table add to the derivatives, in the unit of the loss."""
        moved, start = self.read(self.base.with_entries(name, entries)), self.start()
        return Derivatives(*((a - b) / self.shares() for a, b in zip(moved, start, strict=True)))

    def own_responses(self, name: str, entry: tuple[int, int], value: float) -> Tensor:
        """(T,) the same in the row that is moved, less what a row of the other group answers to it."""
        score = self.responses(name, {entry: value}).score
        return score[entry[0]] - score[ROWS - 1]

    def along(self, log_ratios: Tensor, moved: int, seen: int, couples_rows: bool) -> Tensor:
        """The coefficient of one token as the log-ratio of another of its completion takes these values."""
        values, start = [], self.start().score
        for some in log_ratios.split(1 if couples_rows else ROWS):
            entries = {(row, moved): x for row, x in enumerate(some.tolist())}
            answer = (self.read(self.base.with_entries("log_ratio", entries)).score - start) / self.shares()
            peer = answer[ROWS - 1, seen] if couples_rows else 0.0
            values.append(answer[: len(some), seen] - peer)
        return torch.cat(values)

    # The parts.

    def read_unit(self) -> Unit:
        """The unit by which responses in batches of several shapes are all alike; `other` if none is."""
        responses, inputs = [], []
        for lengths, width, (row, peer) in SHAPES:
            base = replace(ProbeInputs.at_reference(lengths, width), late=self.late, anchor=self.anchor)
            start = self.read(base)
            moved = self.read(base.with_entries("log_ratio", {(row, 2): STEP}))
            tilted = self.read(base.with_entries("tilt", {(row, 2): STEP}))
            own = float((moved.score - start.score)[row, 2] - (moved.score - start.score)[peer, 2])
            full = float((tilted.full - start.full)[row, 2])
            exact = float(start.reverse[row, 2]), float(start.forward[row, 2])
            constant = float(start.score[row, 2])
            responses.append(next((x for x in (full, *exact, own, constant) if x), 0.0))
            inputs.append((base, row))
        for unit in UNITS:
            scaled = [r / float(unit.shares(base)[row, 0]) for r, (base, row) in zip(responses, inputs, strict=True)]
            if max(scaled) - min(scaled) <= self.same * max(map(abs, scaled)):
                return unit
        return Unit("other")

    def read_position(self) -> None:
        """Where the log-probs of ref, or of the sampler in their place, meet those of the policy."""
        row, token = PLACE
        response = self.responses("log_ratio", {PLACE: STEP}).score[row]
        if not bool(response.any()):
            swapped = replace(self.base, anchor="sampler")
            moved = self.read(swapped.with_entries("log_ratio", {PLACE: STEP})).score - self.read(swapped).score
            # A ratio alone multiplies a constant: it then moves the other way at the sampler.
            if float(moved[PLACE]) and not _is_ratio(moved[PLACE] / self.read(swapped).score[PLACE]):
                self.anchor = "sampler"
        elif int((response != 0).sum()) == 1 and bool(response[token - 1] != 0) | bool(response[token + 1] != 0):
            self.late = int(response.nonzero()[0, 0]) - token
        self.base = replace(self.base, late=self.late, anchor=self.anchor)

    def read_entropy(self) -> tuple[float, float]:
        """The weights of the log-prob itself, at ref and at the sampler."""
        moved, start = self.read(self.base.with_entries("logp", {PLACE: DEPTH + STEP})), self.start()
        sampled = float((moved.score - start.score)[PLACE] / self.shares()[0, 0]) / STEP
        full = float(start.full[PLACE] / self.shares()[0, 0]) / ODDS
        short = lambda x: 0.0 if abs(x) <= self.same else round_short(x, 10 * self.same)
        return short(sampled), short(full)

    def has_spread(self) -> bool:
        """Whether a completion changes the difference between two others, as a spread that divides them does."""
        differences = []
        for x in (0.0, 1.3):
            inputs = self.base.with_entries("log_ratio", {(0, PLACE[1]): x, (2, PLACE[1]): 3.0})
            score = self.read(inputs).score[:, PLACE[1]]
            differences.append(float(score[2] - score[1]))
        return abs(differences[0] - differences[1]) > 10 * self.same * abs(differences[0])

    def read_credit(self, source: str, name: str, divergence: float, curve: Curve | None = None) -> Credit | None:
        """The weights of an exact estimate on the scores of other tokens, by distance."""
        token = PLACE[1]
        response = self.own_responses(name, PLACE, STEP) / divergence
        if not bool(response.abs().max() > self.same):
            return None
        short = lambda xs: tuple(round_short(float(x), self.same) for x in xs)
        return Credit(
            source, curve, float(response[token]), short(response[:token].flip(0)), short(response[token + 1 : TOKENS])
        )


def _is_ratio(factor: Tensor) -> bool:
    return abs(float(factor) - math.expm1(STEP)) <= EXACT * 10 or abs(float(factor) - math.expm1(-STEP)) <= EXACT * 10


def read_anatomy(subject: Subject) -> Anatomy:
    """Read every part, and compare their formula with the loss at random inputs."""
    reader = PartReader(subject)
    zero = Curve({}, (GRID, 0 * GRID), torch.zeros_like)
    empty = Anatomy(zero, "token", (0.0, 0.0), None, (), Unit("sum"), Samples(), Baseline(), 0.0)
    if not reader.deterministic:
        return replace(empty, deterministic=False)
    start = reader.start()
    if not reader.finite or not all(bool(torch.isfinite(x).all()) for x in start):
        return _read_spread(reader, replace(empty, finite=reader.finite))
    reader.read_position()
    reader.unit = reader.read_unit()
    start = Derivatives(*(x / reader.shares() for x in reader.start()))
    response = reader.responses("log_ratio", {PLACE: STEP}).score
    others = [reader.responses(name, {PLACE: STEP}).score for name in ("token_reverse_kl", "token_forward_kl", "tilt")]
    couples_rows = any(bool((x[1:] != 0).any()) for x in (response, *others))
    if couples_rows and reader.has_spread():
        return _read_spread(reader, empty)
    token = PLACE[1]
    own = read_curve(lambda x: reader.along(x, token, token, couples_rows), reader.same)
    full = _read_full(reader)
    exact = (round_short(float(start.reverse[PLACE])), round_short(float(start.forward[PLACE])))
    credits = _read_credits(reader, couples_rows, full)
    entropy = reader.read_entropy()
    constant = round_short(float(start.score[PLACE]) - entropy[0] * DEPTH, reader.same)
    if abs(constant) <= reader.same:
        constant = 0.0
    last = reader.responses("log_ratio", {(0, TOKENS - 1): STEP}).score[0, TOKENS - 1]
    parts = Anatomy(
        own,
        "token",
        exact,
        full,
        credits,
        reader.unit,
        Samples(),
        Baseline(),
        constant,
        entropy=entropy,
        late=reader.late,
        anchor=reader.anchor,
        ends=bool(last != 0) or own.is_zero,
        allowed=reader.same * 10,
    )
    check = ProbeInputs.at_random(MIXED, WIDTH, highest=reader.highest, seed=1)
    parts = replace(parts, leaks=any(bool((x * ~check.mask).any()) for x in reader.read(check)))
    parts = _choose_baseline(reader, parts, couples_rows)
    parts = _choose_samples(reader, parts)
    return replace(parts, unexplained=_compare(reader, parts))


def _read_full(reader: PartReader) -> Curve | None:
    """The coefficient of an entry of the logits, from the tilt of two entries."""
    token = PLACE[1]
    if abs(float(reader.responses("tilt", {PLACE: STEP}).full[PLACE])) <= reader.same:
        return None

    def read(tilts: Tensor) -> Tensor:
        values = []
        for some in tilts.split(ROWS):
            entries = {(r, token): x for r, x in enumerate(some.tolist())}
            values.append(reader.responses("tilt", entries).full[: len(some), token])
        return torch.cat(values)

    # Of a tilt both entries feel something: the known functions are fitted to the difference of the two.
    tilts = torch.linspace(-6, 6, 25).double()
    inputs = ProbeInputs.at_reference([1] * len(tilts), 1, 1)
    inputs = replace(inputs, tilt=tilts[:, None])
    third, fourth = (x[:, 0] for x in tilted_log_ratios(inputs))
    values = read(tilts)
    names = [*("reverse-kl", "forward-kl", "jensen-shannon", "chi-square", "hellinger")]
    names += [f"jensen-shannon({beta / 20:g})" for beta in range(1, 20) if beta != 10]
    for pair in [(n,) for n in names] + [("reverse-kl", "forward-kl")]:
        table = torch.stack([function_of(n)(third) - function_of(n)(fourth) for n in pair], -1)
        weights = torch.linalg.lstsq(table, values[:, None]).solution[:, 0]
        if float((table @ weights - values).abs().max()) <= 10 * reader.same * float(values.abs().max()):
            shares = {n: round_short(float(w), 10 * reader.same) for n, w in zip(pair, weights, strict=True)}
            points = sum(w * function_of(n)(GRID) for n, w in shares.items())
            assert isinstance(points, Tensor)
            return Curve(shares, (GRID, points), torch.zeros_like)
    return Curve({}, (tilts, values), torch.zeros_like)


def _read_credits(reader: PartReader, couples_rows: bool, full: Curve | None) -> tuple[Credit, ...]:
    token = PLACE[1]
    response = reader.own_responses("log_ratio", PLACE, STEP)
    response = torch.where(response.abs() > reader.same * response.abs().max(), response, 0.0)
    later, earlier = response[:token].flip(0), response[token + 1 : TOKENS]
    credits = []
    if bool(later.any()) or bool(earlier.any()):
        seen = token - 1 if bool(later[0] != 0) else token + 1
        if not float(response[seen]):
            seen = int((response * (torch.arange(WIDTH) != token)).nonzero()[0, 0])
        curve = read_curve(lambda x: reader.along(x, token, seen, couples_rows), reader.same)
        unit = float(response[seen])
        short = lambda xs: tuple(round_short(float(x) / unit, reader.same) for x in xs)
        credits.append(Credit("sampled", curve, 0.0, short(later), short(earlier)))
    for source, name in (("exact-reverse", "token_reverse_kl"), ("exact-forward", "token_forward_kl")):
        credits.append(reader.read_credit(source, name, STEP))
    if full is not None and full.shares:
        inputs = reader.base.with_entries("tilt", {PLACE: STEP})
        credits.append(reader.read_credit("full", "tilt", float(tilted_divergence(full, inputs)[PLACE]), full))
    return tuple(c for c in credits if c is not None)


# Parts that are chosen by what they predict.


def _difference(parts: Anatomy, inputs: ProbeInputs, answer: Derivatives) -> float:
    """The largest difference of the coefficients from the formula, as a share of the largest coefficient."""
    formula = parts.derivatives(inputs)
    inside = inputs.mask if not parts.late else inputs.mask & inputs.mask.roll(-1, 1) & inputs.mask.roll(1, 1)
    if parts.late:
        inside = inside & (torch.arange(inside.shape[1]) > 0)
    gap, size = 0.0, 0.0
    for a, f in zip(answer, formula, strict=True):
        a, f = torch.where(inside, a, 0.0), torch.where(inside, f, 0.0)
        if not bool(torch.isfinite(a).all()):
            return math.inf
        if parts.baseline.spread != "none":
            f = _rescale(f, a, inputs, parts.baseline.spread)
        gap, size = max(gap, float((a - f).abs().max())), max(size, float(a.abs().max()))
    return gap / size if size else gap


def _rescale(formula: Tensor, answer: Tensor, inputs: ProbeInputs, spread: str) -> Tensor:
    """The formula with one factor per group, or per batch, which stands for its spread."""
    if spread == "batch":
        return formula * (formula * answer).sum() / formula.square().sum().clamp(min=1e-300)
    scaled = torch.zeros_like(formula)
    for g in inputs.group.unique():
        rows = inputs.group == g
        factor = (formula[rows] * answer[rows]).sum() / formula[rows].square().sum().clamp(min=1e-300)
        scaled[rows] = formula[rows] * factor
    return scaled


def _baselines(couples_rows: bool) -> Iterator[Baseline]:
    yield Baseline()
    if couples_rows:
        names = ("leave-one-out", "group-mean", "batch-mean", "batch-leave-one-out")
        for name, ended, covers in product(names, ("credit", "zero", "left-out"), ("all", "credit", "beside")):
            yield Baseline(name, ended, covers)
        yield Baseline("token-mean")


def _best(reader: PartReader, candidates: Iterator[Anatomy], *probes: ProbeInputs) -> tuple[Anatomy, float]:
    """The candidate whose formula is nearest; the first that has all coefficients ends the search."""
    best, least = None, math.inf
    several = [replace(inputs, late=reader.late, anchor=reader.anchor) for inputs in probes]
    answers = [reader.read(inputs) for inputs in several]
    for parts in candidates:
        gap = max(_difference(parts, *pair) for pair in zip(several, answers, strict=True))
        if best is None or gap < least:
            best, least = parts, gap
        if gap <= parts.allowed:
            break
    assert best is not None
    return best, least


def _rescaled(curve: Curve, factor: float) -> Curve:
    if factor == 1.0 or curve.is_zero:
        return curve
    shares = {name: round_short(w * factor) for name, w in curve.shares.items()}
    read = curve.read
    return replace(
        curve,
        shares=shares,
        points=(curve.points[0], curve.points[1] * factor),
        read=lambda x: read(x) * factor,
        below=curve.below * factor,
        above=curve.above * factor,
    )


def _choose_baseline(reader: PartReader, parts: Anatomy, couples_rows: bool) -> Anatomy:
    inputs = ProbeInputs.at_random(MIXED, WIDTH, highest=reader.highest, seed=1)

    def candidates() -> Iterator[Anatomy]:
        for baseline in _baselines(couples_rows):
            factor = 1 / baseline.own_share()
            credits = tuple(
                replace(c, curve=None if c.curve is None else _rescaled(c.curve, factor), now=c.now * factor)
                if c.source == "sampled"
                else replace(
                    c,
                    now=c.now * factor,
                    later=tuple(w * factor for w in c.later),
                    earlier=tuple(w * factor for w in c.earlier),
                )
                for c in parts.credits
            )
            option = replace(parts, own=_rescaled(parts.own, factor), credits=credits, baseline=baseline)
            yield option
            if parts.unit.name == "other":
                divided = tuple(replace(c, divided=c.source == "sampled") for c in credits)
                for unit in UNITS:
                    in_unit = float(reader.shares()[0, 0] / unit.shares(reader.base)[0, 0])
                    yield replace(
                        option,
                        unit=unit,
                        own=_rescaled(option.own, in_unit),
                        credits=tuple(replace(c, curve=c.curve and _rescaled(c.curve, in_unit)) for c in divided),
                    )
            if parts.own.shares and any(c.source == "sampled" and c.later and c.earlier for c in parts.credits):
                yield replace(option, level="completion", credits=tuple(c for c in credits if c.source != "sampled"))

    one_group = replace(inputs, group=torch.zeros_like(inputs.group))
    wider = ProbeInputs.at_random(MIXED, WIDTH + 3, highest=reader.highest, seed=7)
    best, gap = _best(reader, candidates(), inputs, wider, *([one_group] if couples_rows else []))
    if gap > best.allowed and couples_rows and best.baseline.name == "none":
        best = replace(best, baseline=Baseline("other"))
    return best


RATIOS = ("none", "token", "prefix", "sequence", "mean")


def _choose_samples(reader: PartReader, parts: Anatomy) -> Anatomy:
    inputs = ProbeInputs.at_random([TOKENS] * ROWS, WIDTH, stale=0.02, highest=reader.highest, seed=2)
    has_exact = any(parts.exact) or parts.full is not None or any(c.source != "sampled" for c in parts.credits)

    def candidates() -> Iterator[Anatomy]:
        for ratio in RATIOS:
            flags = product(
                (False, True) if parts.credits else (False,),
                (False, True) if has_exact and ratio == "prefix" else (False,),
                (True, False) if parts.constant or any(parts.entropy) else (True,),
                ("difference", "credit", "both") if parts.baseline.name != "none" else ("difference",),
                (False, True),
            )
            for per_decision, before, constant, on_baseline, frozen in flags:
                yield replace(parts, samples=Samples(ratio, per_decision, None, before, constant, on_baseline, frozen))

    best, gap = _best(reader, candidates(), inputs)
    if gap > parts.allowed:
        return replace(parts, samples=Samples("other"))
    if best.samples.ratio == "none":
        return best
    return replace(best, samples=replace(best.samples, bound=_read_bound(reader, best)))


def _read_bound(reader: PartReader, parts: Anatomy) -> Bound | None:
    """Where the coefficients stop following the ratio, and whether they are then constant or 0."""
    moved = {"prefix": 0 if parts.samples.before else PLACE[1]}.get(parts.samples.ratio, PLACE[1])
    start = reader.base.with_entries("log_ratio", {PLACE: STEP})
    start = start.with_entries("tilt", {PLACE: STEP}).with_entries("token_reverse_kl", {PLACE: STEP})

    def answer(x: float) -> float:
        stale = {(0, s): x for s in (range(TOKENS) if parts.samples.ratio == "mean" else (moved,))}
        inputs = start.with_entries("log_weight", stale)
        if parts.samples.frozen:  # the log-ratio that the loss sees stays where it is
            inputs = replace(inputs, log_ratio=inputs.log_ratio + inputs.log_weight)
        here = reader.read(inputs)
        return float(here.score[PLACE] + here.reverse[PLACE] + here.forward[PLACE] + here.full[PLACE])

    plain = answer(0.0)
    if not plain:
        return None
    edges: list[float | None] = []
    kinds = set()
    for sign in (-1.0, 1.0):
        follows = lambda x, sign=sign: abs(answer(sign * x) / plain / math.exp(sign * x) - 1) <= 10 * reader.same
        if follows(15.0):
            edges.append(None)
            continue
        low, high = 0.0, 15.0
        for _ in range(45):
            middle = (low + high) / 2
            low, high = (middle, high) if follows(middle) else (low, middle)
        edges.append(round_short(math.exp(sign * low), 1e-8))
        kinds.add("mask" if answer(sign * 15.0) == 0 else "truncate")
    if not kinds:
        return None
    kind = kinds.pop() if len(kinds) == 1 else "other"
    return Bound("clip" if kind == "truncate" and edges[0] is not None else kind, edges[0], edges[1])


# Division by a spread: what is left of it are the ratios of differences between completions.


def _read_spread(reader: PartReader, empty: Anatomy) -> Anatomy:
    """A loss that centres its credit and divides it by the spread: the curve up to a factor, and the credit's shape."""
    base = ProbeInputs.at_reference([TOKENS] * ROWS, WIDTH)
    token = PLACE[1]
    # Row 2 has a known log-ratio, rows 3 and 7 give both groups a spread.
    entries = {(2, token): STEP, (3, 0): 2.0, (6, 1): 1.0, (7, 0): -1.0}
    inputs = base.with_entries("log_ratio", entries)
    if not all(bool(torch.isfinite(x).all()) for x in reader.read(inputs)):
        return replace(empty, finite=False)

    def read(log_ratios: Tensor, seen: int = token) -> Tensor:
        values = []
        for x in log_ratios.tolist():
            score = reader.read(inputs.with_entries("log_ratio", {(0, token): x})).score
            values.append((score[0, seen] - score[1, seen]) / (score[2, token] - score[1, token]))
        return torch.stack(values)

    own = read_curve(lambda x: read(x) - read(torch.zeros(1))[0], max(reader.same, 1e-7))
    if len(own.shares) == 1:
        own = _rescaled(own, 1 / next(iter(own.shares.values())))
    one = torch.tensor([1.0], dtype=torch.float64)
    credit = torch.cat([read(one, seen) for seen in range(TOKENS)]) / read(one)
    short = lambda xs: tuple(round_short(float(x), 1e-6) for x in xs)
    credits = (Credit("sampled", own, 0.0, short(credit[:token].flip(0)), short(credit[token + 1 :])),)
    credits = credits if bool((credit.abs() > 1e-6).sum() > 1) else ()
    check = ProbeInputs.at_random(MIXED, WIDTH, highest=reader.highest, seed=1)

    def candidates() -> Iterator[Anatomy]:
        for spread, name, ended, unit in product(
            ("batch", "group"), ("group-mean", "batch-mean"), ("credit", "zero"), UNITS
        ):
            yield replace(
                empty, own=own, credits=credits, unit=unit, baseline=Baseline(name, ended, "all", spread), allowed=1e-6
            )

    best, gap = _best(reader, candidates(), check)
    return replace(best, unexplained={"random log-ratios": gap})


# Comparison of the formula with the loss.


def _compare(reader: PartReader, parts: Anatomy) -> dict[str, float]:
    """By probe, the share of the coefficients that the formula does not have."""
    at_random = partial(ProbeInputs.at_random, highest=reader.highest)
    probes = {
        "random log-ratios": at_random(MIXED, WIDTH, seed=3),
        "large log-ratios": at_random(MIXED, WIDTH, spread=9.0, seed=4),
        "groups of 64, 64 tokens": at_random([63] * 40 + [1, 5, 33] * 8, 64, 64, seed=5),
        "stale samples": at_random(MIXED, WIDTH, stale=1.0, seed=6),
    }
    probes = {name: replace(inputs, late=parts.late, anchor=parts.anchor) for name, inputs in probes.items()}
    return {name: _difference(parts, inputs, reader.read(inputs)) for name, inputs in probes.items()}
