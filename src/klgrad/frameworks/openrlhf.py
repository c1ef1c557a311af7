"""OpenRLHF: `compute_approx_kl`, in the reward (the default) and in the loss (`--algo.kl.use_loss`).

In the loss, the function receives `log_probs` = logp, `log_probs_base` = ref_logp, `log_probs_old` = old_logp, and
`aggregate_loss` averages over the tokens of the batch, for every `--actor.loss_agg_mode`. In the reward, it receives
the log-probs at sampling; `compute_advantages_and_returns` of the experience maker adds it to the reward of each token,
adds the score of the completion to that of the last token, and computes advantages; `PolicyLoss` applies them to logp
and averages over the tokens of the batch. Baselines and the standard deviation of the group (`rloo`, `dr_grpo`,
`group_norm`, `flash_reinforce`) are applied before the KL is added, whitening (`gae`, the default, `reinforce`,
`reinforce_baseline`) after it. Importing the package needs DeepSpeed and more, so only these files are loaded.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from .framework import Framework
from .harness import bare, load, named, subject, untrained
from .run_settings import ADAPTS, SEVERAL, KLPart, Reader, Run, Why, one_of, under

if TYPE_CHECKING:
    from ..targets import Verdict
    from .harness import Batch, Critic, Subject, Tensor

STAND_INS = ("deepspeed", "ray", "openrlhf.models", "openrlhf.trainer", "openrlhf.utils")
FILES = ("models.utils", "models.loss", "trainer.ppo_utils.experience", "trainer.ppo_utils.experience_maker")

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

    return subject(f"openrlhf algo.kl.use_loss estimator={estimator} unbiased_gradient={unbiased}", loss)


def in_reward(estimator: str, advantage: str, *, lambd: float = 1.0, critic: Critic = untrained) -> Subject:
    """The KL in the reward, by the method of the experience maker; the advantage is one of `ADVANTAGES`."""
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
    unwhitened = "--algo.advantage.estimator rloo" if advantage == "gae critic=0" else ""
    return subject(name, loss, k1="" if estimator == "k1" else "--algo.kl.estimator k1", unwhitened=unwhitened)


def _maker(advantage: str, lambd: float, group_size: int) -> Any:
    """An experience maker with what its method reads: the arguments and the controller of β."""
    estimator, *more = advantage.split()
    chosen = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=lambd, no_std_norm="no_std_norm" in more)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=chosen),
        rollout=SimpleNamespace(n_samples_per_prompt=group_size),
        reward=SimpleNamespace(clip_range=None),
    )
    return bare(
        modules()["experience_maker"].RemoteExperienceMaker,
        strategy=SimpleNamespace(args=args),
        advantage_estimator=estimator,
        kl_ctl=SimpleNamespace(value=1.0),
    )


@cache
def modules() -> dict[str, ModuleType]:
    """The loaded files by name."""
    return load("openrlhf", *(f"openrlhf.{name}" for name in FILES), stand_ins=STAND_INS)


# OpenRLHF: its own `PolicyLoss`, and its corrections for a sampler that is another program (`is_correction_*`).
#
# The advantages are those of the audit, on every token. Without a correction the sampler is the policy before the
# update (`old_log_probs`). With one it is the inference engine (`rollout_log_probs`), and `old_log_probs` are those of
# the policy, as on the first update after a rollout.

LOSSES: tuple[dict[str, object], ...] = ({}, {"dual_clip": 3.0}, {"policy_loss_type": "gspo"})
CORRECTIONS: tuple[dict[str, object], ...] = (
    {"is_correction_level": "token", "is_correction_mode": "clip"},
    {"is_correction_level": "token", "is_correction_mode": "mask"},
    {"is_correction_level": "seq", "is_correction_mode": "mask"},
    {"is_correction_level": "seq", "is_correction_gating": "binary_kl", "is_correction_threshold": (0.0, 0.05)},
)


def policy_losses() -> list[Subject]:
    """The types of loss, and the kinds of correction with the default type."""
    return [policy_loss(**settings) for settings in (*LOSSES, *CORRECTIONS)]


def policy_loss(**settings: object) -> Subject:
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

    return subject(named("openrlhf", settings or {"policy_loss_type": "ppo"}), loss)


# OpenRLHF: the flags of `openrlhf.cli.train_ppo_ray`.

KNOWN: dict[str, object] = {
    **under("algo.kl.", init_coef=0.01, use_loss=False, estimator="k1", unbiased_gradient=False),
    **under("algo.advantage.", estimator="gae", no_std_norm=False),
    **under("train.", max_epochs=1, batch_size=128),
    **under("rollout.", batch_size=1024, n_samples_per_prompt=1),
}
"""The defaults of the settings that matter, read in the source of version 0.11.2."""

HARMLESS = ("algo.kl.target", "algo.kl.horizon", "kl_target", "kl_horizon", "train.ema_beta", "ema_beta")
"""What adapts β, and an average of the weights."""

OLD = {
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "kl_estimator": "algo.kl.estimator",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "max_epochs": "train.max_epochs",
    "train_batch_size": "train.batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
}
"""The names of releases before 0.10.2, by those of today; their defaults were the same."""

ONLY_OLD = ("init_kl_coef", "advantage_estimator", "rollout_batch_size", "no_advantage_std_norm")
"""Those of them that no other framework has."""

OLD_NOTE = "Flags of OpenRLHF before 0.10.2 are read as today's. The audit is of 0.11.2; older releases may differ."

WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""Estimators that are whitened over the batch after the KL is added; with `no_std_norm` only the mean is subtracted."""

