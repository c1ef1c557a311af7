"""OpenRLHF: `compute_approx_kl`, as the actor's training step adds it to the loss (`--algo.kl.use_loss`).

The function is fed `log_probs` = logp, `log_probs_base` = ref_logp, `log_probs_old` = old_logp, and summed over the
completion. The package needs DeepSpeed and more to import, so its one file is loaded.
"""

from itertools import product

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .one_file import load


def subjects() -> list[Subject]:
    """Estimators x the switch for the unbiased gradient; k1 without it is the default."""
    kl = load("openrlhf", "openrlhf/models/utils.py", stand_ins=("deepspeed",)).compute_approx_kl

    def subject(estimator: str, unbiased: bool) -> Subject:
        def loss(batch: Batch) -> Tensor:
            per_token = kl(
                batch.logp,
                batch.ref_logp,
                log_probs_old=batch.old_logp,
                kl_estimator=estimator,
                unbiased_gradient=unbiased,
            )
            return (per_token * batch.mask).sum(-1).mean()

        name = f"openrlhf algo.kl.use_loss estimator={estimator} unbiased_gradient={unbiased}"
        return Subject(name, "framework", loss, stacks=True)

    return [subject(*setting) for setting in product(("k1", "k2", "k3"), (False, True))]
