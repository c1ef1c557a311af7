"""EasyR1, ROLL, Molt, open-instruct and tinker-cookbook: their KL formulae, written again from published source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .formulae import (
    OVER_COMPLETIONS,
    OVER_TOKENS,
    SUM,
    AsLoss,
    InReward,
    clipped,
    estimate,
    framework_of,
    kl_subject,
    ratio_of,
)
from .framework import Default, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch
    from .formulae import PerToken


def easyr1() -> Iterator[Subject]:
    """A fork of verl: by default k1 in the reward, with the advantages of GRPO, divided by the group's deviation."""

    def in_reward(kind: str, group_std: bool) -> PerToken:
        def terms(batch: Batch) -> Tensor:
            x = batch.ref_logp - batch.old_logp
            kl = estimate("k1", x) if kind == "kl" else estimate("k3", x.clamp(-20, 20)).clamp(-10, 10)
            score = kl.where(batch.mask, 0).sum(-1).view(-1, batch.group_size)
            others = (score.sum(-1, keepdim=True) - score) / (score.shape[1] - 1)
            standard = (score - score.mean(-1, keepdim=True)) / score.std(-1, keepdim=True).clamp(min=1e-8)
            cost = standard if group_std else score - others
            return clipped(batch, cost.view(-1, 1).expand(batch.mask.shape), 0.2, 0.3, 3.0)

        return terms

    for kind, estimator in (("kl", "grpo"), ("kl", "rloo"), ("low_var_kl", "rloo")):
        terms = in_reward(kind, estimator == "grpo")
        yield kl_subject("easyr1", f"kl_penalty={kind} adv_estimator={estimator}", terms, OVER_TOKENS)
    forms = {"kl": AsLoss("k1"), "mse": AsLoss("k2"), "low_var_kl": AsLoss("k3", log_clamp=20.0, clamp=10.0)}
    for kind, form in forms.items():
        yield kl_subject("easyr1", f"use_kl_loss kl_penalty={kind}", form, OVER_TOKENS)


def roll() -> Iterator[Subject]:
    """In the loss always k3, clamped at 10. In the reward without a critic; distillation takes a token's own KL."""
    reductions = {
        "seq-mean-token-mean": OVER_COMPLETIONS,
        "token-mean": OVER_TOKENS,
        "seq-mean-token-sum": SUM,
    }
    for name, reduction in reductions.items():
        yield kl_subject("roll", f"use_kl_loss loss_agg_mode={name}", AsLoss("k3", clamp=10.0), reduction)
    clip = (0.2, 0.2)
    for estimator, discount in (("gae", 0.95), ("reinforce", 1.0)):
        settings = f"add_token_level_kl kl_penalty=kl adv_estimator={estimator}"
        yield kl_subject("roll", settings, InReward("k1", discount, clip=clip), OVER_COMPLETIONS)
    yield kl_subject("roll", "is_pure_opd kl_penalty=kl", InReward("k1", discount=0, clip=clip), OVER_COMPLETIONS)


def molt() -> Iterator[Subject]:
    """In the reward k1 without a clamp, whitened over the batch by default; k2 and k3 are clamped at 10."""
    clip = (0.2, 0.2)
    for whitened in (True, False):
        settings = f"algo.kl in reward estimator=k1 advantage=reinforce{'' if whitened else ' no_whiten'}"
        form = InReward("k1", whitened=whitened, clip=clip)
        yield kl_subject("molt", settings, form, OVER_TOKENS, stacks=False)
    distilled = InReward("k1", discount=0, clip=clip)
    yield kl_subject("molt", "algo.kl in reward advantage=on_policy_distill", distilled, OVER_TOKENS)
    for kind, clamp in (("k1", None), ("k2", 10.0), ("k3", 10.0)):
        yield kl_subject("molt", f"algo.kl.use_loss estimator={kind}", AsLoss(kind, clamp=clamp), OVER_TOKENS)


