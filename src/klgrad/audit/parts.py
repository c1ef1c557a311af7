"""The parts of a loss, and the formula that they are: divergence, horizon, samples, unit and baseline."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..core.divergences import named
from .probes import (
    ESTIMATES,
    EXACT,
    EXCESS,
    GROUP,
    TOKENS,
    Batch,
    Curve,
    Derivatives,
    ProbeInputs,
    function_of,
    round_short,
)
from .subject import Parts

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


@dataclass(frozen=True)
class MicroBatches:
    """What becomes of the gradient if a batch is cut into micro-batches.

    Attributes:
        change: whether it becomes another one; None if that is not known.
        why: why it does, or on which condition it does not.
    """

    change: bool | None = None
    why: str = ""


UNITS = tuple(Unit(name, rows) for name in ("sum", "completion-mean", "fixed-length") for rows in (True, False))
UNITS += (Unit("token-mean"),)


@dataclass(frozen=True)
class Bound:
    """A bound on a ratio.

    Attributes:
        kind: `truncate` on one side, `clip` on both, `mask`, which is 0 outside, `ppo`, which is 0 above the bound for
            tokens that are made more likely, and below it for those that are made less likely, `value`, which is 0
            where the ratio times an estimate of the token's KL is above it, or `probability`, which is 0 outside for
            the difference π - μ of the token's probabilities.
        low, high: where it begins.
        dual: of `ppo`, the ratio above which tokens that are made less likely have no gradient either, or None.
        estimate: of `value`, the name of the estimate.
        beyond: what the bound multiplies instead of the own curve where it holds, if the ratio is differentiated: a
            curve, and its value at ref. The credit of a token there is 0.
    """

    kind: str
    low: float | None
    high: float | None
    dual: float | None = None
    estimate: str = ""
    beyond: "tuple[Curve, float] | None" = field(default=None, compare=False)

    def holds(self, ratio: Tensor) -> Tensor:
        """Where the ratio, or the difference of probabilities, is within the bound."""
        return (ratio >= (-math.inf if self.low is None else self.low)) & (
            ratio <= (math.inf if self.high is None else self.high)
        )

    def __call__(self, ratio: Tensor) -> Tensor:
        """The ratio within its bound; of `ppo`, `value` and `probability`, which are of more than the ratio, itself."""
        if self.kind in ("ppo", "value", "probability"):
            return ratio
        if self.kind == "mask":
            return torch.where(self.holds(ratio), ratio, 0.0)
        return ratio.clamp(self.low, self.high)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        more = {"dual": self.dual, "estimate": self.estimate or None}
        more["differentiated"] = True if self.beyond is not None else None
        return {"kind": self.kind, "low": self.low, "high": self.high} | {
            n: x for n, x in more.items() if x is not None
        }


@dataclass(frozen=True)
class Samples:
    """How the ratio π/μ to the sampler enters.

    Attributes:
        ratio: `none`, `token`, `prefix`, `sequence`, `mean` (a geometric mean over the completion) or `other`.
        per_decision: whether the estimate of a later token carries the ratio of that token's own prefix.
        bound: of the ratio, or None.
        before: whether an exact term carries the ratio of the tokens before it only, its own being summed over.
        on_others: whether the credits that a baseline is the mean of carry the ratios of their own completions.
        frozen: whether log π/ref is that of the sampler, which does not move with π.
        pull: what a divergence to the sampler beside the KL adds to the coefficient, as a curve of log π/μ, or None.
    """

    ratio: str = "none"
    per_decision: bool = False
    bound: Bound | None = None
    before: bool = False
    on_others: bool = False
    frozen: bool = False
    pull: Curve | None = field(default=None, compare=False)

    def weights(self, inputs: ProbeInputs, *, before: bool = False) -> Tensor:
        """(B, T) the ratio of each token within its bound."""
        ratios = self.ratios(inputs, before=before)
        if self.bound is None or self.bound.kind != "probability":
            return ratios if self.bound is None else self.bound(ratios)
        return torch.where(self.bound.holds(inputs.logp.exp() - (inputs.logp - inputs.log_weight).exp()), ratios, 0.0)

    def ratios(self, inputs: ProbeInputs, *, before: bool = False) -> Tensor:
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
            "mean": total / inputs.mask.sum(-1, keepdim=True).clamp(min=1),
        }[self.ratio]
        return logs.exp()


@dataclass(frozen=True, eq=False)
class Credit:
    """An estimate of each token's divergence, which stands on the scores of other tokens.

    Attributes:
        source: `sampled`, or `full` for a sum over the vocabulary.
        curve: the estimate as a function of the log-ratio; for `full` the slope of the divergence.
        now: weight on the token's own score; that of `sampled` is in the own curve.
        later: weights of the tokens after it, by distance.
        earlier: weights of the tokens before it, by distance.
        divided: whether the weights, and the part of the own curve that is this estimate, are divided by the length of
            the completion; they are given for a completion of `TOKENS` tokens.
    """

    source: str
    curve: Curve
    now: float
    later: tuple[float, ...]
    earlier: tuple[float, ...]
    divided: bool = False

    def times(self, factor: float) -> "Credit":
        """The credit multiplied by a factor."""
        return replace(self, curve=self.curve.times(factor))

    def values(self, inputs: ProbeInputs) -> Tensor:
        """(B, T) the estimates, 0 where masked."""
        values = tilted_divergence(self.curve, inputs) if self.source == "full" else self.curve(inputs.log_ratio)
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
        name: `none`, `leave-one-out`, `group-mean`, `batch-mean`, `batch-leave-one-out` (of advantages only),
            `token-mean` (the mean of the batch's tokens, before they are summed), `return-mean` (after they are
            summed) or `other`.
        of_ended: whether a completion that has ended enters the mean with its credit, and not as 0.
        covers_all: whether it is subtracted from all of the coefficient, and not from the credit in a reward alone.
        spread: `none`, or the `group` or `batch` by whose spread the rest is divided.
        signed: 0 for a spread; 1 or -1 if it is a number with the sign of what is subtracted, or with the other sign.
    """

    name: str = "none"
    of_ended: bool = True
    covers_all: bool = True
    spread: str = "none"
    signed: int = 0

    def centre(self, credit: Tensor, inputs: ProbeInputs) -> Tensor:
        """(B, T) the credit without the baseline."""
        if self.name in ("none", "other", "token-mean"):
            return credit
        if self.name == "return-mean":
            return credit - credit[inputs.mask].mean()
        same = inputs.group[:, None] == inputs.group[None, :] if "batch" not in self.name else torch.ones(1, 1)
        weights = same.double().expand(len(credit), len(credit)).clone()
        if "leave" in self.name:
            weights.fill_diagonal_(0.0)
        counted = credit if self.of_ended else credit * inputs.mask
        return credit - weights @ counted / weights.sum(-1, keepdim=True).clamp(min=1)

    def own_share(self) -> float:
        """Which share of a token's own response is left in the probes' batch."""
        return 1 - 1 / GROUP if self.name == "group-mean" else 1.0


