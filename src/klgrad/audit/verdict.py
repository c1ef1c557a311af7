"""The name of what a loss descends, from its parts: on fresh samples and on stale ones.

A name is given where the expected gradient is that of one of `klgrad.targets`. Other divergences, a discounted future,
a mean per completion or a clamp have no name there: their parts say what they are. Every name is proved: the gradient
of the loss, summed over every outcome of small problems, has the direction of the target's.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch

from ..targets import TARGETS, TargetName, Verdict, signed
from .gradients import Measurement, unit_of
from .parts import Anatomy

Holds = Literal["always", "large-batches"]
"""Whether a verdict holds in batches of every size, or in the limit of large ones only."""

MATCH = 1e-5
"""Largest relative difference of a gradient from that of its target. In float64 it is about 1e-12, and in a loss that
casts to float32 about 1e-6; distinct targets differ by more than 1e-2 on the problems (tested)."""


class Named(NamedTuple):
    """A verdict, and the batches for which it holds; None for `unknown`."""

    verdict: Verdict
    holds: Holds | None


def name_of(a: Anatomy, measured: Sequence[Measurement], *, on_policy: bool) -> Named:
    """The name of what a loss descends, if the enumerated gradients have it."""
    verdict = fresh_name(a) if on_policy else stale_name(a)
    terms, free = _terms(a, verdict, on_policy=on_policy)
    if verdict == "unknown" or not all(_has(m, terms, free) for m in measured):
        return Named("unknown", None)
    in_every = a.unit.name in ("sum", "fixed-length") and a.baseline.name in ("none", "leave-one-out", "group-mean")
    return Named(verdict, "always" if in_every and a.baseline.spread == "none" else "large-batches")


Terms = dict[str, float]
"""A sum of targets, by their weights."""


def _has(m: Measurement, terms: Terms, free: Sequence[str]) -> bool:
    """Whether a gradient is a positive multiple of a sum of targets, but for any multiples of the free ones."""
    unit = unit_of(m.gradient.mean)
    gradient, size = m.gradient.mean / unit, m.gradient.typical / unit
    if not terms:
        return float(gradient.norm()) <= MATCH * size
    total = sum((w * m.case.targets[name] for name, w in terms.items()), torch.zeros_like(gradient))
    table = torch.stack([total / total.norm(), *(m.case.targets[name] for name in free)], -1)
    weights = torch.linalg.lstsq(table, gradient[:, None]).solution[:, 0]
    return float(weights[0]) > 0 and float((table @ weights - gradient).norm()) <= MATCH * float(gradient.norm())


def _terms(a: Anatomy, verdict: Verdict, *, on_policy: bool) -> tuple[Terms, tuple[str, ...]]:
    """The sum of targets that a verdict stands for, and the targets that a drift may add."""
    if verdict in ("nothing", "unknown"):
        return {}, ()
    if verdict != "sum-of-targets":
        climbed = TARGETS[verdict].climbed
        return {climbed or verdict: -1.0 if climbed else 1.0}, ()
    ends: dict[str, str] = {"reverse-kl": "token", "forward-kl": "token"}
    if a.level == "completion":
        ends = dict.fromkeys(ends, "sequence")
    elif a.horizon.kind == "all":  # of the forward KL it has the token's own part
        ends["reverse-kl"] = "sequence"
    terms = {f"{name}-{ends[name]}": w for name, w in a.shares.items()}
    if on_policy or len(terms) > 1:
        return terms, ()
    ((target, weight),) = terms.items()
    name = cast(Verdict, target)
    if a.samples.frozen:
        return {name: weight, "reverse-kl-sampler-sequence": -weight}, ()
    if a.baseline.name != "none":
        return {WITHOUT_RATIO[name]: weight}, ("forward-kl-sampler-sequence",)
    named = SAMPLER_PREFIXES if a.samples.ratio == "token" or _is_exact(a) else WITHOUT_RATIO
    return {named[name]: weight, "forward-kl-sampler-sequence": -a.constant}, ()


def _is_exact(a: Anatomy) -> bool:
    return a.own.is_zero and not a.credits


def fresh_name(a: Anatomy) -> Verdict:
    """With samples from π."""
    if not a.proved_fresh or any(a.entropy) or a.is_misplaced:
        return "unknown"
    if a.is_nothing or a.anchor == "sampler":  # at the sampler every log-ratio is 0
        return "unknown" if a.constant and a.unit.name == "completion-mean" else "nothing"
    return _at_level(a) if _keeps_direction(a) else "unknown"


def _keeps_direction(a: Anatomy) -> bool:
    """Whether the unit, the baseline and the bounds of the coefficient leave the direction of a target."""
    return (
        not a.has_edges
        and a.unit.name not in ("completion-mean", "other")
        and (a.baseline.name != "other" and (a.baseline.name != "token-mean" or a.horizon.kind == "none"))
        and a.baseline.spread in ("none", "batch")
    )


def _at_level(a: Anatomy) -> Verdict:
    shares, horizon = a.shares, a.horizon
    if not shares or not set(shares) <= {"reverse-kl", "forward-kl"} or horizon.kind not in ("none", "all"):
        return "unknown"
    if horizon.estimate in ("k2", "other") or (
        horizon.kind == "all" and a.level == "token" and "reverse-kl" not in shares
    ):
        return "unknown"
    if len(shares) > 1:
        return "sum-of-targets"
    ((name, weight),) = shares.items()
    return signed(cast(TargetName, f"{name}-{'sequence' if horizon.kind == 'all' else 'token'}"), climbs=weight < 0)


WITHOUT_RATIO: dict[Verdict, TargetName] = {
    "reverse-kl-token": "squared-token",
    "forward-kl-token": "k3-token",
    "reverse-kl-sequence": "squared-sequence",
}
"""By verdict on fresh samples, the mean under the sampler that the same coefficients descend on stale ones."""

SAMPLER_PREFIXES: dict[Verdict, TargetName] = {
    "reverse-kl-token": "reverse-kl-token-sampler",
    "forward-kl-token": "forward-kl-token-sampler",
}
"""The same for the ratio of the token itself, and for the exact KL without a ratio."""


def stale_name(a: Anatomy) -> Verdict:
    """With samples from another policy."""
    if not a.proved or any(a.entropy) or a.is_misplaced or a.unit.name in ("completion-mean", "other"):
        return "unknown"
    ratio, bound = a.samples.ratio, a.samples.bound
    if a.anchor == "sampler":
        return "reverse-kl-sampler-token-sampler" if ratio == "token" and a.shares == {"reverse-kl": 1.0} else "unknown"
    if a.is_nothing:
        if not a.constant or (ratio in ("token", "prefix", "sequence") and bound is None and a.samples.constant):
            return "nothing"
        return signed("forward-kl-sampler-sequence", climbs=a.constant > 0) if ratio == "none" else "unknown"
    if bound is not None or not _keeps_direction(a):
        return "unknown"
    fresh = _at_level(a)
    plain = cast(Verdict, fresh.removeprefix("climbs "))
    if a.samples.frozen:  # KL(π‖ref) minus KL(π‖μ)
        return "sum-of-targets" if ratio in ("prefix", "sequence") and plain == "reverse-kl-sequence" else "unknown"
    if ratio in ("prefix", "sequence"):
        return fresh
    if ratio == "token":
        named = SAMPLER_PREFIXES.get(plain)
    elif (
        ratio == "none"
        and plain == "reverse-kl-sequence"
        and a.has_past
        and a.horizon.estimate == "k1"
        and a.baseline.name != "none"
    ):
        return "sum-of-targets"  # its mean under the sampler, and the drift that the baseline makes
    elif ratio == "none" and a.baseline.name == "none":
        named = (SAMPLER_PREFIXES if _is_exact(a) else WITHOUT_RATIO).get(plain)
    else:
        named = None
    if named is None:
        return "unknown"
    if a.constant and not (ratio == "token" and a.samples.constant):
        return "sum-of-targets"
    return signed(named, climbs=fresh != plain)
