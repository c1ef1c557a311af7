"""What is logged of the KL: one report per update or evaluation, or per logged row of a run that is only observed."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.result import KLResult
from ..core.rollout import Rollout
from ..integrations import AdaptiveCoefficient, total_reverse_kl, weighted_k3
from ..reports import KLSums, MismatchSums
from ..support import Json
from .compat import Mode
from .config import TRLObjective


class PromptNumbers:
    """Numbers from 0 for the keys of prompts, the same key in every batch."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(self, keys: Tensor, step: int = 0) -> Tensor:
        """(B,) numbers; the same prompt at another step is another draw."""
        return torch.tensor([self._numbers.setdefault((step, key), len(self._numbers)) for key in keys.tolist()])


class Window:
    """The KL and the mismatch to the sampler over measured steps, with standard errors of all completions together."""

    def __init__(self) -> None:
        self._sums = KLSums()
        self._mismatch = MismatchSums(ratios=self._sums.ratios)  # the same ratios, accumulated once
        self._prompts, self._step = PromptNumbers(), 0

    @property
    def is_empty(self) -> bool:
        return not self._sums.lengths.rows

    def add(self, step: int, rollout: Rollout, prompt: Tensor, *, of_the_sampler: bool) -> None:
        """Add the completions of one micro-batch of all processes, at the update `step`.

        `prompt` are (B,) keys of their prompts. `of_the_sampler`: `behavior_logp` is the sampler's own, and not the
        policy's before an update.
        """
        self._step, group = step, self._prompts.of(prompt, step)
        self._sums.add(rollout, group)
        if of_the_sampler and rollout.behavior_logp is not None:
            ends = {"behavior_logp": rollout.behavior_logp}
            self._mismatch.add(Rollout(rollout.logp, rollout.behavior_logp, rollout.mask, **ends), group)

    def metrics(self) -> dict[str, float]:
        """Finite numbers by name; a single prompt has no standard error."""
        metrics = self._sums.report().metrics()
        if self._mismatch.lengths.rows:
            prefixes = ("kl/mismatch", "ratio/token/share_outside_band")
            metrics |= {name: x for name, x in self._mismatch.report().metrics().items() if name.startswith(prefixes)}
        metrics["kl/measured_step"] = float(self._step)
        return {name: x for name, x in metrics.items() if math.isfinite(x)}


@dataclass
class MetricWindow:
    """Sums over the micro-batches of one update or evaluation, so that errors and maxima are those of the whole."""

    sums: KLSums = field(default_factory=KLSums)
    prompts: PromptNumbers = field(default_factory=PromptNumbers)
    total: Tensor | float = 0.0
    k3: Tensor | float = 0.0
    diagnostics: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, rollout: Rollout, prompt: Tensor, result: KLResult | None, unbiased: Tensor | float) -> None:
        """Add one micro-batch of all processes; `unbiased` is its KL, summed over completions."""
        self.sums.add(rollout, self.prompts.of(prompt))
        self.total = self.total + unbiased
        self.k3 = self.k3 + weighted_k3(rollout).sum()
        for name, value in (result.diagnostics if result is not None else {}).items():
            self.diagnostics.setdefault(name, []).append(value)

    def metrics(self) -> dict[str, float]:
        """Metrics by name. Where both define one, the accumulated value wins."""
        peak = lambda name, values: values.amax() if name.endswith("max") else values.mean()
        scalars = {name: peak(name, torch.stack(values)) for name, values in self.diagnostics.items()}
        report = self.sums.report()
        scalars["kl"] = torch.as_tensor(self.k3) / max(self.sums.lengths.tokens, 1)  # under TRL's name
        return replace(report, scalars=scalars | report.scalars).metrics()

    def kl(self, unit: str) -> float | None:
        """The KL to the reference, in nats per `sequence` or `token`; None if no token was live."""
        tokens = self.sums.lengths.tokens
        return float(self.total) / (tokens if unit == "token" else self.sums.lengths.rows) if tokens else None


class KLMetrics:
    """Collects micro-batches, logs their report when an update or an evaluation is complete, and adapts β."""

    def __init__(
        self, objective: TRLObjective, coefficient: AdaptiveCoefficient, log: Callable[[Mode, dict[str, float]], None]
    ) -> None:
        self._objective, self._coefficient, self._log = objective, coefficient, log
        self._windows: dict[Mode, MetricWindow] = {"train": MetricWindow(), "eval": MetricWindow()}
        self.held: tuple[Rollout, Tensor, KLResult | None] | None = None
        """A micro-batch whose report is computed while the device runs backward."""

    def record_held(self, mode: Mode, *, last: bool) -> None:
        if self.held is not None:
            self.record(mode, *self.held, last=last)
        self.held = None

    def record(self, mode: Mode, rollout: Rollout, prompt: Tensor, result: KLResult | None, *, last: bool) -> None:
        """Add a micro-batch; `last` if it completes an update or an evaluation."""
        self._windows[mode].add(rollout, prompt, result, unbiased_kl(self._objective, rollout))
        if last:
            self.finish(mode)

    def restart(self, mode: Mode) -> None:
        """Drop what was added since the last report."""
        self._windows[mode] = MetricWindow()

    def finish(self, mode: Mode) -> None:
        """Log the report of what was added since the last one, and adapt β after an update."""
        window, self._windows[mode] = self._windows[mode], MetricWindow()
        if not window.sums.lengths.rows:
            return
        report = window.metrics()
        if self._objective.top_k is not None:  # an estimate or a bound, which gets a name of its own
            report = {name.replace("/exact/", "/top_k/"): value for name, value in report.items()}
        self._log(mode, {**report, "kl/coef": self._coefficient.value})
        if mode == "train" and self._coefficient.target is not None:
            self._coefficient.update(window.kl(self._objective.target_unit))


def unbiased_kl(objective: TRLObjective, rollout: Rollout) -> Tensor | float:
    """KL(π‖ref) summed over the completions, for an adaptive β; 0 if β is constant.

    It is exact where the term is, else estimated by k3, and weighted by the declared ratio.
    """
    if objective.target is None:
        return 0.0
    weighting = objective.term.weighting if objective.term is not None else None
    whole = objective.top_k is None and rollout.token_reverse_kl is not None
    return total_reverse_kl(rollout, weighting, exact=whole)


LENGTH, KL = "length/mean", "kl/reverse/k3/per_sequence"


def warn_of_collapse(first: Json, last: Json) -> bool:
    """Warn if completions have less than half of their first length and the KL fell too, by rows of a log."""
    is_collapsed = last[KL] < first[KL] and last[LENGTH] < first[LENGTH] / 2
    if is_collapsed:
        warnings.warn(
            f"completions have shrunk from {first[LENGTH]:.0f} to {last[LENGTH]:.0f} tokens while the KL fell: the "
            "sequence-level KL is also lowered by ending early; lower the learning rate, or set kl_discount below 1",
            stacklevel=2,
        )
    return is_collapsed
