"""SkyRL: `compute_approx_kl` and `masked_mean`, as its worker makes the KL loss of them (`use_kl_loss`, the default).

The estimator is fed logp, ref_logp and the loss mask; the worker averages over each completion's tokens, then over
completions, whatever `loss_reduction` is. The package does not import on every Python, so its two files are loaded.
"""

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .one_file import load

UTILS = "skyrl/backends/skyrl_train/utils"
STAND_INS = (
    "ray",
    "jaxtyping",
    "loguru",
    "skyrl",
    "skyrl.backends",
    "skyrl.backends.skyrl_train",
    "skyrl.backends.skyrl_train.utils",
    "skyrl.backends.skyrl_train.utils.off_policy_correction_utils",
    "skyrl.backends.skyrl_train.utils.torch_utils",
    "skyrl.train",
    "skyrl.train.config",
)


def subjects() -> list[Subject]:
    """Every estimator; k3 is the default."""
    kl = load("skyrl", f"{UTILS}/ppo_utils.py", stand_ins=STAND_INS).compute_approx_kl
    mean = load("skyrl", f"{UTILS}/torch_utils.py", stand_ins=STAND_INS).masked_mean

    def subject(estimator: str) -> Subject:
        def loss(batch: Batch) -> Tensor:
            mask = batch.mask.to(batch.logp.dtype)
            per_token = kl(batch.logp, batch.ref_logp, loss_mask=mask, kl_estimator_type=estimator)
            return mean(per_token, mask, dim=-1).mean()

        return Subject(f"skyrl use_kl_loss kl_estimator_type={estimator}", "framework", loss, stacks=True)

    return [subject(estimator) for estimator in ("k3", "k1", "k2", "abs")]