BATCH_MEAN = "the mean of the batch is subtracted after the KL is added, which is right in large batches only"
WHITENING = "whitening divides the KL by the standard deviation of the batch"


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the flags, with OpenRLHF's defaults for those that are missing."""
    run = Run("openrlhf", given, KNOWN, "algo.kl.", "algo.advantage.")
    estimator = one_of("algo.kl.estimator", run["algo.kl.estimator"], ("k1", "k2", "k3"))
    run.switch_on("init_coef", 0.01, "at 0 OpenRLHF loads no reference and has no KL")
    target: Verdict = "reverse-kl-token" if run["use_loss"] else "reverse-kl-sequence"
    if run["use_loss"]:
        why = "without it the value is clamped at 10, and k1 descends nothing, k3 the forward KL"
        run.switch_on("unbiased_gradient", True, why)
        loss = f"openrlhf algo.kl.use_loss estimator={estimator} unbiased_gradient={run['unbiased_gradient']}"
        run.parts.append(KLPart("loss", loss, run["init_coef"]))
    else:
        run.parts.append(_read_reward(run, estimator))
    adapts = given.get("algo.kl.target", given.get("kl_target")) is not None
    run.notes += [ADAPTS] * bool(adapts and run["init_coef"])
    run.is_stale_above("train.batch_size", "rollout.batch_size", "rollout.n_samples_per_prompt")
    run.is_stale_by("train.max_epochs", SEVERAL, least=2)
    run.is_sampled_by("vLLM")
    return run.of("PPO", target)


def _read_reward(run: Run, estimator: str) -> KLPart:
    kind = run["algo.advantage.estimator"]
    mean_only = kind in WHITENED and run["no_std_norm"]  # the others ignore the flag
    run.change("algo.kl.estimator", "k1", Why.ONLY_K1)
    if kind in WHITENED:
        run.change("algo.advantage.estimator", "rloo", BATCH_MEAN if mean_only else WHITENING, optional=mean_only)
    advantage = ("gae critic=0" if kind == "gae" else kind) + " no_std_norm" * mean_only
    loss = f"openrlhf algo.kl in reward estimator={estimator} advantage={advantage}"
    caveat = "Audited with a critic that is 0." if kind == "gae" else ""
    return KLPart("reward", loss, run["init_coef"], caveat=caveat)


FRAMEWORK = Framework.of(
    "openrlhf",
    subjects,
    whole_losses=policy_losses,
    reader=Reader(
        "OpenRLHF",
        KNOWN,
        read_config,
        re.compile(r"(.*[./])?train_ppo(_ray)?(\.py)?"),
        beginnings=("algo.kl.", "algo.advantage.", *ONLY_OLD),
        harmless=HARMLESS,
        old=OLD,
        old_note=OLD_NOTE,
    ),
)
