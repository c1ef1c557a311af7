"""Axolotl: the KL in the loss of its asynchronous GRPO trainer, and its distillation on the teacher's top k tokens.

`AsyncGRPOTrainer._compute_loss` receives a batch with ref_logp, old_logp and the advantages of the audit, zero by
default, and its model returns logp; beta = 1, and the other settings are those of its own `AsyncGRPOConfig`, or TRL's.
Its synchronous trainer is TRL's: see trl. Distillation (`kd_trainer`) is its `distillation_loss_fn` on the logits of
the policy, with all tokens of the reference as the teacher's top k: the audit has 2 or 3. A separate test checks what
it descends with fewer. The package asks for a newer Python, so only these files are loaded.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from .framework import Default, Framework
from .harness import load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

REPLACED = ("axolotl", "trl", "transformers", "accelerate", "peft", "liger_kernel")
TOKEN_MEAN = "dapo"
PER_BATCH = (TOKEN_MEAN, "bnpo", "cispo")
"""Loss types that average over the tokens of the batch."""

DEFAULT = "axolotl async loss_type=dapo use_bias_correction_kl=False"


def subjects() -> list[Subject]:
    """Three kinds of reduction, without the bias correction, as by default, and with it; then distillation."""
    kinds = (TOKEN_MEAN, "grpo", "dr_grpo")
    return [*(_in_loss(*x) for x in product(kinds, (False, True))), *(_distilled(beta) for beta in (0.0, 0.5, 1.0))]


def _in_loss(kind: str, corrected: bool) -> Subject:
    module = modules()["async_trainer"]
    args = module.AsyncGRPOConfig()
    args.use_bias_correction_kl = corrected
    vars(args).update(delta=None, importance_sampling_level="token")
    trainer = object.__new__(module.AsyncGRPOTrainer)
    vars(trainer).update(
        args=args,
        beta=1.0,
        loss_type=kind,
        epsilon_low=0.2,
        epsilon_high=0.2,
        top_entropy_quantile=1.0,
        is_fsdp_enabled=False,
        aux_loss_enabled=False,
        use_vllm=True,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x),
        current_gradient_accumulation_steps=1,
    )

    def loss(batch: Batch) -> Tensor:
        mask = batch.mask.to(batch.logp.dtype)
        logs = {"train": defaultdict(list)}
        trainer._metrics, trainer.max_completion_length = logs, mask.shape[1]
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.logp, batch.logp.detach() * 0, None)
        data = {
            "prompt_ids": batch.tokens[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": batch.tokens,
            "completion_mask": mask,
            "advantages": batch.advantages[:, 0],
            "old_per_token_logps": batch.old_logp,
            "ref_per_token_logps": batch.ref_logp,
            "num_items_in_batch": mask.sum(),
        }
        return trainer._compute_loss(None, data)

    name = f"axolotl async loss_type={kind} use_bias_correction_kl={corrected}"
    return subject("axolotl", name, loss, stacks=kind not in PER_BATCH)


def _distilled(beta: float) -> Subject:
    def loss(batch: Batch) -> Tensor:
        return kd_loss(batch.logits[batch.mask], batch.ref_logits[batch.mask], beta) / batch.mask.sum()

    return subject("axolotl", f"axolotl kd_trainer kd_beta={beta:g}", loss)


def kd_loss(logits: Tensor, teacher_logits: Tensor, beta: float, *, k: int | None = None, **settings: Any) -> Tensor:
    """The sum of its distillation losses over the rows of logits.

    Args:
        logits: of the student.
        teacher_logits: of the teacher.
        beta: `kd_beta`.
        k: how many of the teacher's tokens it has, all by default; their probabilities add up to 1.
        settings: further arguments of its function.
    """
    import torch

    top = torch.log_softmax(teacher_logits, -1).topk(k or logits.shape[-1])
    teacher = torch.log_softmax(top.values, -1)
    function = modules()["liger"].LigerFusedLinearKLTopKLogprobFunction.distillation_loss_fn
    settings = {"normalize_topk": None, **settings}
    return function(logits, top.indices, teacher, torch.ones_like(teacher), beta=beta, **settings)


@cache
def modules() -> dict[str, ModuleType]:
    """The asynchronous trainer, and the losses of distillation with the file that they import."""
    kd = "axolotl/integrations/kd/"
    utils = load("axolotl", f"{kd}utils.py", replaced=REPLACED)
    loaded = {"axolotl.integrations.kd.utils": utils}
    return {
        "async_trainer": load("axolotl", "axolotl/core/trainers/grpo/async_trainer.py", replaced=REPLACED),
        "liger": load("axolotl", f"{kd}kernels/liger.py", replaced=REPLACED, loaded=loaded),
    }


FRAMEWORK = Framework(
    "axolotl",
    "axolotl",
    "0.21.0",
    subjects,
    Default("no KL; with beta alone raised, in the asynchronous trainer", DEFAULT),
    caveats=(
        "`trl.use_bias_correction_kl` is false by default in the asynchronous trainer and true in TRL, whose trainer "
        "is the synchronous one: with the same file one descends the forward KL, and the other the reverse KL.",
    ),
)
