"""What a run trains, in words: the audit of the trainer's own loss with the settings of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import torch

from ...adapters.trl import declared
from ...adapters.trl_settings import audited_settings
from ...audit import LargeBatchResult, audit_in_large_batches
from ...audit.large_batches import BATCH_SIZES
from ...audit.numbers import percent
from ...audit.words import in_sum, small_batches
from ...targets import TARGETS
from ...trl import KLConfig
from ...trl.config_checks import stale

OVER_ALL_TOKENS = ("dapo", "cispo", "vespo")
"""Loss types that divide by the tokens of all completions of a generation, of all processes."""

NEAR = 0.5
"""A loss that is farther from every target, relatively, is near none."""


def trained_lines(training: KLConfig) -> list[str]:
    """What the KL of a run descends, on fresh samples, and on stale ones where the settings make them stale.

    The trainer's own loss is summed over every outcome of small problems, which takes a few seconds.

    Args:
        training: the settings of the trainer.

    Returns:
        One line for each kind of samples.
    """
    if training.kl_coef == 0:
        return ["no KL: kl_coef is 0"]
    with _one_thread():
        found = audited(training, on_policy=True)
        lines = [f"on fresh samples: {_sentence(found)}{_batches(found, training)}"]
        why = stale(training)
        if why is not None:
            lines.append(f"on stale samples ({why}), {_ratio(training)}: {_on_stale(training)}")
    return lines


def audited(training: KLConfig, *, on_policy: bool) -> LargeBatchResult:
    """The audit of the trainer's loss; done once for all runs whose settings act alike on the KL."""
    settings = audited_settings(training)
    if training.loss_type == "bnpo" and completions_in_mean(training) == 1:
        settings["loss_type"] = "grpo"  # the tokens of a forward pass are those of one completion
    return _audited(tuple(settings.items()), on_policy)


@cache
def _audited(settings: tuple[tuple[str, Any], ...], on_policy: bool) -> LargeBatchResult:
    return audit_in_large_batches(declared(**dict(settings)), on_policy=on_policy)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: the tensors of an audit are so small that more threads slow it down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sentence(found: LargeBatchResult) -> str:
    """What the loss does in large batches."""
    if found.verdict == "sum-of-targets" and found.decomposition is not None:
        return f"descends the sum of two targets: {in_sum(found.decomposition)}"
    if found.verdict == "unknown":
        # Over all problems, or over the small ones with varying lengths, where a mean may be off by more.
        bias = max(found.bias, found.bias_by_batch.get("limit", 0.0))
        if bias > NEAR:
            return "descends no known divergence, and is near none"
        off = f"{percent(bias)} off in large batches of the audit's problems"
        return f"descends no known divergence (nearest: {TARGETS[found.nearest].phrase}, {off})"
    return TARGETS[found.verdict].does + (", at a scale that depends on the batch" if found.scale_varies else "")


def _batches(found: LargeBatchResult, training: KLConfig) -> str:
    """For which batches it does, and what is known of this run's."""
    if found.holds == "always":
        return ", in batches of any size"
    if found.holds is None:
        return ""
    off, count = small_batches(found), completions_in_mean(training)
    if not off:
        return ", in large batches"
    nearer = ", and is nearer" if count > max(BATCH_SIZES) else ""
    return f", in large batches (measured: {off}; this run averages over {count}{nearer})"


def completions_in_mean(training: Any) -> int:
    """How many completions share the statistics of a batch, such as its number of tokens."""
    if training.objective.reduction == "policy" and training.loss_type in OVER_ALL_TOKENS:
        return training.generation_batch_size
    alone = training.objective.reduction == "policy"  # a loss of the zoo with its own reduction sees all processes
    return training.per_device_train_batch_size * (1 if alone else training.world_size)


def _ratio(training: KLConfig) -> str:
    if training.kl_placement != "loss":
        return f"with the ratio of TRL's policy loss, since the KL is in the {training.kl_placement}"
    if training.objective.is_weighted:
        return f"weighted by kl_ratio={training.kl_ratio!r}, kl_ratio_bound={training.kl_ratio_bound!r}"
    return "with kl_ratio='none'"


def _on_stale(training: KLConfig) -> str:
    found = audited(training, on_policy=False)
    said = f"{_sentence(found)}{_batches(found, training)}"
    bounded = training.kl_ratio_bound != "none" and (training.objective.is_weighted or training.kl_top_k)
    if found.verdict != "unknown" or not bounded:
        return said
    unbounded = audited(_without_bound(training), on_policy=False)
    if unbounded.verdict == "unknown":
        return said
    return f"{said}; where no ratio reaches its bound, it {_sentence(unbounded)}{_batches(unbounded, training)}"


def _without_bound(training: KLConfig) -> KLConfig:
    found = copy(training)
    found.kl_ratio_bound = "none"
    return found
