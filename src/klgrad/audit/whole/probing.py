"""`audit_whole`: what a whole policy loss does, by probes of its update as a function of the advantages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ...policy_losses import PolicyGradientName, PolicyLoss, WholeVerdict
from ...targets import TARGETS, TO_REFERENCE, WITH_GRADIENT
from ..auditing import audit
from ..measurement import Measurement
from ..subject import Subject, as_subject
from ..verdict import Comparison
from ..words import in_words
from .cases import WholeCase, whole_cases, wider_cases
from .table import POLICY_GRADIENTS
from .updates import Updates, gradient, on_scores
from .weighting import Weighting, find_weighting
from .whole_result import Drift, Side, Update, WholeResult
from .words import kl_in_words

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
