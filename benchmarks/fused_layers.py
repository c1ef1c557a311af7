"""Liger's fused norms, rotary embeddings and gated layers: fewer passes over memory than the separate operations."""

import importlib.util
from typing import Any


def install(trainer: Any) -> None:
    """Use them in the policy and the reference, if Liger is installed and the models are Llamas on a GPU.

    They compute what transformers computes, up to rounding. Liger's loss is left out: the trainer needs log-probs.
    """
    if importlib.util.find_spec("liger_kernel") is None or trainer.accelerator.device.type != "cuda":
        return
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    for model in (trainer.model, trainer.ref_model):
        if model is not None and model.config.model_type == "llama":
            apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=model)
