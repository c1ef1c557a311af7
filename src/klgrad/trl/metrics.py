"""What is logged, through TRL's own metrics, of whole updates: the honest report, the ratios, β, and lengths."""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.estimators import k3
from ..core.importance import token_ratio
from ..core.result import KLResult
from ..core.rollout import Rollout
from ..core.term import KLTerm
from ..reports.divergence import KLSums

COLLAPSED = 0.5
"""Lengths that have fallen below this share of their first mean, while the KL fell too, are warned of."""


@dataclass
class Window:
    """The micro-batches of one update or evaluation so far: sums, so that errors and maxima are those of the whole."""

    sums: KLSums = field(default_factory=KLSums)
    total: Tensor | float = 0.0
    diagnostics: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, rollout: Rollout, group: Tensor, result: KLResult | None, unbiased: Tensor | float) -> None:
        """One micro-batch, of all processes; `unbiased` is its KL, summed over completions."""
        self.sums.add(rollout, group)
        self.total = self.total + unbiased
        for name, value in (result.diagnostics if result is not None else {}).items():
            self.diagnostics.setdefault(name, []).append(value)

    def metrics(self) -> dict[str, float]:
        """By name; what both tell, the sums tell of the whole update."""
        peak = lambda name, values: values.amax() if name.endswith("max") else values.mean()
        found = {name: peak(name, torch.stack(values)) for name, values in self.diagnostics.items()}
        report = self.sums.report()
        return replace(report, scalars=found | report.scalars).metrics()

    def kl(self, unit: str) -> float | None:
        """To the reference, in nats per `sequence` or `token`; None where no token was live."""
        tokens = self.sums.lengths.tokens
        return float(self.total) / (tokens if unit == "token" else self.sums.lengths.rows) if tokens else None


def unbiased_kl(trainer: Any, rollout: Rollout) -> Tensor | float:
    """KL(π‖ref) summed over the completions: exact where it is, else by k3; weighed by the ratio that was declared."""
    if trainer.args.kl_target is None:
        return 0.0
    objective = trainer.objective
    sampler = objective.term.weighting if objective.term is not None else None
    if sampler is not None and sampler.ratio == "token":  # on the sampler's prefixes, as the term itself
        ratio = token_ratio(rollout)
        return ((ratio if sampler.bound is None else sampler.bound(ratio)) * k3.value(rollout.log_ratio)).sum()
    whole = objective.top_k is None and rollout.token_reverse_kl is not None
    term = KLTerm(estimator="exact" if whole else "k1_k3", weighting=sampler)
    return term(rollout).value.mean * len(rollout.mask)


def record(trainer: Any, rollout: Rollout, group: Tensor, result: KLResult | None, *, last: bool) -> None:
    """Add a micro-batch, and after an update's last one finish."""
    mode = "train" if trainer.model.training else "eval"
    trainer.windows[mode].add(rollout, group, result, unbiased_kl(trainer, rollout))
    if last:
        finish(trainer, mode)


def finish(trainer: Any, mode: str) -> None:
    """Append the window's numbers to TRL's, and feed β."""
    window, trainer.windows[mode] = trainer.windows[mode], Window()
    if not window.sums.lengths.rows:
        return
    report, log = window.metrics(), trainer._metrics[mode]
    if trainer.objective.top_k is not None:  # an estimate or a bound, by its own name
        report = {name.replace("/exact/", "/top_k/"): value for name, value in report.items()}
    for name, value in {**report, "kl/coef": trainer.coefficient.value}.items():
        log[name].append(value)
    if mode == "train":
        if trainer.coefficient.target is not None:
            trainer.coefficient.update(window.kl(trainer.args.kl_target_unit))
        _watch_lengths(trainer, report)


def _watch_lengths(trainer: Any, report: dict[str, float]) -> None:
    now = report["length/mean"], report["kl/reverse/k3/per_sequence"]
    first = trainer.__dict__.setdefault("_first_lengths", now)
    if trainer.__dict__.get("_warned_of_lengths") or now[1] >= first[1]:
        return
    if now[0] < COLLAPSED * first[0]:
        trainer._warned_of_lengths = True
        warnings.warn(
            f"completions have shrunk from {first[0]:.0f} to {now[0]:.0f} tokens while the KL fell: the sequence-level "
            "KL is also lowered by ending early; lower the learning rate, or set kl_discount below 1",
            stacklevel=2,
        )
