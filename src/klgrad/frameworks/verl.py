"""verl: `kl_penalty` with `agg_loss`, as `ppo_loss` adds them; and the KL in the reward, end to end.

In the loss (`use_kl_loss`): `kl_penalty` is fed logp and ref_logp, and `agg_loss` reduces it. In the reward
(`use_kl_in_reward`): `apply_kl_penalty` takes the old log-probs and the reference's and writes token-level rewards,
the chosen advantage estimator turns them into advantages, and the vanilla policy loss, with its clipping, meets
logp. Scores are 0, or the completion's advantage on its last token where the audit asks for random ones.
"""
# pyright: reportMissingImports=false
# (it is audited in an environment of its own)

from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .one_file import load

TYPES = ("low_var_kl", "low_var_kl+", "kl", "kl+", "mse", "abs")
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {"norm_adv_by_std_in_grpo": True},
    "grpo without std": {"norm_adv_by_std_in_grpo": False},
    "rloo": {},
    "reinforce_plus_plus": {},
}
TOKEN_MEAN = "token-mean"


def subjects() -> list[Subject]:
    """In the loss: every type, and the default reduction. In the reward: two types x four advantage estimators."""
    in_loss = [_in_loss(kind, "seq-mean-token-sum") for kind in TYPES]
    default = [_in_loss(kind, TOKEN_MEAN) for kind in ("low_var_kl", "low_var_kl+")]
    in_reward = [_in_reward(kind, name) for kind, name in product(("kl", "low_var_kl"), ESTIMATORS)]
    return [*default, *in_loss, *in_reward]


def _in_loss(kind: str, reduction: str) -> Subject:
    from verl.trainer.ppo import core_algos

    def loss(batch: Batch) -> Tensor:
        per_token = core_algos.kl_penalty(batch.logp, batch.ref_logp, kind)
        return core_algos.agg_loss(per_token, batch.mask.to(batch.logp.dtype), reduction)

    name = f"verl use_kl_loss kl_loss_type={kind} loss_agg_mode={reduction}"
    return Subject(name, "framework", loss, stacks=reduction != TOKEN_MEAN)


def _in_reward(kind: str, estimator: str) -> Subject:
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1)
    advantage = core_algos.get_adv_estimator_fn(estimator.split()[0])

    def loss(batch: Batch) -> Tensor:
        mask = batch.mask.to(batch.logp.dtype)
        data = _proto(batch, mask)
        data, _ = _ray_trainer().apply_kl_penalty(data, core_algos.FixedKLController(1.0), kl_penalty=kind)
        advantages, _ = advantage(
            token_level_rewards=data.batch["token_level_rewards"],
            response_mask=mask,
            index=batch.group.numpy(),
            config=_algorithm(),
            **ESTIMATORS[estimator],
        )
        out, _ = core_algos.compute_policy_loss_vanilla(
            old_log_prob=batch.old_logp,
            log_prob=batch.logp,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="seq-mean-token-sum",
            config=actor,
        )
        return out

    # REINFORCE++ whitens over the whole batch; the others look at one group at a time.
    stacks = estimator != "reinforce_plus_plus"
    return Subject(
        f"verl use_kl_in_reward kl_penalty={kind} adv_estimator={estimator}", "framework", loss, stacks=stacks
    )


@cache
def _ray_trainer() -> Any:
    """The trainer's own file; its rollout server, which wants more packages than verl installs, has no part."""
    return load("verl", "verl/trainer/ppo/ray_trainer.py", stand_ins=("verl.workers.rollout.llm_server",))


def _proto(batch: Batch, mask: Tensor) -> Any:
    from verl import DataProto

    last = (torch.arange(mask.shape[1]) == mask.sum(-1, keepdim=True) - 1).to(mask.dtype)
    return DataProto.from_dict(
        {
            "response_mask": mask,
            "token_level_scores": last * batch.advantages,
            "old_log_probs": batch.old_logp,
            "ref_log_prob": batch.ref_logp,
        }
    )


def _algorithm() -> Any:
    from verl.trainer.config import AlgoConfig

    return AlgoConfig()
