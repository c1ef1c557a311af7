"""OpenPipe ART: the KL in the advantages of its `loss_fn` (`kl_penalty_coef`).

The function receives logp, `old` = old_logp, ref_logp, the mask and the advantages of the audit, zero by default, with
a coefficient of 1. The log-ratio to the reference, of the policy (`kl_penalty_source=current_learner`, the default) or
of the samples, less its mean over the tokens of the batch, lowers the advantage of its token. The policy loss weights
log-probs by the ratio π/π_old, truncated at 5 (CISPO); with `ppo` it clips. Only this file of the package is loaded.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING

from .framework import Default, Framework
from .harness import load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

SOURCES = ("current_learner", "sample")


def subjects() -> list[Subject]:
    """Both sources of the log-ratio, and both policy losses, averaged over tokens; then the default summed."""
    default = _subject("current_learner", False, "sum")
    return [*(_subject(source, ppo, "mean") for ppo, source in product((False, True), SOURCES)), default]


def _subject(source: str, ppo: bool, reduction: str) -> Subject:
    config = {"kl_penalty_coef": 1.0, "kl_penalty_source": source, "ppo": ppo}

    def loss(batch: Batch) -> Tensor:
        inputs = _module().AlignedLossInputs(
            assistant_mask=batch.mask,
            old_logprobs=batch.old_logp,
            advantages=batch.advantages,
            weights=batch.advantages.new_ones(batch.mask.shape),
            group_ids=batch.group[:, None].expand(batch.mask.shape),
        )
        return _module().loss_fn(inputs, batch.logp, batch.ref_logp, None, config, reduction).policy_loss

    name = f"art kl_penalty_coef kl_penalty_source={source} ppo={ppo} reduction={reduction}"
    return subject("art", name, loss)


@cache
def _module() -> ModuleType:
    return load("openpipe-art", "art/loss.py", replaced=("art",), package="art")


FRAMEWORK = Framework(
    "art",
    "openpipe-art",
    "0.5.23",
    subjects,
    Default(
        "no KL; with kl_penalty_coef alone raised",
        "art kl_penalty_coef kl_penalty_source=current_learner ppo=False reduction=mean",
    ),
)
