"""Unsloth: its `grpo_compute_loss`, the loss of its GRPO trainer, which it generates from TRL's.

The function receives `new` = logp, `ref` = ref_logp, `old` = old_logp, the mask, one advantage per completion and
beta = 1. Its k3 is TRL's, with log-ratios clamped at 20 and the value at 10, after the ratio that corrects the bias of
the gradient has been applied. `use_bias_correction_kl` is that of the installed TRL. Importing the package needs a GPU,
so only this file of `unsloth_zoo` is loaded.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from .framework import Default, Framework
from .harness import load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

TOKEN_MEAN = "dapo"


def subjects() -> list[Subject]:
    """The three kinds of reduction x level of the ratio x bias correction; the default with a KL comes first."""
    ratios = (("token", True), ("token", False), ("sequence", True))
    return [_subject(kind, *ratio) for kind, ratio in product((TOKEN_MEAN, "grpo", "dr_grpo"), ratios)]


def _subject(kind: str, level: str, correction: bool) -> Subject:
    loss_fn = _loss_fn()

    def loss(batch: Batch) -> Tensor:
        return loss_fn(
            batch.ref_logp,
            batch.logp,
            batch.old_logp,
            None,
            batch.mask.long() * 0,
            batch.mask,
            1.0,
            batch.advantages[:, 0],
            loss_type=kind,
            importance_sampling_level=level,
            use_bias_correction_kl=correction,
            num_items_in_batch=batch.mask.sum(),
            max_completion_length=batch.mask.shape[1],
        )[0]

    name = f"unsloth grpo loss_type={kind} importance_sampling_level={level} use_bias_correction_kl={correction}"
    # A mean over the tokens of the batch couples its groups; the other loss types are means over completions.
    return subject("unsloth", name, loss, stacks=kind != TOKEN_MEAN)


@cache
def _loss_fn() -> Any:
    path = "unsloth_zoo/rl_replacements.py"
    return load("unsloth_zoo", path, replaced=("unsloth_zoo",), package="unsloth_zoo").grpo_compute_loss


FRAMEWORK = Framework(
    "unsloth",
    "unsloth_zoo",
    "2026.10.9",
    subjects,
    Default(
        "GRPO has beta=0.0, no KL; with beta alone raised, and TRL's use_bias_correction_kl",
        "unsloth grpo loss_type=dapo importance_sampling_level=token use_bias_correction_kl=True",
    ),
)
