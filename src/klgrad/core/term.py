"""`KLTerm`: a KL term told what is meant, which computes just that."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import RolloutError
from ..targets import Descends
from . import credit, meaning
from .estimators import MAX_EXPONENT, forward_k3, k3
from .importance import (
    Bound,
    Ratio,
    effective_sample_size,
    prefix_ratio,
    prefix_ratio_before,
    sequence_ratio,
    token_ratio,
)
from .meaning import Baseline, Divergence, Level, TermEstimator
from .result import KLResult, Reduction, assemble
from .rollout import Rollout


@dataclass(frozen=True)
class ImportanceWeighting:
    r"""Tokens sampled by another policy than π, weighted back by an importance ratio.

    Args:
        ratio: `token` r_t (keeps the sampler's prefixes: a target of its own), `prefix` r_1...r_t, or
            `sequence` r_1...r_T.
        bound: `Truncate`, `Clip` or `Mask`; None, said aloud, leaves it unbounded (but for the saturation at
            e^20 that keeps float32 finite). A bound limits the variance and adds bias; the result reports the
            share bounded and the effective sample size.
    """

    ratio: Ratio
    bound: Bound | None

    def __post_init__(self) -> None:
        meaning.check_weighting(self.ratio, self.bound)


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    r"""A KL term by what it means; a combination that could not mean it raises `MeaningError`.

    Estimates:
        the declared divergence, in the unit of `reduction`, unbiased unless a bound bites.
    Gradient:
        reverse, sequence: `reverse-kl-sequence`.
        reverse, token: `reverse-kl-token`, and with the token ratio off-policy `reverse-kl-token-sampler`.
        forward, token: `forward-kl-token`.
        forward, sequence: `forward-kl-sequence`.
        With a discount strictly between 0 and 1, a bound that bites, or reduction="token" over varying
        lengths it is a compromise near these, and `descends` says `unknown`.
    Requires:
        y ~ π, or `weighting=ImportanceWeighting(...)` and `Rollout.behavior_logp`.

    Args:
        divergence: `reverse` is KL(π‖ref), `forward` is KL(ref‖π).
        level: `sequence` is the gradient of the divergence between distributions over completions;
            `token` holds the visited prefixes fixed: a partial derivative of it.
        estimator: for reverse `k1`; `k1_k3` (sequence level: the present token by k1, the future by k3);
            `exact` (full vocabulary, needs `Rollout.token_reverse_kl`). For forward `k3`; `exact` at token level.
        discount: g in [0, 1] on the future, at sequence level: 0 is the token level, 1 the sequence level.
        baseline: `leave_one_out` needs `Rollout.group`. It leaves the expected gradient as it is, unless a
            ratio is bounded or reduction="token", whose own bias it then changes.
        weighting: None for on-policy, or `ImportanceWeighting`.
        influence_bound: c > 0 clips each token's own part (its log-ratio, its k3 as somebody's future) to
            [-c, c] before credit and weights: the slope of a Huber loss, without a dead zone.
        reduction: `sequence` sums over the completion, `token` averages over all live tokens.
    """

    divergence: Divergence = "reverse"
    level: Level = "sequence"
    estimator: TermEstimator = "k1"
    discount: float = 1.0
    baseline: Baseline = "none"
    weighting: ImportanceWeighting | None = None
    influence_bound: float | None = None
    reduction: Reduction = "sequence"

    def __post_init__(self) -> None:
        meaning.check(self)

    @property
    def name(self) -> str:
        """A short name, unique by meaning: `reverse-sequence-k1`, `reverse-token-exact-prefix`."""
        return meaning.name(self)

    @property
    def descends(self) -> Descends:
        """The targets whose gradients this term is, on-policy and off-policy; the audit holds it to them."""
        return meaning.descends(self)

    def __str__(self) -> str:
        return str(meaning.formula(self))

    def __call__(self, rollout: Rollout) -> KLResult:
        """Evaluate the term on one batch."""
        _check_inputs(self, rollout)
        weight, before, ratios = _weights(self.weighting, rollout)
        present, later, value = self._parts(rollout, weight, before)
        coefficient = torch.zeros_like(rollout.log_ratio) if present is None else present
        if self.level == "sequence" and later is not None:
            coefficient = coefficient + credit.future(later, rollout.mask, self.discount)
        if self.baseline == "leave_one_out":
            # The baseline is weighted like the score it multiplies: E_μ[w_t s_t] = 0, E_μ[s_t] is not.
            coefficient = coefficient - weight * credit.leave_one_out(coefficient, rollout.group)
        pathwise = before * _full_kl(self.divergence, rollout) if self.estimator == "exact" else None
        return assemble(
            rollout,
            self.reduction,
            coefficient=coefficient,
            pathwise=pathwise,
            value_per_sequence=value,
            diagnose=partial(_diagnostics, self, rollout, ratios),
        )

    def _parts(self, rollout: Rollout, weight: Tensor, before: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Weighted present coefficient (B, T), what tokens pay for later (B, T), and the value (B,)."""
        log_ratio = rollout.log_ratio
        if self.estimator == "exact":
            full = before * _full_kl(self.divergence, rollout).detach()
            return None, full, full.sum(-1)
        present = weight * self._bounded(self._slope(rollout))
        if self.divergence == "forward":
            if self.level == "sequence":
                return present, None, weight[:, 0] * forward_k3.value(log_ratio.sum(-1))
            return present, None, (weight * forward_k3.value(log_ratio)).sum(-1)
        if self.estimator == "k1":
            return present, present, (weight * log_ratio).sum(-1)
        surprise = k3.value(log_ratio)
        return present, weight * self._bounded(surprise), (weight * surprise).sum(-1)

    def _slope(self, rollout: Rollout) -> Tensor:
        """The present token's coefficient, unweighted and unbounded."""
        if self.divergence == "reverse":
            return rollout.log_ratio
        whole = self.level == "sequence"
        return k3.slope(credit.whole(rollout.log_ratio, rollout.mask) if whole else rollout.log_ratio)

    def _bounded(self, x: Tensor) -> Tensor:
        return x if self.influence_bound is None else x.clamp(-self.influence_bound, self.influence_bound)


