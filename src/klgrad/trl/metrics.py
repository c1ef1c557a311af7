"""What is logged, through TRL's own metrics: the honest report, the ratios, β, and lengths."""

import warnings
from typing import Any

from ..monitor import kl_report
from ..result import KLResult
from ..rollout import Rollout

COLLAPSED = 0.5
"""Lengths that have fallen below this share of their first mean, while the KL fell too, are warned of."""


def record(trainer: Any, rollout: Rollout, result: KLResult | None) -> None:
    """Append this step's numbers to TRL's, and feed β."""
    mode = "train" if trainer.model.training else "eval"
    log, report = trainer._metrics[mode], kl_report(rollout).metrics()
    if trainer.objective.top_k is not None:  # an estimate or a bound, by its own name
        report = {name.replace("/exact/", "/top_k/"): value for name, value in report.items()}
    for name, value in report.items():
        log[name].append(value)
    if result is not None:
        for name, value in result.diagnostics.items():
            log[name].append(float(value))
    log["kl/coef"].append(trainer.coefficient.value)
    if mode == "train":
        _adapt(trainer, report)
        _watch_lengths(trainer, report)


def _adapt(trainer: Any, report: dict[str, float]) -> None:
    """By an unbiased estimate: exact where it is, else k3 (unbiased too, and of less variance than k1)."""
    unit = f"per_{trainer.args.kl_target_unit}"
    name = next(n for n in (f"kl/reverse/exact/{unit}", f"kl/reverse/k3/{unit}") if n in report)
    if trainer.accelerator.sync_gradients:
        trainer.coefficient.update(report[name])


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
