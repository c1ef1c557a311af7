"""Liger-Kernel: the part of its fused GRPO loss that follows the log-probs.

`LigerFusedLinearGRPOFunction.ppo_loss_fn` receives `per_token_logps` = logp, `ref_per_token_logps`,
`old_per_token_logps`, the mask twice (the chunk's and the batch's), one advantage per completion, beta = 1.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from ..targets import Descends
from .framework import Default, Framework
from .harness import subject
from .recommendation import DR_GRPO, Home, SettingLines, in_place

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch


def subjects() -> list[Subject]:
    """Three loss types with different reductions x ratio level x bias correction; the default comes first."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    loss_fn = LigerFusedLinearGRPOFunction.ppo_loss_fn

    def of_settings(loss_type: str, level: str, correction: bool) -> Subject:
        def loss(batch: Batch) -> Tensor:
            mask = batch.mask.to(batch.logp.dtype)
            out, _ = loss_fn(
                batch.logp,
                mask,
                batch.advantages[:, 0],
                mask,
                ref_per_token_logps=batch.ref_logp,
                old_per_token_logps=batch.old_logp,
                beta=1.0,
                loss_type=loss_type,
                max_completion_length=mask.shape[1],
                importance_sampling_level=level,
                use_bias_correction_kl=correction,
            )
            return out

        name = f"liger grpo loss_type={loss_type} importance_sampling_level={level} use_bias_correction_kl={correction}"
        # A mean over the tokens of the batch couples its groups; the other loss types are means over completions.
        return subject("liger", name, loss, stacks=loss_type != "dapo")

    settings = list(product(("dapo", "grpo", "dr_grpo"), ("token", "sequence"), (False, True)))
    return [of_settings(*setting) for setting in settings]


OWN_LOOP = {"logp": "logp", "ref_logp": "ref_logp", "mask": "mask", "behavior_logp": "behavior_logp"}


FRAMEWORK = Framework(
    "liger",
    "liger-kernel",
    "0.8.5",
    subjects,
    Default(
        "beta=0.04, k3 without bias correction",
        "liger grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=False",
    ),
    settings={
        ("reverse", "token"): SettingLines(
            "from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss\n\n"
            'loss = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dr_grpo", max_completion_length=1024, '
            "use_bias_correction_kl=True)",
            "liger grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=True",
            Descends("reverse-kl-token", "reverse-kl-token-sampler"),
            policy_loss=DR_GRPO,
        ),
        ("forward", "token"): SettingLines(
            "from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss\n\n"
            'loss = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dr_grpo", max_completion_length=1024)',
            "liger grpo loss_type=dr_grpo importance_sampling_level=token use_bias_correction_kl=False",
            Descends("forward-kl-token", "k3-token"),
            policy_loss=DR_GRPO,
        ),
    },
    home=Home(
        "the loss of your own loop: Liger's fused loss has no place for a term",
        in_place("loss = loss + beta * kl.loss", OWN_LOOP),
        "your loop",
        OWN_LOOP,
        "All are (B, T), and mask is 1 at the tokens of the completion. Call LigerFusedLinearGRPOLoss with beta=0.",
    ),
)