def _full_kl(divergence: Divergence, rollout: Rollout) -> Tensor:
    full = rollout.token_reverse_kl if divergence == "reverse" else rollout.token_forward_kl
    assert full is not None  # _check_inputs has refused it
    return full


def _check_inputs(term: KLTerm, rollout: Rollout) -> None:
    if term.weighting is not None and rollout.behavior_logp is None:
        raise RolloutError(
            "`behavior_logp` for an off-policy term",
            "none",
            "pass the log-probs of what sampled the tokens, or weighting=None if that was π itself",
        )
    field = "token_reverse_kl" if term.divergence == "reverse" else "token_forward_kl"
    if term.estimator == "exact" and getattr(rollout, field) is None:
        raise RolloutError(
            f"`{field}` for estimator='exact'", "none", f"pass Rollout({field}=...), or choose a sampled estimator"
        )


def _weights(sampler: ImportanceWeighting | None, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weight of token t's own term, weight of its prefix alone, and the raw ratios for the diagnostics."""
    one = torch.ones_like(rollout.log_ratio)
    if sampler is None:
        return one, one, None
    bound = sampler.bound or (lambda ratio: ratio)
    if sampler.ratio == "token":
        raw = token_ratio(rollout)
        return bound(raw), one, raw
    if sampler.ratio == "prefix":
        raw = prefix_ratio(rollout)
        return bound(raw), bound(prefix_ratio_before(rollout)), raw
    raw = sequence_ratio(rollout)
    weight = bound(raw).expand_as(one)
    return weight, weight, raw


def _diagnostics(term: KLTerm, rollout: Rollout, ratios: Tensor | None) -> dict[str, Tensor]:
    """Without waiting for the device; masked tokens have log-ratio 0, and count for nothing."""
    live, log_ratio = rollout.mask, rollout.log_ratio
    share = lambda flags: (flags & live).sum() / live.sum().clamp(min=1).to(log_ratio.dtype)
    found = {
        "length/mean": rollout.lengths.mean(),
        "log_ratio/abs_max": log_ratio.abs().amax(),
        "log_ratio/share_saturated": share(log_ratio.abs() > MAX_EXPONENT),
    }
    if term.influence_bound is not None:
        parts = [term._slope(rollout)] + ([k3.value(rollout.log_ratio)] if term.estimator == "k1_k3" else [])
        found["influence/share_bounded"] = share(torch.stack(parts).abs().amax(0) > term.influence_bound)
    if ratios is None or term.weighting is None:
        return found
    # One weight per sample of what is weighted: a live token, or a completion (for a (B, 1) ratio).
    raw = ratios[live] if ratios.shape == live.shape else ratios[live.any(-1), 0]
    if not len(raw):
        return found
    used = raw if term.weighting.bound is None else term.weighting.bound(raw)
    found["ratio/share_bounded"] = (used != raw).to(raw.dtype).mean()
    found["ratio/effective_sample_size"] = effective_sample_size(used)
    found["ratio/max"] = raw.amax()
    return found
