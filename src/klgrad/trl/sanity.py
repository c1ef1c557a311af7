"""Checks before a run is trusted: settings that only a built trainer can judge, and a KL that starts at 0."""

import warnings
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from ..core.estimators import k3
from ..core.rollout import Rollout
from ..errors import MeaningError
from .attention import warn_of_cudnn_attention
from .config import KLConfig
from .objective import Objective
from .seam.models import attention_of, has_adapters
from .seam.state import current_mode

START_KL = 1e-3
"""Nats per token by which two bf16 forward passes of one model may differ, at most."""


def check_prompts(args: KLConfig, prompts: int) -> None:
    """Raise `MeaningError` for fewer prompts than one generation needs: TRL drops them, and would make no update."""
    needed = (args.generation_batch_size or 0) // (args.num_generations or 1)
    if prompts < needed:
        raise MeaningError(
            f"at least {needed} prompts, for one generation of {args.generation_batch_size} completions, "
            f"{args.num_generations} of each prompt",
            f"{prompts}",
            "not one update would be made: give more prompts, or lower per_device_train_batch_size, "
            "gradient_accumulation_steps, steps_per_generation or the number of processes, or raise num_generations",
        )


def check_built(trainer: GRPOTrainer, args: KLConfig, objective: Objective) -> None:
    """Raise `MeaningError` for settings that do not fit the number of processes or the model; warn of bad gradients."""
    half = bool(args.bf16 or args.fp16)
    warn_of_cudnn_attention(trainer.accelerator.device, attention_of(trainer.model), half=half)
    rows = args.per_device_train_batch_size * trainer.accelerator.num_processes
    if objective.leaves_one_out and rows < 2:
        raise MeaningError(
            "micro-batches of at least 2 completions for leave-one-out",
            f"per_device_train_batch_size={rows} on one process",
            "a completion has no peers there: raise it and lower gradient_accumulation_steps, or kl_baseline='none'",
        )
    each, steps = args.per_device_train_batch_size, args.steps_per_generation or 1
    if objective.compares_completions and not whole_groups(each, rows, steps, trainer.num_generations or 1):
        raise MeaningError(
            f"micro-batches of whole groups of {trainer.num_generations} completions for kl_cell={args.kl_cell!r}",
            f"{each} completions on each process, {rows} on all, in {steps} micro-batches per generation",
            "make per_device_train_batch_size a multiple of num_generations, and lower gradient_accumulation_steps "
            "instead; with steps_per_generation=1 a multiple on all processes together is enough",
        )
    if objective.exact and trainer.aux_loss_enabled:
        raise MeaningError(
            "no router loss with kl_estimator='exact'",
            f"router_aux_loss_coef={trainer.router_aux_loss_coef}",
            "set router_aux_loss_coef=0, or choose a sampled estimator",
        )


def whole_groups(each: int, rows: int, steps: int, generations: int) -> bool:
    """Whether each micro-batch of all processes consists of whole groups.

    A process has adjacent rows of a generation, and cuts them into its micro-batches by itself: with more than one of
    them, a group that lies in two processes is never whole.

    Args:
        each: rows of a micro-batch on one process.
        rows: rows of a micro-batch on all processes.
        steps: micro-batches of one generation.
        generations: rows of a group.
    """
    return each % generations == 0 or (steps == 1 and rows % generations == 0)


class StartCheck:
    """Warns if the KL is not about 0 on the first completions that are trained on.

    Before the first update the policy and the reference are the same model, unless the reference is a teacher.
    """

    def __init__(self, trainer: GRPOTrainer, args: KLConfig) -> None:
        self._trainer, self._args = trainer, args
        self._done = False

    def __call__(self, rollout: Rollout) -> None:
        """Look at the first rollout of training, and at no other."""
        trainer = self._trainer
        if self._done or current_mode(trainer) == "eval":
            return
        self._done = True
        if self._args.teacher is not None or trainer.state.global_step > 0:
            return
        value = float(k3.value(rollout.log_ratio)[rollout.mask].mean()) if bool(rollout.mask.any()) else 0.0
        if value > START_KL:  # the rollout's own check reports a NaN
            warnings.warn(
                f"the KL to the reference is {value:.3g} nats per token before the first update, not about 0; "
                f"likely causes: {'; '.join(self._causes())}",
                stacklevel=2,
            )

    def _causes(self) -> list[str]:
        trainer, found = self._trainer, []
        models: list[Any] = [each for each in (trainer.model, trainer.ref_model) if each is not None]
        if any(m.p > 0 for m in models[0].modules() if isinstance(m, torch.nn.Dropout)):
            found.append("dropout is active in the policy (disable_dropout=True)")
        if has_adapters(trainer.accelerator.unwrap_model(trainer.model)):
            found.append("the adapter does not start at 0, or the reference keeps it")
        dtypes = {parameter.dtype for model in models for parameter in model.parameters()}
        if len(dtypes) > 1:
            found.append(f"policy and reference differ in dtype ({', '.join(map(str, dtypes))})")
        return [*found, "the reference is another checkpoint than the policy started from"]
