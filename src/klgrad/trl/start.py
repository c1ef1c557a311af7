"""What is looked at before a run is trusted: whose reference it is, and whether the KL starts at 0."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import KernelInputError
from ..estimators import k3
from ..rollout import Rollout

START_KL = 1e-3
"""Nats per token: what bf16 forward passes of one model in two arrangements differ by, at most."""


@contextmanager
def named_reference(model: Any, args: Any) -> Iterator[Any]:
    """While TRL sets up, let the model's name lead to the teacher, from where TRL loads its reference."""
    if args.teacher is None:
        yield model
        return
    from transformers import AutoConfig
    from trl.trainer.utils import create_model_from_path

    student = create_model_from_path(model, **(args.model_init_kwargs or {})) if isinstance(model, str) else model
    theirs = AutoConfig.from_pretrained(args.teacher).get_text_config().vocab_size
    ours = student.config.get_text_config().vocab_size
    if theirs != ours:
        raise KernelInputError(
            "teacher and student over one vocabulary",
            f"{theirs} and {ours} entries",
            "distil within one family of tokenizers; a padded head can be cut or resized to the tokenizer's length",
        )
    name = student.config._name_or_path
    student.config._name_or_path = args.teacher
    try:
        yield student
    finally:
        student.config._name_or_path = name


def check_start(trainer: Any, rollout: Rollout) -> None:
    """At step 0 policy and reference are the same model; a KL that is not about 0 has a cause to be found."""
    if trainer.args.teacher is not None or trainer.state.global_step > 0 or not trainer.model.training:
        return
    value = float(k3.value(rollout.log_ratio)[rollout.mask].mean()) if bool(rollout.mask.any()) else 0.0
    if value <= START_KL:
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
