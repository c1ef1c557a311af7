"""The honest KL report: every estimator at once, with standard errors, in stated units.

Divergences of three kinds are often all called "kl", and never mixed here: of π to ref (`kl_report`), of the
trainer's policy to what sampled the tokens, and of π to its old self (`mismatch_report` serves both). Both are sums
over one batch; `KLSums` and `MismatchSums` take as many batches as there are, and report the same of all of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.estimators import forward_k3, k1, k2, k3
from ..core.importance import token_ratio
from ..core.rollout import Rollout
from ..core.standard_errors import Estimate, Interval
from ..errors import RolloutError
from .accumulators import Lengths, Ratios, Totals, numbers

CLAMPS = {"k3_value_10": ("kl/reverse/k3", 10.0), "k2_value_10": ("kl/reverse/k2", 10.0), "input_20": ("size", 20.0)}
"""What is clamped in common use, and where: beyond it the gradient stops."""

BAND = (0.5, 2.0)
"""Token ratios of trainer to sampler outside it are counted."""


@dataclass(frozen=True, eq=False)
class Report:
    """Named numbers about one batch: estimates with standard errors, and plain scalars.

    The number after ± is one standard error, here and in every table. `intervals` has what few clusters need: the
    quantile of Student's t distribution instead of 1.96.
    """

    estimates: dict[str, Estimate]
    scalars: dict[str, Tensor]

    @property
    def clusters(self) -> int:
        """What was drawn independently: prompts, or completions where there is one group or none."""
        return max((e.clusters for e in self.estimates.values()), default=0)

    def metrics(self) -> dict[str, float]:
        """One flat dictionary for a logger.

        An estimate's error is under `<name>/standard_error`; the number of clusters, the same for all, under
        `kl/clusters`.
        """
        named = {name: e.mean for name, e in self.estimates.items()}
        named |= {f"{name}/standard_error": e.standard_error for name, e in self.estimates.items()}
        return {**numbers(named | self.scalars), "kl/clusters": float(self.clusters)}

    def intervals(self, level: float = 0.95) -> dict[str, Interval]:
        """By the names of the estimates; see `Estimate` for what they cover."""
        return {name: e.interval(level) for name, e in self.estimates.items()}

    def __str__(self) -> str:
        rows = [(name, str(e)) for name, e in self.estimates.items()]
        rows += [(name, f"{x.item():.4g}") for name, x in self.scalars.items()]
        rows.append(("kl/clusters", str(self.clusters)))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


class KLSums:
    """What `kl_report` tells, of one batch after the other. All must have the same optional fields."""

    def __init__(self) -> None:
        self.lengths, self.ratios = Lengths(), Ratios()
        self.furthest = torch.zeros(())
        self._totals: Totals | None = None
        self._beyond = torch.zeros(len(CLAMPS), dtype=torch.long)

    def add(self, rollout: Rollout, group: Tensor | None = None) -> None:
        """One batch; `group` (B,) is numbered from 0, the same in every batch."""
        log_ratio = rollout.log_ratio
        size = log_ratio.abs()
        values = {f"kl/reverse/{k}": k.value(log_ratio) for k in (k1, k2, k3)}
        values["kl/forward/k3"] = forward_k3.value(log_ratio)
        if rollout.token_reverse_kl is not None:
            values["kl/reverse/exact"] = rollout.token_reverse_kl.detach()
        if rollout.token_forward_kl is not None:
            values["kl/forward/exact"] = rollout.token_forward_kl.detach()
        self._totals = self._totals or Totals(list(values))
        self._totals.add(list(values.values()), rollout, group)
        self.lengths.add(rollout)
        values["size"] = size
        beyond = [(values[of] > limit).sum() for of, limit in CLAMPS.values()]  # a masked token has log-ratio 0
        self._beyond = self._beyond.to(log_ratio.device) + torch.stack(beyond)
        self.furthest = torch.maximum(self.furthest.to(log_ratio), size.amax())
        if rollout.behavior_logp is not None:
            self.ratios.add(rollout)

    def report(self) -> Report:
        """Of everything so far."""
        beyond = zip(CLAMPS, self.lengths.share(self._beyond), strict=True)
        shares = {f"clamp/share_beyond_{name}": share for name, share in beyond}
        scalars = {**self.lengths.scalars(), **shares, "log_ratio/abs_max": self.furthest}
        return Report(self._totals.estimates() if self._totals else {}, scalars | self.ratios.scalars())


class MismatchSums:
    """What `mismatch_report` tells, of one batch after the other."""

    def __init__(self, band: tuple[float, float] = BAND, *, ratios: Ratios | None = None) -> None:
        """Ratios that somebody else accumulates, because they are the same, are not accumulated twice."""
        low, high = band
        if not 0 <= low <= 1 <= high:
            raise RolloutError("a band with 0 <= low <= 1 <= high", f"{band}", "write band=(0.5, 2.0), say")
        self.band, self.lengths = band, Lengths()
        self.ratios, self._own_ratios = ratios or Ratios(), ratios is None
        self.furthest = torch.zeros(())
        self._totals: Totals | None = None
        self._outside = torch.zeros((), dtype=torch.long)

    def add(self, seen: Rollout, group: Tensor | None = None) -> None:
        """One batch, with the trainer as π and the sampler both as reference and as μ."""
        # For samples of μ the log-ratio that estimates a KL without weights is log μ - log π.
        away = -seen.log_ratio
        values = {f"kl/mismatch/{k}": k.value(away) for k in (k1, k2, k3)}
        values["kl/mismatch_of_trainer/k3"] = forward_k3.value(away)
        self._totals = self._totals or Totals(list(values))
        self._totals.add(list(values.values()), seen, group)
        self.lengths.add(seen)
        if self._own_ratios:
            self.ratios.add(seen)
        ratio = token_ratio(seen)  # 1 where masked, which is inside
        outside = ((ratio < self.band[0]) | (ratio > self.band[1])).sum()
        self._outside = self._outside.to(outside.device) + outside
        self.furthest = torch.maximum(self.furthest.to(away), away.abs().amax())

    def report(self) -> Report:
        """Of everything so far."""
        scalars = self.lengths.scalars() | self.ratios.scalars()
        scalars["ratio/token/share_outside_band"] = self.lengths.share(self._outside)
        scalars["log_ratio/abs_max"] = self.furthest
        return Report(self._totals.estimates() if self._totals else {}, scalars)


def kl_report(rollout: Rollout) -> Report:
    r"""How far π is from ref on this batch.

    Estimates:
        KL(π‖ref) by k1 (of either sign), k2 (biased), k3 and, where `token_reverse_kl` is given, exactly, and
        KL(ref‖π): per completion under `.../per_sequence`, per token under `.../per_token`.
    Gradient:
        none: everything is detached.
    Requires:
        y ~ π for the estimates to mean that; `behavior_logp` adds the ratio statistics that tell, but the
        estimates are not weighted by it.
    """
    sums = KLSums()
    sums.add(rollout, _numbered(rollout.group))
    return sums.report()


def mismatch_report(
    logp: Tensor,
    behavior_logp: Tensor,
    mask: Tensor,
    *,
    band: tuple[float, float] = BAND,
    group: Tensor | None = None,
) -> Report:
    r"""How far the trainer's policy π is from μ, which sampled these tokens.

    Estimates:
        KL(μ‖π), the direction that samples of μ estimate without weights, by k1, k2 and k3; and KL(π‖μ) of
        the next token, at the sampler's prefixes.
    Gradient:
        none: everything is detached.
    Requires:
        y ~ μ. On the first mini-batch after sampling every ratio should be 1.

    Args:
        logp: (B, T) trainer's log-probs.
        behavior_logp: (B, T) sampler's log-probs.
        mask: (B, T) live tokens.
        band: token ratios outside it are counted.
        group: (B,) prompt index, for clustered errors.
    """
    sums = MismatchSums(band)
    seen = Rollout(logp, behavior_logp, mask, behavior_logp=behavior_logp, group=group)
    sums.add(seen, _numbered(seen.group))
    return sums.report()


def _numbered(group: Tensor | None) -> Tensor | None:
    return None if group is None else torch.unique(group, return_inverse=True)[1]
