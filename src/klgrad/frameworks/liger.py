"""Liger-Kernel: the part of its fused GRPO loss that follows the log-probs.

`LigerFusedLinearGRPOFunction.ppo_loss_fn` receives `per_token_logps` = logp, `ref_per_token_logps`,
`old_per_token_logps`, the mask twice (the chunk's and the batch's), one advantage per completion, beta = 1.
"""

from itertools import product

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch


def subjects() -> list[Subject]:
    """Three loss types with different reductions x ratio level x bias correction; the default comes first."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    loss_fn = LigerFusedLinearGRPOFunction.ppo_loss_fn

    def subject(loss_type: str, level: str, correction: bool) -> Subject:
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
        return Subject(name, "framework", loss, framework="liger", stacks=loss_type != "dapo")

    settings = list(product(("dapo", "grpo", "dr_grpo"), ("token", "sequence"), (False, True)))
    return [subject(*setting) for setting in settings]