@dataclass(frozen=True)
class TopK:
    """A divergence over the most likely tokens.

    Attributes:
        size: how many they are.
        of: `ref` or `policy`: whose most likely tokens.
        tail: `lumped` into one entry, `left-out`, `ref-renormalised` (left out, and the probabilities of ref divided by
            their sum), `renormalised` (of both), or `other`.
        constant: what is added to the coefficients where a tail is left out; it has no effect on a whole vocabulary.
    """

    size: int
    of: str
    tail: str
    constant: float = 0.0

    def coefficients(self, curve: Curve, policy: Tensor, ref: Tensor) -> Tensor:
        """(B, T, V) the coefficient of each entry, from log-probs and the curve of the divergence."""
        listed = ref if self.of == "ref" else policy
        inside = listed >= listed.topk(self.size).values[..., -1:]
        sum_over = lambda x, entries: x.masked_fill(~entries, -math.inf).logsumexp(-1, keepdim=True)
        if self.tail == "lumped":
            return torch.where(inside, curve(policy - ref), curve(sum_over(policy, ~inside) - sum_over(ref, ~inside)))
        share = sum_over(policy, inside) if self.tail == "renormalised" else torch.zeros_like(policy)
        lower = sum_over(ref, inside) if "renormalised" in self.tail else torch.zeros_like(ref)
        values = curve(policy - ref + lower - share) + self.constant
        if self.tail == "renormalised":
            values = (values - ((policy - share).exp() * values * inside).sum(-1, keepdim=True)) / share.exp()
        return torch.where(inside, values, 0.0)