def open_instruct() -> Iterator[Subject]:
    """Log-ratios within 40; the fourth estimate is k1 times π/π_old."""

    def per_token(number: int) -> PerToken:
        def terms(batch: Batch) -> Tensor:
            x = (batch.ref_logp - batch.logp).clamp(-40, 40)
            return -x * ratio_of(batch) if number == 3 else estimate(f"k{number + 1}", x)

        return terms

    for number in (2, 0, 1, 3):
        for denominator, reduction in (("token", OVER_TOKENS), ("N", SUM)):
            settings = f"kl_estimator={number} loss_denominator={denominator}"
            yield kl_subject("open-instruct", settings, per_token(number), reduction)


def tinker_cookbook() -> Iterator[Subject]:
    """The sampler's log-ratio as a token's advantage: for RL less its mean, for distillation as it is.

    The loss itself is computed by the Tinker service: `importance_sampling`, by its documentation minus the sum of π/μ
    times the advantage over all tokens.
    """
    from ..core.credit import to_go

    def per_token(centred: bool, discount: float) -> PerToken:
        def terms(batch: Batch) -> Tensor:
            away = (batch.behavior_logp - batch.ref_logp).where(batch.mask, 0)
            mean = away.sum() / batch.mask.sum() if centred else 0
            advantage = (mean - away).where(batch.mask, 0)
            if discount > 0:
                advantage = to_go(advantage, batch.mask, discount)
            return -advantage * (batch.logp - batch.behavior_logp).exp()

        return terms

    for path, centred in (("rl", True), ("distillation", False)):
        for discount in (0.0, 1.0):
            settings = f"{path} kl_penalty_coef kl_discount_factor={discount}"
            # The mean over the batch couples its groups.
            yield kl_subject("tinker-cookbook", settings, per_token(centred, discount), SUM, stacks=not centred)


FRAMEWORKS = (
    framework_of(
        "open-instruct",
        open_instruct,
        Source("allenai/open-instruct", "0.3.0", ("open_instruct/model_utils.py", "open_instruct/grpo_utils.py")),
        Default("k3 as a loss, beta=0.05", "open-instruct kl_estimator=2 loss_denominator=token"),
    ),
    framework_of(
        "tinker-cookbook",
        tinker_cookbook,
        Source(
            "thinking-machines-lab/tinker-cookbook",
            "0.5.8",
            ("tinker_cookbook/rl/metrics.py", "tinker_cookbook/distillation/train_on_policy.py"),
        ),
        Default(
            "no KL; with kl_penalty_coef alone raised",
            "tinker-cookbook rl kl_penalty_coef kl_discount_factor=0.0",
        ),
    ),
    framework_of(
        "easyr1",
        easyr1,
        Source(
            "hiyouga/EasyR1",
            "0.3.3.dev0",
            ("verl/trainer/core_algos.py", "verl/trainer/config.py", "verl/trainer/ray_trainer.py"),
        ),
        Default("k1 in the reward, kl_coef=0.001, advantages of GRPO", "easyr1 kl_penalty=kl adv_estimator=grpo"),
        caveats=(
            "`use_kl_loss` alone is k1 as a loss, which ignores ref: `kl_penalty` is `kl` by default, for the reward. "
            "Its example file sets `low_var_kl` with it.",
        ),
    ),
    framework_of(
        "roll",
        roll,
        Source(
            "alibaba/ROLL",
            "0.3.0",
            ("roll/utils/functionals.py", "roll/pipeline/base_worker.py", "roll/configs/base_config.py"),
        ),
        Default(
            "no KL; with use_kl_loss and kl_loss_coef alone raised",
            "roll use_kl_loss loss_agg_mode=seq-mean-token-mean",
        ),
        caveats=(
            "`init_kl_coef` is 0.2 by default and loads a reference, but the KL is used only with "
            "`add_token_level_kl` or with `use_kl_loss` and a `kl_loss_coef`, which are off.",
        ),
    ),
    framework_of(
        "molt",
        molt,
        Source(
            "NVIDIA-NeMo/labs-molt",
            "0.1.6",
            ("molt/models/utils.py", "molt/trainer/algorithm/advantage.py", "molt/trainer/workers/policy_actor.py"),
        ),
        Default(
            "k1 in the reward, algo.kl.init_coef=0.01, advantages by reinforce",
            "molt algo.kl in reward estimator=k1 advantage=reinforce",
        ),
        caveats=(
            "`--algo.kl.use_loss` with the default estimator, k1, ignores ref; the program prints a recommendation "
            "only.",
        ),
    ),
)
