"""OpenRLHF: `compute_approx_kl`, in the reward (the default) and in the loss (`--algo.kl.use_loss`).

In the loss, the function is fed `log_probs` = logp, `log_probs_base` = ref_logp, `log_probs_old` = old_logp, and summed
over the completion. In the reward, it is fed the log-probs at sampling; `compute_reward` puts it on the tokens, beside
the completion's score on the last one; `get_cumulative_returns` makes advantages of that, as for `rloo` and `dr_grpo`,
whose baselines come before the KL; and `PolicyLoss` meets logp. The package needs DeepSpeed and more to import, so the
three files that hold these are loaded.
"""

from itertools import product
from types import ModuleType

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .one_file import load

MODELS = "openrlhf.models"
STAND_INS = (
    "deepspeed",
    "ray",
    "openrlhf",
    MODELS,
    "openrlhf.trainer",
    "openrlhf.trainer.ppo_utils",
    "openrlhf.trainer.ppo_utils.experience",
    "openrlhf.trainer.ppo_utils.length_penalty",
    "openrlhf.trainer.ray",
    "openrlhf.trainer.ray.launcher",
    "openrlhf.utils",
    "openrlhf.utils.logging_utils",
    "openrlhf.utils.seqlen_balancing",
)


def subjects() -> list[Subject]:
    """In the reward: every estimator. In the loss: estimators x the switch for the unbiased gradient."""
    utils = load("openrlhf", "openrlhf/models/utils.py", stand_ins=STAND_INS)
    in_reward = [_in_reward(utils, estimator) for estimator in ("k1", "k2", "k3")]
    return [*in_reward, *(_in_loss(utils, *setting) for setting in product(("k1", "k2", "k3"), (False, True)))]


def _in_loss(utils: ModuleType, estimator: str, unbiased: bool) -> Subject:
    def loss(batch: Batch) -> Tensor:
        per_token = utils.compute_approx_kl(
            batch.logp,
            batch.ref_logp,
            log_probs_old=batch.old_logp,
            kl_estimator=estimator,
            unbiased_gradient=unbiased,
        )
        return (per_token * batch.mask).sum(-1).mean()

    name = f"openrlhf algo.kl.use_loss estimator={estimator} unbiased_gradient={unbiased}"
    return Subject(name, "framework", loss, stacks=True)


def _in_reward(utils: ModuleType, estimator: str) -> Subject:
    known = {f"{MODELS}.utils": utils}
    policy_loss = load(
        "openrlhf", "openrlhf/models/loss.py", stand_ins=STAND_INS, package=MODELS, loaded=known
    ).PolicyLoss
    maker = load(
        "openrlhf", "openrlhf/trainer/ppo_utils/experience_maker.py", stand_ins=STAND_INS, loaded=known
    ).RemoteExperienceMaker

    def loss(batch: Batch) -> Tensor:
        mask = batch.mask.to(batch.logp.dtype)
        kl = utils.compute_approx_kl(batch.old_logp, batch.ref_logp, kl_estimator=estimator).to(mask.dtype)
        reward = utils.compute_reward(batch.advantages[:, 0], 1.0, kl, action_mask=mask)
        advantages = maker.get_cumulative_returns(None, reward, mask, 1.0)
        return policy_loss()(batch.logp, batch.old_logp, advantages, action_mask=mask)[0]

    # The policy loss averages over the batch's tokens, which ties groups together.
    return Subject(f"openrlhf algo.kl in reward estimator={estimator} advantage=rloo", "framework", loss)