TAILS = ("left-out", "lumped", "ref-renormalised", "renormalised")


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What a loss is made of. `derivatives` is the formula that the parts are.

    Attributes:
        own: the coefficient of a token's score as a function of its own log-ratio.
        level: `token`, or `completion` where it is a function of the completion's summed log-ratio.
        full: the coefficient of an entry of the logits as a function of its log-ratio, or None.
        temperature: by which the logits of both policies are divided. The parts, and the gradient that is compared,
            are those of the policies at this temperature.
        credits: what stands on the scores of other tokens.
        unit, samples, baseline: as their classes say.
        constant: the coefficient at ref.
        entropy: weight of the log-prob itself in the coefficient of the score, and in that of an entry of the logits:
            that of an entropy bonus.
        entropy_of_whole: whether it is the log-prob of the whole completion that stands in the coefficient.
        late: by how many tokens the reference is late; 0 where it is in its place.
        anchor: `ref`, or `sampler` where the log-probs of the sampler are in the place of ref.
        ends: whether the last token of a completion has a coefficient.
        leaks: whether masked positions have one.
        cut_off: whether a completion that fills its row, as one that was cut off does, has a gradient.
        sees_reference: False if the reference was seen to change nothing, where the parts are not the loss.
        top: the most likely tokens that a divergence over the vocabulary looks at, if not at all.
        deterministic, finite: whether the same inputs give the same finite numbers.
        finite_at_ref: whether they are finite where all log-ratios are equal, as a spread of 0 is divided by there.
        unexplained: by probe, the share of the coefficients that the formula does not have.
        micro_batches: what becomes of the gradient in micro-batches.
        matters: what the coefficient of a token depends on beside the parts, where these are not the loss.
        problems: on how many enumerated problems it was compared with the loss.
        allowed: the share that rounding may leave.
    """

    own: Curve
    level: str = "token"
    full: Curve | None = None
    temperature: float = 1.0
    credits: tuple[Credit, ...] = ()
    unit: Unit = UNITS[0]
    samples: Samples = Samples()
    baseline: Baseline = Baseline()
    constant: float = 0.0
    entropy: tuple[float, float] = (0.0, 0.0)
    entropy_of_whole: bool = False
    late: int = 0
    anchor: str = "ref"
    ends: bool = True
    leaks: bool = False
    cut_off: bool = True
    top: TopK | None = None
    sees_reference: bool = True
    deterministic: bool = True
    finite: bool = True
    finite_at_ref: bool = True
    unexplained: dict[str, float] = field(default_factory=dict)
    problems: int = 0
    micro_batches: MicroBatches = MicroBatches()
    matters: tuple[str, ...] = ()
    allowed: float = EXACT

    def times(self, factor: float) -> "Anatomy":
        """The parts of the loss multiplied by a factor."""
        if factor == 1.0 or self.baseline.spread != "none":
            return self
        bonus, of_entries = self.entropy
        bound = self.samples.bound
        if bound is not None and bound.beyond is not None:
            bound = replace(bound, beyond=(bound.beyond[0].times(factor), bound.beyond[1] * factor))
        pull = self.samples.pull
        return replace(
            self,
            samples=replace(self.samples, bound=bound, pull=pull and pull.times(factor)),
            own=self.own.times(factor),
            full=self.full and self.full.times(factor),
            credits=tuple(c.times(factor) for c in self.credits),
            constant=self.constant * factor,
            entropy=(bonus * factor, of_entries * factor),
        )

    def without_value_bound(self) -> "Anatomy":
        """The parts without a bound of kind `value`: the edges of the curves are those of this bound at ratio 1."""
        credits = tuple(replace(c, curve=c.curve.without_edges()) for c in self.credits)
        samples = replace(self.samples, bound=None)
        return replace(self, own=self.own.without_edges(), credits=credits, samples=samples)

    def derivatives(self, inputs: ProbeInputs) -> Derivatives:
        """What the parts predict at the inputs of a probe."""
        score, weights = self._coefficients(inputs)
        if self.full is None and not self.entropy[1]:
            return Derivatives(score, torch.zeros_like(score))
        entries = self._of_entries(inputs.batch())
        return Derivatives(score, weights * (entries[..., 2] - entries[..., 3]))

    def predict(self, batch: Batch) -> Parts:
        """What the parts predict for any batch: the derivatives by each of its leaves."""
        score, weights = self._coefficients(ProbeInputs.of_batch(batch, self.anchor))
        entries, policy = self._of_entries(batch), batch.logits.detach().softmax(-1)
        on_logits = policy * (entries - (policy * entries).sum(-1, keepdim=True))
        return Parts(score, weights[..., None] * on_logits)

    def _of_entries(self, batch: Batch) -> Tensor:
        """(B, T, V) the coefficient of each entry of the logits."""
        policy, ref = batch.logits.detach().log_softmax(-1), batch.ref_logits.log_softmax(-1)
        bonus = self.entropy[1] * policy
        if self.full is None:
            return bonus
        if self.top is not None and self.top.size < policy.shape[-1]:
            return bonus + self.top.coefficients(self.full, policy, ref)
        return bonus + self.full(policy - ref)

    def _coefficients(self, inputs: ProbeInputs) -> tuple[Tensor, Tensor]:
        """(B, T) each: of the score, and what the coefficients of the entries weigh."""
        shares, samples, bound = self.unit.shares(inputs), self.samples, self.samples.bound
        if samples.frozen:
            inputs = replace(inputs, log_ratio=inputs.log_ratio - inputs.log_weight)
        if not self.cut_off:
            inputs = replace(inputs, mask=inputs.mask & ~inputs.mask.all(-1, keepdim=True))
        mask = inputs.mask
        weights = samples.weights(inputs)
        before = samples.weights(inputs, before=True) if samples.before else weights
        one = torch.ones_like(weights)
        inner, outer = (weights, one) if samples.per_decision else (one, weights)

        # What stands on each score: that of the token itself, and the credit of others.
        counted, own, credits = mask, self.own, self.credits
        if bound is not None and bound.kind == "value":
            counted = mask & (weights * function_of(bound.estimate)(inputs.log_ratio) <= (bound.high or 0.0))
            plain = self.without_value_bound()
            own, credits = plain.own, plain.credits
        if self.level == "completion":
            whole = torch.where(mask, inputs.log_ratio, 0.0).sum(-1, keepdim=True)
            path = own(whole).expand_as(mask)
        else:
            path = torch.where(counted, own(inputs.log_ratio), 0.0)
        is_by_token = self.baseline.name == "token-mean"
        by_token = lambda x: torch.where(mask, x - x[mask].mean(), 0.0) if is_by_token else x
        path, constant = by_token(path), torch.full_like(path, self.constant)
        if bound is not None and bound.beyond is not None:
            inside = bound.holds(samples.ratios(inputs))
            path = torch.where(inside | ~mask, path, bound.beyond[0](inputs.log_ratio))
            constant = torch.where(inside, constant, bound.beyond[1])
            counted = counted & inside
        by_length = TOKENS / mask.sum(-1, keepdim=True).clamp(min=1)
        credit = torch.zeros_like(path)
        for part in credits:
            values = torch.where(counted, part.values(inputs), 0.0)
            if part.divided:
                path = path + values * (by_length - 1)
            of_later = before if part.source != "sampled" and samples.per_decision else inner
            summed = (by_token(values) * of_later) @ part.matrix(mask.shape[1]).T
            credit = credit + (summed * by_length if part.divided else summed)
            if part.source == "sampled" and not self.baseline.covers_all:  # the token's own estimate is a credit too
                credit, path = credit + values * inner, path - values
        if self.baseline.covers_all:
            credit, path = credit + path * inner, torch.zeros_like(path)

        # What is subtracted, and the ratios.
        credit = outer * credit if samples.on_others else credit
        difference = self.baseline.centre(credit, inputs)
        if self.baseline.signed:
            difference = difference * self.baseline.signed * (credit - difference).sign()
        score = credit - (credit - difference) * weights if samples.on_others else outer * difference
        score = score + (path + constant) * weights
        if samples.pull is not None:
            score = score + samples.pull(inputs.log_weight)
        if self.entropy[0]:
            logp = torch.where(mask, inputs.logp, 0.0)
            logp = logp.sum(-1, keepdim=True) if self.entropy_of_whole else logp
            score = score + self.entropy[0] * logp * weights
        if bound is not None and bound.kind == "ppo":
            low, high, dual = bound.low or 0.0, bound.high or math.inf, bound.dual or math.inf
            is_cut = ((score < 0) & (weights > high)) | ((score > 0) & ((weights < low) | (weights > dual)))
            score = torch.where(is_cut, 0.0, score)
        if not self.ends:
            score = score * (mask.cumsum(-1) < mask.sum(-1, keepdim=True))
        live = lambda x: torch.where(mask, x, 0.0) * shares
        return live(score), live(before)

    @property
    def own_shares(self) -> dict[str, float]:
        """The known functions that the own curve is the sum of, without an estimate that is divided by the length."""
        own = dict(self.own.shares)
        largest = max(map(abs, own.values()), default=0.0)
        for part in self.credits:
            if part.divided:  # its share of the own curve is that at one length
                for name, w in part.curve.shares.items():
                    for each, sign in SLOPES.get(name, {name: 1.0}).items():
                        own[each] = own.get(each, 0.0) - sign * w
        return {name: round_short(w) for name, w in own.items() if abs(w) > self.allowed * largest}

    @property
    def shares(self) -> dict[str, float]:
        """The divergences that the coefficient of a token's own log-ratio is the slope of, with their weights.

        The value of k3 is the slope of the reverse KL minus that of the forward KL. `other` stands for a curve that
        is no sum of known slopes.
        """
        totals: dict[str, float] = {}
        known = [(self.own_shares, self.own)] + ([] if self.full is None else [(self.full.shares, self.full)])
        for shares, curve in known:
            if not shares and not curve.is_zero:
                return {"other": 1.0}
            for name, weight in shares.items():
                for each, sign in SLOPES.get(name, {name: 1.0}).items():
                    totals[each] = totals.get(each, 0.0) + sign * weight
        largest = max(map(abs, totals.values()), default=0.0)
        totals = {name: round_short(w) for name, w in totals.items() if abs(w) > self.allowed * largest}
        return {"other": 1.0} if set(totals) & set(ESTIMATES) else totals

    @property
    def scale(self) -> float:
        """By which factor the loss multiplies β near ref, in its unit."""
        curves = [c for c in (self.own, self.full) if c is not None and not c.is_zero]
        total = sum(c.scale for c in curves)
        size = max((float(c.points[1][c.points[0].abs() <= 2].abs().max()) for c in curves), default=1.0)
        return 0.0 if abs(total) < 1e-6 * size else round_short(total, 1e-6)

    @property
    def horizon(self) -> "Horizon":
        """How far a token looks ahead."""
        if self.level == "completion":
            return Horizon("all", (1.0,), None, "exact", True)
        future = [c for c in self.credits if any(c.later)]
        if not future:
            return Horizon("none", (), None, "", True)
        part = future[0]
        shares = part.curve.shares
        name = next(iter(shares), "")
        if part.source == "full":
            relative, estimate, fits = _ratio(shares, self.curve.shares) or 1.0, "exact", True
        else:
            of_excess, of_own = _ratio(shares, self.curve.excess or {}), _ratio(shares, self.own.shares)
            estimate = "excess" if of_excess is not None or (len(shares) == 1 and EXCESS in name) else "other"
            estimate = SHORT.get(name, estimate) if len(shares) == 1 else estimate
            strength = shares[name] if len(shares) == 1 else 1.0
            divergence = self.shares
            whole = divergence.get("reverse-kl", 0.0) or sum(w for n, w in divergence.items() if n != "other") or 1.0
            relative = next((x for x in (of_excess, of_own) if x is not None), strength / whole)
            is_reverse = list(divergence) == ["reverse-kl"] and not self.has_edges and estimate in ("k1", "k3")
            fits = (of_excess is not None or is_reverse) and not part.divided
        weights = tuple(round_short(w * relative, 1e-6) for w in part.later)
        if len(future) > 1:
            return Horizon("other", weights, None, "other", False)
        steps = [b / a for a, b in pairwise((1.0, *weights)) if a]
        if all(abs(step - steps[0]) <= 1e-6 for step in steps) and len(steps) == len(weights):
            is_all = abs(steps[0] - 1) <= 1e-6
            discount = None if is_all else round_short(steps[0], 1e-6)
            return Horizon("all" if is_all else "discount", weights, discount, estimate, fits)
        is_window = weights[0] == 1 and set(weights) == {0.0, 1.0} and list(weights) == sorted(weights, reverse=True)
        return Horizon("window" if is_window else "other", weights, None, estimate, fits)

    @property
    def has_past(self) -> bool:
        """Whether earlier tokens add to the coefficient of a token: mean zero on fresh samples, not on stale ones."""
        return self.level == "completion" or any(any(c.earlier) for c in self.credits)

    @property
    def baseline_drifts(self) -> bool:
        """Whether a baseline has no ratio of the token whose score it is subtracted from, so that it acts if stale."""
        s = self.samples
        is_bare = s.per_decision and not s.on_others
        if s.ratio == "none" and self.is_log_variance:
            return False
        return self.baseline.name != "none" and (is_bare or s.ratio not in ("token", "prefix", "sequence"))

    @property
    def is_sum_of_all(self) -> bool:
        """Whether the coefficient of every token is the sum of the completion's log π/ref, times one number."""
        if len(self.credits) != 1 or self.has_edges or self.is_exact:
            return False
        (part,) = self.credits
        if part.curve.has_edges or part.divided or part.later != part.earlier:
            return False
        (weight, *others) = (w * part.curve.shares.get("reverse-kl", 0.0) for w in part.later)
        return (
            set(part.curve.shares) == {"reverse-kl"}
            and not set(others) - {weight}
            and self.own_shares == {"reverse-kl": weight}
        )

    @property
    def is_log_variance(self) -> bool:
        """Whether a baseline makes that half the variance of log π/ref under any sampler: no drift is beside it."""
        is_mean = self.baseline.name in ("leave-one-out", "group-mean", "batch-mean") and self.baseline.of_ended
        return self.is_sum_of_all and is_mean and self.baseline.covers_all and not self.looks_at_length

    @property
    def looks_at_length(self) -> bool:
        """Whether what has mean zero on fresh samples, a constant or another token's credit, has one here.

        A division by the completion's length, or tokens that are left out by their place in it, make it depend on what
        follows a token.
        """
        by_length = self.unit.name == "completion-mean" or any(c.divided for c in self.credits)
        return by_length or not self.ends or not self.cut_off

    @property
    def is_exact(self) -> bool:
        """Whether a divergence over the vocabulary is differentiated."""
        return self.full is not None

    @property
    def is_of_entries(self) -> bool:
        """Whether nothing stands on the score of a sampled token: the gradient is that of sums over the vocabulary."""
        return self.is_exact and self.own.is_zero and not (self.credits or self.constant or self.samples.pull)

    @property
    def has_edges(self) -> bool:
        """Whether the coefficient is constant beyond some log-ratio."""
        return self.curve.has_edges

    @property
    def curve(self) -> Curve:
        """The coefficient as a function of the log-ratio: of the sampled token, or of an entry of the logits."""
        return self.full if self.own.is_zero and self.full is not None else self.own

    @property
    def is_misplaced(self) -> bool:
        """Whether ref is late, tokens or completions are left out, or masked positions have a gradient."""
        return self.late != 0 or not self.ends or self.leaks or not self.cut_off

    @property
    def is_nothing(self) -> bool:
        """Whether no log-ratio has an effect."""
        return not self.sees_reference or (not self.shares and not self.credits and self.proved_fresh)

    def largest_gap(self, *, stale: bool) -> float:
        """The largest share of the coefficients that the formula does not have, on stale or on fresh samples."""
        return max((gap for name, gap in self.unexplained.items() if ("stale" in name) == stale), default=1.0)

    @property
    def proved_fresh(self) -> bool:
        """Whether the formula predicts every coefficient on fresh samples."""
        return self.deterministic and self.finite and self.largest_gap(stale=False) <= self.allowed

    @property
    def proved(self) -> bool:
        """Whether the formula predicts every coefficient, on stale samples too."""
        return self.proved_fresh and self.largest_gap(stale=True) <= self.allowed

    def to_dict(self) -> dict[str, Any]:
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
                "bound": None if bound is None else bound.to_dict(),
                "pull_to_sampler": self.samples.pull.scale if self.samples.pull else 0.0,
            },
            "unit": self.unit.name,
            "mean_over_rows": self.unit.rows,
            "micro_batches": self.micro_batches.change,
            "baseline": self.baseline.name,
            "divided_by_spread": self.baseline.spread != "none" and not self.baseline.signed,
            "constant": self.constant,
            "entropy": sum(self.entropy),
            "temperature": self.temperature,
            "additive": self.level == "token" and self.baseline.spread == "none",
            "anchor": self.anchor,
            "reference_late_by": self.late,
            "end_token_has_gradient": self.ends,
            "masked_tokens_leak": self.leaks,
            "cut_off_completions_count": self.cut_off,
            "top_k": None if self.top is None else self.top.size,
            "top_k_of": None if self.top is None else self.top.of,
            "top_k_tail": None if self.top is None else self.top.tail,
            "top_k_constant": 0.0 if self.top is None else self.top.constant,
            "deterministic": self.deterministic,
            "depends_also_on": list(self.matters),
            "proved": self.proved,
            "unexplained": max(self.unexplained.values(), default=0.0),
            "unexplained_by_probe": self.unexplained,
        }

    def _divergence(self) -> dict[str, object]:
        curve = self.curve
        each: list[dict[str, object]] = [_named_part(name, weight) for name, weight in self.shares.items()]
        if "other" in self.shares:
            each = [{"name": "other", "curve": [x.tolist() for x in curve.points]}]
        named: dict[str, object] = {"name": "sum", "parts": each} if each else {"name": "nothing"}
        named = each[0] if len(each) == 1 else named
        scale = self.scale
        return named | {
            "scale": scale if math.isfinite(scale) else None,
            "level": self.level,
            "flat_below": curve.low,
            "flat_above": curve.high,
            "pull_below": None if curve.low is None else curve.below,
            "pull_above": None if curve.high is None else curve.above,
            "convex": all(c.convex for c in (self.own, self.full) if c is not None),
        }


