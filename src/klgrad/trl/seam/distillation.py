"""TRL's distillation loss, with its divergence replaced.

Touches `trl.trainer.distillation_trainer._chunked_divergence_loss` and `DistillationTrainer._compute_loss`, which calls
it by that global name. A copy of the method with another function under that name is called; the module is unchanged.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from trl.trainer import distillation_trainer as module
from trl.trainer.distillation_trainer import DistillationTrainer

from .version import ContractError, check_version

DIVERGENCE = "_chunked_divergence_loss"
PARAMETERS = (
    "student_hidden_states", "teacher_hidden_states", "student_lm_head_weight", "teacher_lm_head_weight",
    "completion_mask", "beta", "num_items_in_batch", "student_lm_head_bias", "teacher_lm_head_bias",
    "student_logit_scale", "teacher_logit_scale", "student_final_logit_softcapping",
    "teacher_final_logit_softcapping", "temperature",
)  # fmt: skip
"""Of TRL's divergence; the replacement is called with the same."""


def check_distillation() -> None:
    """Raise `ContractError` if TRL's loss does not call its divergence as this file assumes."""
    check_version()
    found = tuple(inspect.signature(getattr(module, DIVERGENCE)).parameters)
    if found != PARAMETERS:
        raise ContractError(f"{DIVERGENCE}({', '.join(PARAMETERS)})", f"parameters ({', '.join(found)})")
    code = DistillationTrainer._compute_loss.__code__
    if DIVERGENCE not in code.co_names or code.co_freevars:
        raise ContractError(f"DistillationTrainer._compute_loss that calls {DIVERGENCE}", "one that does not")


def loss_with(divergence: Callable[..., Any], trainer: DistillationTrainer, *given: Any) -> Any:
    """What TRL's `_compute_loss` returns if `divergence` stands for its own."""
    method = DistillationTrainer._compute_loss
    names = {**method.__globals__, DIVERGENCE: divergence}
    return FunctionType(method.__code__, names, argdefs=method.__defaults__)(trainer, *given)
