"""What is looked at before a run is trusted: whether all fits together, and whether the KL starts at 0."""

import warnings
from typing import Any

import torch

from ..core.estimators import k3
from ..core.rollout import Rollout
from ..errors import MeaningError

START_KL = 1e-3
"""Nats per token: what bf16 forward passes of one model in two arrangements differ by, at most."""


def check_prompts(args: Any, prompts: int) -> None:
    """TRL drops prompts that do not fill a generation: with fewer than one needs, no update would be made."""
    needed = args.generation_batch_size // args.num_generations
    if prompts < needed:
        raise MeaningError(
            f"at least {needed} prompts, for one generation of {args.generation_batch_size} completions, "
            f"{args.num_generations} of each prompt",
            f"{prompts}",
            "not one update would be made: give more prompts, or lower per_device_train_batch_size, "
            "gradient_accumulation_steps, steps_per_generation or the number of processes, or raise num_generations",
        )


def check_built(trainer: Any) -> None:
    """What only a trainer that stands can tell: processes, adapters and experts."""
    args = trainer.args
    rows = args.per_device_train_batch_size * trainer.accelerator.num_processes
    if args.kl_baseline == "leave_one_out" and rows < 2:
        raise MeaningError(
            "micro-batches of at least 2 completions for leave-one-out",
            f"per_device_train_batch_size={rows} on one process",
            "a completion has no peers there: raise it and lower gradient_accumulation_steps, or kl_baseline='none'",
        )
    if trainer.objective.exact and trainer.aux_loss_enabled:
        raise MeaningError(
            "no router loss with kl_estimator='exact'",
            f"router_aux_loss_coef={trainer.router_aux_loss_coef}",
            "set router_aux_loss_coef=0, or choose a sampled estimator",
        )


def check_start(trainer: Any, rollout: Rollout) -> None:
    """At step 0 policy and reference are the same model; a KL that is not about 0 has a cause to be found."""
    if trainer.args.teacher is not None or trainer.state.global_step > 0 or not trainer.model.training:
        return
    value = float(k3.value(rollout.log_ratio)[rollout.mask].mean()) if bool(rollout.mask.any()) else 0.0
    if not value > START_KL:  # what is no number is told of by the rollout's own check
        return
    causes = []
    if any(m.p > 0 for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)):
        causes.append("dropout is active in the policy (disable_dropout=True)")
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        causes.append("the adapter does not start at 0, or the reference keeps it")
    dtypes = {p.dtype for m in (trainer.model, trainer.ref_model) if m is not None for p in m.parameters()}
    if len(dtypes) > 1:
        causes.append(f"policy and reference differ in dtype ({', '.join(map(str, dtypes))})")
    causes.append("the reference is another checkpoint than the policy started from")
    warnings.warn(
        f"the KL to the reference is {value:.3g} nats per token before the first update, not about 0; "
        f"likely causes: {'; '.join(causes)}",
        stacklevel=2,
    )