def _named_part(name: str, weight: float) -> dict[str, object]:
    kind, _, order = name.rstrip(")").partition("(")
    parameter = {"alpha": "alpha", "jensen-shannon": "beta"}.get(kind) if order else None
    scale = weight * named(name).scale if name != "other" else 0.0
    part: dict[str, object] = {"name": kind, "scale": scale if math.isfinite(scale) else None}
    return part | {parameter: float(order)} if parameter else part


def _ratio(some: dict[str, float], others: dict[str, float]) -> float | None:
    """The factor between two sums of the same functions; None if they are not multiples of each other."""
    factors = [some[name] / others[name] for name in some] if set(some) == set(others) else []
    return factors[0] if factors and max(factors) - min(factors) <= 1e-6 * abs(factors[0]) else None


SLOPES = {"k3": {"reverse-kl": 1.0, "forward-kl": -1.0}}
"""Values of estimators that are a sum of slopes."""

SHORT = {"reverse-kl": "k1", "k2": "k2", "k3": "k3"}
"""Names of the functions of a later token's log-ratio that stand for its KL."""


@dataclass(frozen=True)
class Horizon:
    """How the tokens after it enter the coefficient of a token.

    Attributes:
        kind: `none`, `all`, `discount`, `window` or `other`.
        weights: by distance, relative to the token's own part.
        discount: of one step, for kind `discount`.
        estimate: of a later token's divergence: `k1`, `k2`, `k3`, `excess`, `exact` or `other`; empty for kind `none`.
        fits: whether its mean is the divergence that the token's own part descends.
    """

    kind: str
    weights: tuple[float, ...]
    discount: float | None
    estimate: str
    fits: bool


def tilted_divergence(curve: Curve, inputs: ProbeInputs) -> Tensor:
    """(B, T) the full-vocabulary divergence of the probes' logits."""
    batch = inputs.batch()
    policy = batch.logits.detach().log_softmax(-1)
    log_ratio = policy - batch.ref_logits.log_softmax(-1)
    values = sum(
        (w * function_of(name)(log_ratio) for name, w in (curve.excess or {}).items()), torch.zeros_like(policy)
    )
    return (policy.exp() * values).sum(-1)
