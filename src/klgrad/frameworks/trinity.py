"""Trinity-RFT: every function of its KL registry, as the loss (`kl_loss_fn`, on by default).

`calculate_kl_loss` receives `logprob` = logp, `ref_logprob` = ref_logp, `old_logprob` = old_logp and the mask, with
kl_coef = 1, and reduces by `loss_agg_mode` itself. The registry's functions in the reward (`kl_penalty_fn`, off by
default) go through verl's advantages: see verl. Only these two files of the package are loaded, which does not import
without Ray and verl.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from .framework import Default, Framework
from .harness import load, subject

if TYPE_CHECKING:
    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

ALGORITHM = "trinity.algorithm"
FUNCTIONS = {
    "k2": "K2Fn",
    "k1": "K1Fn",
    "k3": "K3Fn",
    "low_var_kl": "LowVarKLFn",
    "abs": "AbsFn",
    "corrected_k3": "CorrectedK3Fn",
}
"""The classes of the registry by their names in a configuration; the default comes first."""

TOKEN_MEAN, SUM = "token-mean", "seq-mean-token-sum"


def subjects() -> list[Subject]:
    """Every function, summed over each completion, and the default with its default reduction."""
    return [_subject("k2", TOKEN_MEAN), *(_subject(name, SUM) for name in FUNCTIONS)]


def _subject(kind: str, reduction: str) -> Subject:
    kl = getattr(_functions(), FUNCTIONS[kind])(kl_coef=1.0)

    def loss(batch: Batch) -> Tensor:
        return kl.calculate_kl_loss(batch.logp, batch.ref_logp, batch.mask, reduction, batch.old_logp)[0]

    name = f"trinity kl_loss_fn={kind} loss_agg_mode={reduction}"
    return subject("trinity", name, loss, stacks=reduction != TOKEN_MEAN)


@cache
def _functions() -> ModuleType:
    utils = load("trinity-rft", "trinity/algorithm/utils.py")
    loaded = {f"{ALGORITHM}.utils": utils}
    return load("trinity-rft", "trinity/algorithm/kl_fn/kl_fn.py", replaced=("trinity",), loaded=loaded)


FRAMEWORK = Framework(
    "trinity",
    "trinity-rft",
    "0.6.0",
    subjects,
    Default(
        "k2 as a loss, kl_coef=0.001",
        "trinity kl_loss_fn=k2 loss_agg_mode=token-mean",
    ),
)
