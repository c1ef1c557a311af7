"""SkyRL: the policy losses of its registry, and its corrections for a sampler that is another program.

The advantages are those of the audit, on every token, reduced as by the trainer (`loss_reduction=token_mean`, the
default). Without a correction the sampler is the policy before the update. With one (`off_policy_correction`) it is the
inference engine, and the log-probs before the update are those of the policy, as on the first update after a rollout.
`rollout_is` and `dppo` compare with the inference engine themselves. `clip_cov` and `kl_cov` choose their tokens at
random, and `cross_entropy` is no policy loss: they are left out.
"""

from typing import Any

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .one_file import standing_in
from .skyrl import modules

TYPES = ("regular", "dual_clip", "gspo", "cispo", "sapo", "rollout_is", "dppo", "importance_sampling")
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "sequence"},
    {"sequence_mask_metric": "product"},
    {"sequence_mask_metric": "geometric"},
)


def policy_losses() -> list[Subject]:
    """The types of loss, and the kinds of correction with the default type."""
    return [*(policy_loss(kind) for kind in TYPES), *(policy_loss("regular", **settings) for settings in CORRECTIONS)]


def policy_loss(kind: str, **correction: Any) -> Subject:
    """The loss of a type (`policy_loss_type`), with these settings of `off_policy_correction`."""
    config, utils = modules()["config"], modules()["utils.ppo_utils"]
    algorithm = config.AlgorithmConfig(
        policy_loss_type=kind, off_policy_correction=config.OffPolicyCorrectionConfig(**correction)
    )
    function = utils.PolicyLossRegistry.get(kind)

    def loss(batch: Batch) -> Tensor:
        mask = batch.mask.to(batch.logp.dtype)
        advantages = utils.apply_loss_reduction_to_advantages_minibatch(
            batch.advantages, mask, algorithm.loss_reduction, len(mask), mask.shape[1]
        )
        old = batch.logp.detach() if correction else batch.old_logp
        with standing_in(("loguru",)):  # which some losses import when they are called
            return function(
                batch.logp, old, advantages, algorithm, loss_mask=mask, rollout_logprobs=batch.behavior_logp
            )[0]

    settings = {"policy_loss_type": kind, **correction}
    name = " ".join(["skyrl", *(f"{name}={value}" for name, value in settings.items())])
    return Subject(name, "framework", loss, framework="skyrl")
