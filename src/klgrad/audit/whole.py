"""What a whole policy loss does: its KL, its drift to or from the sampler, and its policy gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from functools import cache, cached_property
from typing import Literal, cast

import torch
from torch import Tensor

from ..enumeration import every_group, population
from ..policy_losses import PolicyGradientName, PolicyLoss, WholeVerdict
from ..targets import TARGETS, TO_REFERENCE, WITH_GRADIENT
from .advice import in_words, listed, percent
from .batch import Batch, from_problem
from .gradients import Gradient, Measurement, Parts, evaluate, limit_cases, sum_over_rows
from .match import MATCH, Comparison
from .problems import Case, cases
from .procedure import audit
from .subject import Subject, as_subject

# One record for each policy gradient that a loss may have.


@dataclass(frozen=True)
class PolicyGradient:
    """A policy gradient, for advantages A that differ between completions.

    Attributes:
        name: in JSON.
        short: for the cell of a table.
        sentence: what the verdict means.
        formula: the direction of the update, which is minus the gradient of the loss; s_t is the gradient of
            log π of token t, and r_t is π/μ of token t.

    Example:
        >>> from klgrad.audit.whole import POLICY_GRADIENTS
        >>> POLICY_GRADIENTS["policy-gradient"].formula
        'E_π[A Σ_t s_t]'
    """

    name: PolicyGradientName
    short: str
    sentence: str
    formula: str


POLICY_GRADIENTS: dict[PolicyGradientName, PolicyGradient] = {
    target.name: target
    for target in (
        PolicyGradient(
            "policy-gradient",
            "the policy gradient",
            "The gradient of the expected advantage of the completions of π.",
            "E_π[A Σ_t s_t]",
        ),
        PolicyGradient(
            "policy-gradient-sampler-prefixes",
            "the policy gradient, on the sampler's prefixes",
            "Each token is weighted by its own ratio. The tokens before and after it are still those of the sampler.",
            "E_μ[A Σ_t r_t s_t]",
        ),
        PolicyGradient(
            "policy-gradient-uncorrected",
            "the policy gradient, uncorrected",
            "The completions of the sampler are used as if they were those of π.",
            "E_μ[A Σ_t s_t]",
        ),
    )
}
"""By name, simplest first: on-policy all three are equal, and the audit reports the first."""


# How a loss weights the advantages: its baseline, the weight of each length, and a division by the deviation.

Baseline = Literal["none", "group", "batch"]

DIVIDED = 1e-2
"""Largest relative difference of the weights of a loss that divides by the deviation of the group. The small number
that losses add to the deviation changes them by less than this, because the advantages are far apart
(`WholeCase.different`)."""


@dataclass(frozen=True)
class Weighting:
    """The factor on the score of a token, relative to its completion's advantage.

    Attributes:
        baseline: what is subtracted from the advantage: nothing, the mean of the group, or the mean of the batch.
        by_length: the weight of completions by their number of tokens; the first is 1.
        divided_by_deviation: whether each group is divided by its standard deviation.
    """

    baseline: Baseline
    by_length: dict[int, float]
    divided_by_deviation: bool

    @property
    def length_biased(self) -> bool:
        """Whether the weight depends on the length."""
        return any(abs(weight - 1) > DIVIDED for weight in self.by_length.values())


def find_weighting(batch: Batch, weight: Tensor) -> Weighting | None:
    """Describe the (B, T) weights that a loss gives to the tokens of a batch; None if they are none of these.

    Args:
        batch: with the advantages.
        weight: 0 where masked.

    Returns:
        The simplest description.
    """
    per_row = weight.sum(-1) / batch.mask.sum(-1)
    even = torch.where(batch.mask, weight - per_row[:, None], 0)
    if not bool(weight.isfinite().all()) or float(even.norm()) > MATCH * float(weight.norm()):
        return None
    for divided in (False, True):
        for baseline in ("none", "group", "batch"):
            expected = _expected(batch, baseline, divided)
            by_length = _by_length(batch, per_row, expected)
            fitted = torch.zeros_like(per_row)
            for length, factor in by_length.items():
                fitted += torch.where(batch.mask.sum(-1) == length, factor * expected, 0)
            off = float((per_row - fitted).norm()) / float(per_row.norm().clamp(min=torch.finfo(per_row.dtype).tiny))
            if off <= (DIVIDED if divided else MATCH) and min(by_length.values()) > 0:
                first = next(iter(by_length.values()))
                return Weighting(baseline, {n: x / first for n, x in by_length.items()}, divided)
    return None


def _expected(batch: Batch, baseline: Baseline, divided: bool) -> Tensor:
    """(B,) the advantages minus the baseline, divided by the deviation of the group if asked."""
    by_group = batch.rewards.view(-1, batch.group_size)
    mean = {
        "none": torch.zeros_like(by_group),
        "group": by_group.mean(-1, keepdim=True),
        "batch": by_group.mean().expand_as(by_group),
    }[baseline]
    apart = by_group - mean
    if divided:
        deviation = by_group.std(-1, keepdim=True)
        apart = torch.where(deviation > MATCH, apart / deviation, 0)
    return apart.flatten()


def _by_length(batch: Batch, per_row: Tensor, expected: Tensor) -> dict[int, float]:
    """The least-squares factor of each length."""
    lengths = batch.mask.sum(-1)
    found = {}
    for length in range(1, batch.mask.shape[1] + 1):
        here = lengths == length
        if not bool(here.any()):
            continue
        size = float(expected[here].square().sum())
        found[length] = float(per_row[here] @ expected[here]) / size if size else 0.0
    return found


# What a whole loss does, on-policy and off-policy.


@dataclass(frozen=True)
class Drift:
    """The update under a constant advantage, for which a right policy gradient is zero.

    Attributes:
        verdict: the divergence to the sampler that is descended or climbed, `nothing` or `unknown`.
        size: its length relative to the drift of the same loss without any correction, averaged over the problems;
            None where that is zero, as on-policy.
        towards_sampler: the mean cosine of the gradient with that of KL(sampler‖π) between completions: 1 pulls π to
            the sampler, and -1 pushes it away. None where there is no drift.
    """

    verdict: WholeVerdict
    size: float | None
    towards_sampler: float | None


@dataclass(frozen=True)
class Update:
    """The update under advantages that differ between completions.

    Attributes:
        verdict: a policy gradient, `nothing` or `unknown`.
        weighting: how the loss weights the advantages; None if the weights are not those of the advantages.
        bias: the relative distance to each policy gradient.
        cosine: the mean cosine with each.
    """

    verdict: WholeVerdict
    weighting: Weighting | None
    bias: dict[PolicyGradientName, float]
    cosine: dict[PolicyGradientName, float]


@dataclass(frozen=True)
class Side:
    """What a whole loss does with samples of one kind.

    Attributes:
        kl: the divergence that it descends at zero advantages.
        kl_in_words: the same as a noun phrase, as in the report of `klgrad audit`.
        positive: the drift under the advantage 1.
        negative: the drift under the advantage -1.
        update: the update under advantages that differ.
    """

    kl: WholeVerdict
    kl_in_words: str
    positive: Drift
    negative: Drift
    update: Update

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON: the four verdicts, and everything else in `details`."""
        details = {name: asdict(getattr(self, name)) for name in ("positive", "negative", "update")}
        return {
            "kl": self.kl,
            "drift_positive": self.positive.verdict,
            "drift_negative": self.negative.verdict,
            "policy_gradient": self.update.verdict,
            "details": {
                "drift_positive": details["positive"],
                "drift_negative": details["negative"],
                "policy_gradient": details["update"],
            },
        }


