"""OpenRLHF: `compute_approx_kl`, in the reward (the default) and in the loss (`--algo.kl.use_loss`).

In the loss, the function receives `log_probs` = logp, `log_probs_base` = ref_logp, `log_probs_old` = old_logp, and
`aggregate_loss` averages over the tokens of the batch, for every `--actor.loss_agg_mode`. In the reward, it receives
the log-probs at sampling; `compute_advantages_and_returns` of the experience maker adds it to the reward of each token,
adds the score of the completion to that of the last token, and computes advantages; `PolicyLoss` applies them to logp
and averages over the tokens of the batch. Baselines and the standard deviation of the group (`rloo`, `dr_grpo`,
`group_norm`, `flash_reinforce`) are applied before the KL is added, whitening (`gae`, the default, `reinforce`,
`reinforce_baseline`) after it. Importing the package needs DeepSpeed and more, so only these files are loaded.
"""

from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from ..audit import Subject
from ..audit.batch import Batch
from .harness import Critic, instead, load, untrained

MODELS, PPO_UTILS = "openrlhf.models", "openrlhf.trainer.ppo_utils"
STAND_INS = ("deepspeed", "ray", MODELS, "openrlhf.trainer", "openrlhf.utils")

ADVANTAGES = ("gae critic=0", "gae critic=0 no_std_norm", "group_norm", "rloo")


def subjects() -> list[Subject]:
    """In the reward: every kind of advantage and every estimator. In the loss: with and without `unbiased_gradient`."""
    by_advantage = [in_reward("k1", advantage) for advantage in ADVANTAGES]
    by_estimator = [in_reward(estimator, "rloo") for estimator in ("k2", "k3")]
    in_loss = [_in_loss(*setting) for setting in product(("k1", "k2", "k3"), (False, True))]
    return [*by_advantage, *by_estimator, *in_loss]


def _in_loss(estimator: str, unbiased: bool) -> Subject:
    kl, aggregate = modules()["utils"].compute_approx_kl, modules()["loss"].aggregate_loss

    def loss(batch: Batch) -> Tensor:
        per_token = kl(
            batch.logp,
            batch.ref_logp,
            log_probs_old=batch.old_logp,
            kl_estimator=estimator,
            unbiased_gradient=unbiased,
        )
        return aggregate(per_token, batch.mask.to(batch.logp.dtype))

    name = f"openrlhf algo.kl.use_loss estimator={estimator} unbiased_gradient={unbiased}"
    return Subject(name, "framework", loss, framework="openrlhf")


def in_reward(estimator: str, advantage: str, *, lambd: float = 1.0, critic: Critic = untrained) -> Subject:
    """The KL in the reward, by the method of the experience maker.

    Args:
        estimator: `--algo.kl.estimator`.
        advantage: one of `ADVANTAGES`.
        lambd: λ of GAE.
        critic: the value function of GAE.
    """
    policy_loss = modules()["loss"].PolicyLoss()

    def loss(batch: Batch) -> Tensor:
        experience = modules()["experience"].Experience(
            action_mask=batch.mask.to(batch.logp.dtype),
            kl=modules()["utils"].compute_approx_kl(batch.old_logp, batch.ref_logp, kl_estimator=estimator),
            values=critic(batch),
            rewards=batch.advantages[:, 0],
            index=list(range(len(batch.logp))),
        )
        _maker(advantage, lambd, batch.group_size).compute_advantages_and_returns([experience])
        return policy_loss(batch.logp, batch.old_logp, experience.advantages, action_mask=experience.action_mask)[0]

    name = f"openrlhf algo.kl in reward estimator={estimator} advantage={advantage}"
    better = instead(
        k1="" if estimator == "k1" else "--algo.kl.estimator k1",
        unwhitened="--algo.advantage.estimator rloo" if advantage == "gae critic=0" else "",
    )
    return Subject(name, "framework", loss, framework="openrlhf", instead=better)


def _maker(advantage: str, lambd: float, group_size: int) -> Any:
    """An experience maker with what its method reads: the arguments and the controller of β."""
    estimator, *more = advantage.split()
    chosen = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=lambd, no_std_norm="no_std_norm" in more)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=chosen),
        rollout=SimpleNamespace(n_samples_per_prompt=group_size),
        reward=SimpleNamespace(clip_range=None),
    )
    maker = object.__new__(modules()["experience_maker"].RemoteExperienceMaker)
    maker.strategy, maker.advantage_estimator = SimpleNamespace(args=args), estimator
    maker.kl_ctl = SimpleNamespace(value=1.0)
    return maker


@cache
def modules() -> dict[str, ModuleType]:
    """The loaded files by name; each can import those before it."""
    loaded: dict[str, ModuleType] = {}
    for name in (f"{MODELS}.utils", f"{MODELS}.loss", f"{PPO_UTILS}.experience", f"{PPO_UTILS}.experience_maker"):
        path, package = name.replace(".", "/") + ".py", name.rpartition(".")[0]
        loaded[name] = load("openrlhf", path, stand_ins=STAND_INS, package=package, loaded=loaded)
    return {name.rpartition(".")[2]: module for name, module in loaded.items()}


# OpenRLHF: its own `PolicyLoss`, and its corrections for a sampler that is another program (`is_correction_*`).
#
# The advantages are those of the audit, on every token. Without a correction the sampler is the policy before the
# update (`old_log_probs`). With one it is the inference engine (`rollout_log_probs`), and `old_log_probs` are those of
# the policy, as on the first update after a rollout.

LOSSES: tuple[dict[str, Any], ...] = ({}, {"dual_clip": 3.0}, {"policy_loss_type": "gspo"})
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"is_correction_level": "token", "is_correction_mode": "clip"},
    {"is_correction_level": "token", "is_correction_mode": "mask"},
    {"is_correction_level": "seq", "is_correction_mode": "mask"},
    {"is_correction_level": "seq", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
)


def policy_losses() -> list[Subject]:
    """The types of loss, and the kinds of correction with the default type."""
    return [policy_loss(**settings) for settings in (*LOSSES, *CORRECTIONS)]


def policy_loss(**settings: Any) -> Subject:
    """The loss with these arguments of `PolicyLoss`, and its defaults otherwise."""
    own = modules()["loss"].PolicyLoss(**settings)

    def loss(batch: Batch) -> Tensor:
        return own(
            batch.logp,
            batch.logp.detach() if "is_correction_level" in settings else batch.old_logp,
            batch.advantages,
            action_mask=batch.mask.to(batch.logp.dtype),
            rollout_log_probs=batch.behavior_logp,
        )[0]

    name = " ".join(["openrlhf", *(f"{name}={value}" for name, value in settings.items())])
    return Subject(name if settings else "openrlhf policy_loss_type=ppo", "framework", loss, framework="openrlhf")