@dataclass(frozen=True)
class WholeResult:
    """The audit of a whole loss.

    Attributes:
        name: of the loss.
        summary: one line about it.
        source: where it was published; empty for other losses.
        on_policy: with samples of π.
        off_policy: with samples of another policy.

    Example:
        >>> from klgrad.audit.whole import audit_whole
        >>> found = audit_whole(lambda logp, mask, advantages: (-advantages * logp * mask).sum(-1).mean())
        >>> found.off_policy.positive.verdict
        'forward-kl-sampler-sequence'
        >>> found.off_policy.negative.verdict
        'climbs forward-kl-sampler-sequence'
        >>> found.off_policy.update.verdict
        'policy-gradient-uncorrected'
    """

    name: str
    summary: str
    source: str
    on_policy: Side
    off_policy: Side

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        sides = {"on_policy": self.on_policy.to_dict(), "off_policy": self.off_policy.to_dict()}
        return {"name": self.name, "source": self.source, "whole": sides}


# The cases of the audit of a whole loss, with one advantage per completion.
#
# They are those of the limit of large batches; and those of small batches, which are wider, with all groups in one
# call.

LEAST, MOST = -1.3, 1.7
"""The least and the largest advantage. They are not symmetric, so that no advantage and no mean of all is zero."""


@dataclass(frozen=True, eq=False)
class WholeCase(Case):
    """A case whose scale and whose targets may be its own.

    Attributes:
        number: each case has a scale of its own, because the mean length of the completions differs.
        more: the gradients of targets that depend on the advantages; if there are any, they are the only targets.
    """

    number: int = 0
    more: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def shape(self) -> tuple[int, int, bool, int | None]:
        """Unique for each case."""
        return (self.number, self.problem.space.length, self.varying, self.parts)

    @cached_property
    def targets(self) -> Mapping[str, Tensor]:
        """The gradients of the divergences, or of the targets that depend on the advantages."""
        return self.more or super().targets

    @cached_property
    def members(self) -> Tensor:
        """(M, G) every group: in the limit as often as it is likely, else once."""
        return self._groups[0]

    @cached_property
    def row_weights(self) -> Tensor:
        """(B,) by what the gradient of each row is multiplied, so that the sum is an expectation."""
        members, probability = self._groups
        return (probability * len(members)).repeat_interleave(members.shape[1])

    @cached_property
    def _groups(self) -> tuple[Tensor, Tensor]:
        if self.parts is None:
            return every_group(self.problem, self.group_size)
        members = population(self.problem, self.group_size, self.parts)
        return members, torch.full((len(members),), 1 / len(members), dtype=torch.float64)

    @cached_property
    def _without(self) -> Batch:
        return from_problem(self.problem, self.members, self.constant(0.0))

    def batch(self, advantage: Tensor) -> Batch:
        """The batch of the limit, with one advantage per completion, (N,)."""
        rewards = advantage[self.members.flatten()]
        advantages = rewards[:, None].expand(-1, self.problem.space.length).clone()
        return replace(self._without, advantages=advantages, rewards=rewards).fresh()

    def constant(self, advantage: float) -> Tensor:
        """(N,) the same advantage for every completion."""
        return torch.full((len(self.problem.space),), advantage, dtype=torch.float64)

    def different(self, draw: int) -> Tensor:
        """(N,) advantages in nearly equal steps and random order, so that no two are close and none is the mean."""
        n = len(self.problem.space)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(draw))
        share = torch.linspace(0, 1, n, dtype=torch.float64)
        return (LEAST + (MOST - LEAST) * (0.9 * share + 0.1 * share**2))[order]


@cache
def whole_cases(*, on_policy: bool, most_rows: int | None = None) -> tuple[WholeCase, ...]:
    """All cases; built once.

    Args:
        on_policy: whether the policy itself is the sampler.
        most_rows: leave out the cases with larger batches.
    """
    every = _numbered(limit_cases(on_policy))
    return tuple(case for case in every if most_rows is None or case.members.numel() <= most_rows)


@cache
def wider_cases(*, on_policy: bool) -> tuple[WholeCase, ...]:
    """The problems of small batches. They have probabilities and ratios that the limit's lack.

    One call has every group once, so they are meant for a loss whose groups do not influence each other.
    """
    return _numbered(cases(on_policy))


def _numbered(found: tuple[Case, ...]) -> tuple[WholeCase, ...]:
    return tuple(
        WholeCase(**{f.name: getattr(case, f.name) for f in fields(case)}, number=i) for i, case in enumerate(found)
    )


# The update of a loss on one case, as a function of the advantages.


@dataclass(frozen=True, eq=False)
class Updates:
    """The updates of one loss on one case.

    Attributes:
        subject: the loss.
        case: the problem and its batch.
    """

    subject: Subject
    case: WholeCase

    @cached_property
    def at_zero(self) -> Parts:
        """G(0): the derivatives of the loss by the tensors of the batch, without advantages."""
        return self._update(self.case.constant(0.0))

    def effect(self, advantage: Tensor) -> Parts:
        """G(A) - G(0), for one advantage per completion, (N,)."""
        return Parts(*(a - b for a, b in zip(self._update(advantage), self.at_zero, strict=True)))

    def as_sampler(self, advantage: Tensor) -> Tensor:
        """(B, T) what the loss adds to the log-prob of each token where π is the sampler: no ratio has an effect.

        The loss is called with `logp` set to `behavior_logp`. What it does without advantages is subtracted, and the
        sign is reversed: REINFORCE gives the advantage divided by the number of rows. It is 0 where masked.
        """
        mask = self.case.problem.space.mask[self.case.members.flatten()]
        if torch.equal(self.case.problem.logp, self.case.problem.behavior_logp):
            return torch.where(mask, -self.effect(advantage)[0], 0)
        return torch.where(mask, self._zero_as_sampler - self._as_sampler(advantage), 0)

    @cached_property
    def _zero_as_sampler(self) -> Tensor:
        return self._as_sampler(self.case.constant(0.0))

    def _as_sampler(self, advantage: Tensor) -> Tensor:
        batch = self.case.batch(advantage)
        return evaluate(self.subject, replace(batch, logp=batch.behavior_logp.clone().requires_grad_()))[1][0]

    def _update(self, advantage: Tensor) -> Parts:
        return evaluate(self.subject, self.case.batch(advantage))[1]

    @cached_property
    def is_of_single_groups(self) -> bool:
        """Whether a batch is a mean over its groups: the first, a middle and the last group alone give the same."""
        advantage, size = self.case.different(0), self.case.group_size
        batch, together = self.case.batch(advantage), self._update(advantage)
        groups = len(self.case.members)
        for i in (0, groups // 2, groups - 1):
            rows = slice(i * size, (i + 1) * size)
            alone = evaluate(self.subject, batch.part(rows))[1]
            for a, b in zip(alone, together, strict=True):
                if not torch.allclose(a, groups * b[rows], rtol=MATCH, atol=MATCH * float(a.abs().max())):
                    return False
        return True


def gradient(case: WholeCase, parts: Parts) -> Gradient:
    """The gradient on the parameters."""
    weighted = (case.row_weights.reshape(-1, *[1] * (part.dim() - 1)) * part for part in parts)
    return sum_over_rows(case.problem, case.members, Parts(*weighted))


def on_scores(case: WholeCase, weight: Tensor) -> Tensor:
    """The gradient of the loss that puts these (B, T) weights on the scores of π: minus their sum."""
    others = case.batch(case.constant(0.0)).leaves[1:]
    return gradient(case, Parts(-weight, *(torch.zeros_like(x) for x in others))).mean


# The results of `audit_whole` in words.

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


# `audit_whole`: what a whole policy loss does, by probes of its update as a function of the advantages.

DRAWS = (1, 2)
"""Seeds of the advantages that differ between completions."""

TO_SAMPLER = tuple(name for name in WITH_GRADIENT if TARGETS[name].anchor == "sampler")

FRAMEWORK_ROWS = 600
"""Rows of the largest batch of a framework's trainer, whose calls take long. It leaves four problems with pairs."""

NONE = 1e-10
"""A gradient below this share of that of one completion is zero up to rounding."""


def audit_whole(loss: object, *, name: str | None = None) -> WholeResult:
    """Find what a whole policy loss does, by exact enumeration in the limit of large batches.

    The update of the loss is probed with zero advantages, with the same advantage for all completions, and with
    advantages that differ; on samples of π, and on samples of another policy.

    Args:
        loss: as in `audit`; or a `PolicyLoss`. It receives the advantage of each completion as `advantages` (B, T) and
            as `rewards` (B,).
        name: the name in the report; by default that of the function.

    Returns:
        The verdicts, with the size of the drift and the weights of the advantages.

    Example:
        >>> from klgrad import policy_losses
        >>> from klgrad.audit.whole import audit_whole
        >>> found = audit_whole(policy_losses.get("token-is"))
        >>> found.off_policy.positive.verdict, found.off_policy.update.verdict
        ('nothing', 'policy-gradient-sampler-prefixes')
    """
    entry = loss if isinstance(loss, PolicyLoss) else None
    subject = as_subject(entry.loss, name or entry.name) if entry else as_subject(loss, name)
    on, off = (_side(subject, on_policy=on_policy) for on_policy in (True, False))
    if subject.kind != "framework" and not on.kl == off.kl == "nothing":
        kl = audit(subject)
        on = replace(on, kl=cast(WholeVerdict, kl.verdict), kl_in_words=in_words(kl))
        stale = in_words(kl, on_policy=False)
        off = replace(off, kl=cast(WholeVerdict, kl.verdict_off_policy), kl_in_words=stale)
    return WholeResult(subject.name, subject.summary, entry.source if entry else "", on, off)


def _side(subject: Subject, *, on_policy: bool) -> Side:
    rows = FRAMEWORK_ROWS if subject.kind == "framework" else None
    updates = [Updates(subject, case) for case in whole_cases(on_policy=on_policy, most_rows=rows)]
    kl = Comparison(
        [Measurement(u.case, gradient(u.case, u.at_zero)) for u in updates],
        TO_REFERENCE if on_policy else WITH_GRADIENT,
    )
    differing, weighting = _differing(updates)
    positive, negative = (drift(updates, a, _usual(differing), on_policy=on_policy) for a in (1.0, -1.0))
    update = _verdict(differing)
    if subject.kind != "framework" and {positive.verdict, negative.verdict, update} != {"unknown"}:
        # Where groups do not influence each other the size of a batch plays no role, and wider problems must agree.
        wide = [
            u for u in (Updates(subject, case) for case in wider_cases(on_policy=on_policy)) if u.is_of_single_groups
        ]
        if wide:
            also, _ = _differing(wide)
            if update not in ("unknown", _verdict(also)):
                update, differing = "unknown", also
            positive, negative = (
                _agreed(d, drift(wide, a, _usual(also), on_policy=on_policy))
                for d, a in ((positive, 1.0), (negative, -1.0))
            )
    bias: dict[PolicyGradientName, float] = {name: differing.bias[name] for name in POLICY_GRADIENTS}
    cosine: dict[PolicyGradientName, float] = {name: differing.cosine[name] for name in POLICY_GRADIENTS}
    found = _verdict(kl)
    return Side(found, kl_in_words(found), positive, negative, Update(update, weighting, bias, cosine))


def _usual(differing: Comparison) -> list[float]:
    """For each case, the size of the update of one completion, beside which a drift may be nothing."""
    return [m.gradient.typical for m in differing.measured[:: len(DRAWS)]]


def _agreed(limit: Drift, wider: Drift) -> Drift:
    """The drift in the limit; without a verdict and with the numbers of wider problems, if these contradict it."""
    return limit if limit.verdict in ("unknown", wider.verdict) else replace(wider, verdict="unknown")


def _differing(updates: Sequence[Updates]) -> tuple[Comparison, Weighting | None]:
    """The updates under advantages that differ, beside the policy gradients, and how the advantages are weighted."""
    measured: list[Measurement] = []
    weightings: list[Weighting | None] = []
    for u in updates:
        for draw in DRAWS:
            advantage = u.case.different(draw)
            batch, weight = u.case.batch(advantage), u.as_sampler(advantage)
            weightings.append(find_weighting(batch, weight))
            # The loss may scale each length and each group. If it does nothing else, the targets have its scales.
            plain = torch.where(batch.mask, batch.advantages, 0) / len(batch.mask)
            targets = policy_gradients(u.case, plain if weightings[-1] is None else weight)
            found = gradient(u.case, u.effect(advantage))
            measured.append(Measurement(replace(u.case, number=len(measured), more=targets), found))
    known = [w for w in weightings if w is not None]
    # Of pairs, a division by the deviation keeps only the sign: the groups of three tell it.
    told = max(known, key=lambda w: (w.divided_by_deviation, len(w.by_length)), default=None)
    return Comparison(measured, tuple(POLICY_GRADIENTS)), told if len(known) == len(weightings) else None


def policy_gradients(case: WholeCase, weight: Tensor) -> dict[str, Tensor]:
    """The gradient of each target, for (B, T) weights on the scores where π is the sampler."""
    log_ratio = (case.problem.logp - case.problem.behavior_logp)[case.members.flatten()]
    ratios: dict[PolicyGradientName, Tensor] = {
        "policy-gradient": log_ratio.sum(-1, keepdim=True).exp(),
        "policy-gradient-sampler-prefixes": log_ratio.exp(),
        "policy-gradient-uncorrected": torch.ones_like(log_ratio),
    }
    return {name: on_scores(case, weight * ratios[name]) for name in POLICY_GRADIENTS}


def drift(updates: Sequence[Updates], advantage: float, usual: Sequence[float], *, on_policy: bool) -> Drift:
    """The update under one advantage for all completions.

    Args:
        updates: of the loss on each case.
        advantage: of every completion.
        usual: for each case, the size of the update of one completion, to compare a zero with.
        on_policy: whether the policy is the sampler, so that there is no divergence between them.
    """
    measured, sizes, cosines = [], [], []
    for u, typical in zip(updates, usual, strict=True):
        constant = u.case.constant(advantage)
        found = gradient(u.case, u.effect(constant))
        found = replace(found, typical=max(found.typical, typical))
        measured.append(Measurement(u.case, found))
        if not on_policy:
            bare, long = float(on_scores(u.case, u.as_sampler(constant)).norm()), float(found.mean.norm())
            towards = u.case.targets["forward-kl-sampler-sequence"]
            sizes += [long / bare] if bare > NONE * found.typical else []
            cosines += [float(found.mean @ towards / towards.norm()) / long] if long > NONE * found.typical else []
    verdict = _verdict(Comparison(measured, () if on_policy else TO_SAMPLER))
    return Drift(verdict, _mean(sizes), _mean(cosines))


def _mean(numbers: list[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _verdict(found: Comparison) -> WholeVerdict:
    if found.is_nothing:
        return "nothing"
    if found.match is None:
        return "unknown"
    return cast(WholeVerdict, f"climbs {found.match.target}" if found.match.climbs else found.match.target)
