"""Frameworks whose code is not installed: their KL formulae, written again from the published source.

What is audited here is this transcription of a formula, at the version named in `klgrad.frameworks`, and not the
framework's code. Casts to float32 and the 1e-8 in denominators are left out, and so are critics: their values are 0.
A test compares each with its coefficient on ∇log π, found by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .framework import Default, Framework, Source
from .harness import subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ..audit import Subject
    from ..audit.batch import Batch

    PerToken = Callable[[Batch], Tensor]


OVER_TOKENS, OVER_COMPLETIONS, SUM = "a mean over tokens", "a mean per completion", "a sum per completion"


def subjects(framework: str) -> list[Subject]:
    """The settings of one framework that affect the KL; the default comes first."""
    return list(FORMULAE[framework]())


def kl_subject(
    framework: str, settings: str, per_token: PerToken, reduction: str, stacks: bool | None = None
) -> Subject:
    """The terms (B, T) of a KL, reduced, as a loss to audit."""
    from ..core.result import reduce

    def loss(batch: Batch) -> Tensor:
        terms = per_token(batch)
        if reduction == OVER_COMPLETIONS:
            terms = terms / batch.mask.sum(-1, keepdim=True)
        return reduce(terms, batch.rollout(), "token" if reduction == OVER_TOKENS else "sequence")

    stacks = reduction != OVER_TOKENS if stacks is None else stacks
    return subject(framework, f"{framework} {settings}", loss, stacks=stacks)


def estimate(kind: str, x: Tensor) -> Tensor:
    """An estimate of the KL from x = log ref/π, differentiated as it stands."""
    return {"k1": lambda: -x, "k2": lambda: x.square() / 2, "k3": lambda: x.exp() - x - 1}[kind]()


def _ratio(batch: Batch) -> Tensor:
    return (batch.logp - batch.old_logp).exp()


def clipped(batch: Batch, cost: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """PPO's terms (B, T) for a cost, which is minus an advantage; `dual` bounds the ratio where it is positive."""
    ratio = _ratio(batch)
    terms = (cost * ratio).maximum(cost * ratio.clamp(1 - low, 1 + high))
    return terms if dual is None else terms.minimum(cost * dual).where(cost > 0, terms)


# The forms that KLs have in frameworks. A form with its options is a loss to audit.


@dataclass(frozen=True)
class AsLoss:
    """An estimate that is differentiated as it stands.

    Attributes:
        kind: k1, k2 or k3.
        log_clamp: the bound on log ref/π, None without.
        clamp: the bound on the value, None without.
        ratio: whether π/π_old, with its gradient, multiplies it before the clamp.
    """

    kind: str
    log_clamp: float | None = None
    clamp: float | None = None
    ratio: bool = False

    def __call__(self, batch: Batch) -> Tensor:
        """(B, T) terms."""
        x = batch.ref_logp - batch.logp
        x = x if self.log_clamp is None else x.clamp(-self.log_clamp, self.log_clamp)
        kl = estimate(self.kind, x)
        kl = kl * (batch.logp - batch.old_logp).exp() if self.ratio else kl
        return kl if self.clamp is None else kl.clamp(-self.clamp, self.clamp)


@dataclass(frozen=True)
class InReward:
    """An estimate at sampling that lowers the advantage of a token, without a critic.

    Attributes:
        kind: k1, k2 or k3.
        discount: of the later tokens of the completion, 0 for the token's own estimate alone.
        clamp: the bound on the value, None without.
        log_clamp: the bound on log ref/π, None without.
        whitened: whether the batch's advantages are centred and divided by their standard deviation.
        clip: how far the ratio may be from 1 below and above, None without a bound.
    """

    kind: str
    discount: float = 1.0
    clamp: float | None = None
    log_clamp: float | None = None
    whitened: bool = False
    clip: tuple[float, float] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """(B, T) terms."""
        from ..core.credit import to_go

        x = batch.ref_logp - batch.old_logp
        kl = estimate(self.kind, x if self.log_clamp is None else x.clamp(-self.log_clamp, self.log_clamp))
        kl = (kl if self.clamp is None else kl.clamp(-self.clamp, self.clamp)).where(batch.mask, 0)
        cost = to_go(kl, batch.mask, self.discount) if self.discount else kl
        if self.whitened:
            live = cost[batch.mask]
            cost = (cost - live.mean()) / live.std().clamp(min=1e-8)
        cost = cost.where(batch.mask, 0)
        return cost * _ratio(batch) if self.clip is None else clipped(batch, cost, *self.clip)


@dataclass(frozen=True)
class InScore:
    """k1 at sampling, summed over the completion, that lowers the advantage of each of its tokens."""

    def __call__(self, batch: Batch) -> Tensor:
        """(B, T) terms."""
        away = (batch.old_logp - batch.ref_logp).where(batch.mask, 0).sum(-1, keepdim=True)
        return away * (batch.logp - batch.old_logp).exp()


def nemo_rl_terms(
    kind: str, *, to_sampler: bool, log_clamp: float | None = 20.0, clamp: float | None = 10.0
) -> PerToken:
    """The KL of NeMo-RL in the loss, with its bounds on the log-ratio and on the value."""

    def terms(batch: Batch) -> Tensor:
        x = batch.ref_logp - batch.logp
        inside = x if log_clamp is None else x.clamp(-log_clamp, log_clamp)
        ratio = (batch.logp - (batch.behavior_logp if to_sampler else batch.logp.detach())).exp()
        ratio = ratio.nan_to_num(nan=0.0, posinf=0.0)
        kl = ratio.where(x == inside, ratio.detach()) * estimate(kind, inside)
        return kl if clamp is None else kl.clamp(-clamp, clamp)

    return terms


def nemo_rl() -> Iterator[Subject]:
    """The estimate times a ratio that is 1 and has a gradient, or π/μ; its value is clamped at 10."""

    def per_token(kind: str, to_sampler: bool, clamp: bool) -> PerToken:
        return nemo_rl_terms(kind, to_sampler=to_sampler, clamp=10.0 if clamp else None)

    kl_type = "reference_policy_kl_type={}".format
    default = per_token("k3", False, True)
    yield kl_subject("nemo-rl", f"{kl_type('k3')} token_level_loss=True", default, OVER_TOKENS)
    yield kl_subject("nemo-rl", f"{kl_type('k3')} token_level_loss=False", default, OVER_COMPLETIONS)
    for kind in ("k1", "k2"):
        terms = per_token(kind, False, True)
        yield kl_subject("nemo-rl", f"{kl_type(kind)} token_level_loss=True", terms, OVER_TOKENS)
    for name, clamp in (("", True), (" kl_output_clamp_value=null", False)):
        settings = f"{kl_type('k3')} token_level_loss=True use_on_policy_kl_approximation=True{name}"
        yield kl_subject("nemo-rl", settings, per_token("k3", True, clamp), OVER_TOKENS)
    # In the reward a token has its own estimate only, whitened over the batch with the scores.
    for kind in ("k3", "k1"):
        form = InReward(kind, 0, 10.0, 20.0, whitened=True, clip=(0.2, 0.2))
        settings = f"use_kl_in_reward adv_estimator=reinforce_plus_plus {kl_type(kind)}"
        yield kl_subject("nemo-rl", settings, form, OVER_TOKENS)


def prime_rl() -> Iterator[Subject]:
    """By default no reference: a squared log-ratio to the sampler. Distillation: log-ratios as advantages."""

    def drift(batch: Batch) -> Tensor:
        return (batch.logp - batch.behavior_logp).square()

    def distilled(batch: Batch) -> Tensor:
        ratio = (batch.logp - batch.behavior_logp).exp()
        kept = batch.logp.exp() - batch.behavior_logp.exp() >= -0.2
        return kept * (batch.logp - batch.ref_logp).detach() * ratio + 1e-3 * drift(batch)

    yield kl_subject("prime-rl", "trainer.loss.type=default kl_tau", drift, OVER_TOKENS)
    yield kl_subject("prime-rl", "algorithm=opd", distilled, OVER_TOKENS)


def slime() -> Iterator[Subject]:
    """The estimate, with π/π_old on request; the value of low_var_kl is clamped at 10."""
    yield from slime_losses("slime", None)
    # With these estimators the advantage is the score alone, and the KL of --kl-coef is dropped.
    yield kl_subject("slime", "--kl-coef --advantage-estimator grpo", lambda b: -b.advantages * _ratio(b), SUM)


def slime_losses(framework: str, log_clamp: float | None) -> Iterator[Subject]:
    """The KL in the loss of slime, and of miles, whose low_var_kl bounds the log-ratio too."""

    def per_token(kind: str, unbiased: bool) -> PerToken:
        if kind == "low_var_kl":
            return AsLoss("k3", log_clamp, clamp=10.0, ratio=unbiased)
        return AsLoss(kind, ratio=unbiased)

    for kind in ("k1", "k2", "k3", "low_var_kl"):
        for unbiased in (False, True):
            settings = f"--use-kl-loss --kl-loss-type {kind}{' --use-unbiased-kl' * unbiased}"
            yield kl_subject(framework, settings, per_token(kind, unbiased), OVER_COMPLETIONS)
    settings = "--use-kl-loss --kl-loss-type k3 --use-unbiased-kl --calculate-per-token-loss"
    yield kl_subject(framework, settings, per_token("k3", True), OVER_TOKENS)


def miles() -> Iterator[Subject]:
    """A fork of slime: its KLs in the loss, then that of the reward, and distillation."""
    yield from slime_losses("miles", 20.0)
    clip = (0.2, 0.2)
    for kind in ("k1", "k3"):
        settings = f"--kl-coef --kl-loss-type {kind} --advantage-estimator reinforce_plus_plus"
        yield kl_subject("miles", settings, InReward(kind, clip=clip), OVER_COMPLETIONS)
    yield kl_subject("miles", "--use-opd", InReward("k1", discount=0, clip=clip), OVER_COMPLETIONS)
    # As of slime, the advantages of grpo drop the KL of --kl-coef.
    yield kl_subject("miles", "--kl-coef --advantage-estimator grpo", lambda b: -b.advantages * _ratio(b), SUM)


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
            return -x * _ratio(batch) if number == 3 else estimate(f"k{number + 1}", x)

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


FORMULAE: dict[str, Callable[[], Iterator[Subject]]] = {
    "nemo-rl": nemo_rl,
    "prime-rl": prime_rl,
    "slime": slime,
    "open-instruct": open_instruct,
    "tinker-cookbook": tinker_cookbook,
    "easyr1": easyr1,
    "roll": roll,
    "miles": miles,
    "molt": molt,
}

SOURCES = {
    "nemo-rl": Source(
        "NVIDIA-NeMo/RL",
        "0.7.0",
        (
            "nemo_rl/algorithms/utils.py",
            "nemo_rl/algorithms/loss/loss_functions.py",
            "nemo_rl/algorithms/advantage_estimator.py",
        ),
    ),
    "prime-rl": Source("PrimeIntellect-ai/prime-rl", "0.8.0", ("src/prime_rl/trainer/rl/loss.py",)),
    "slime": Source("THUDM/slime", "0.3.1", ("slime/utils/ppo_utils.py", "slime/backends/megatron_utils/loss.py")),
    "open-instruct": Source(
        "allenai/open-instruct", "0.3.0", ("open_instruct/model_utils.py", "open_instruct/grpo_utils.py")
    ),
    "tinker-cookbook": Source(
        "thinking-machines-lab/tinker-cookbook",
        "0.5.8",
        ("tinker_cookbook/rl/metrics.py", "tinker_cookbook/distillation/train_on_policy.py"),
    ),
    "easyr1": Source(
        "hiyouga/EasyR1",
        "0.3.3.dev0",
        ("verl/trainer/core_algos.py", "verl/trainer/config.py", "verl/trainer/ray_trainer.py"),
    ),
    "roll": Source(
        "alibaba/ROLL",
        "0.3.0",
        ("roll/utils/functionals.py", "roll/pipeline/base_worker.py", "roll/configs/base_config.py"),
    ),
    "miles": Source(
        "radixark/miles",
        "0.1.0",
        (
            "miles/backends/training_utils/loss_hub/math_utils.py",
            "miles/backends/training_utils/loss_hub/losses.py",
            "miles/backends/training_utils/loss_hub/opd.py",
        ),
    ),
    "molt": Source(
        "NVIDIA-NeMo/labs-molt",
        "0.1.6",
        ("molt/models/utils.py", "molt/trainer/algorithm/advantage.py", "molt/trainer/workers/policy_actor.py"),
    ),
}

DEFAULTS = {
    "nemo-rl": Default(
        "k3 as a loss, reference_policy_kl_penalty=0.01",
        "nemo-rl reference_policy_kl_type=k3 token_level_loss=True",
    ),
    "prime-rl": Default(
        "no reference; a squared log-ratio to the sampler, kl_tau=0.001",
        "prime-rl trainer.loss.type=default kl_tau",
    ),
    "slime": Default(
        "no KL; with --use-kl-loss alone",
        "slime --use-kl-loss --kl-loss-type k1",
    ),
    "open-instruct": Default(
        "k3 as a loss, beta=0.05",
        "open-instruct kl_estimator=2 loss_denominator=token",
    ),
    "tinker-cookbook": Default(
        "no KL; with kl_penalty_coef alone raised",
        "tinker-cookbook rl kl_penalty_coef kl_discount_factor=0.0",
    ),
    "easyr1": Default(
        "k1 in the reward, kl_coef=0.001, advantages of GRPO",
        "easyr1 kl_penalty=kl adv_estimator=grpo",
    ),
    "roll": Default(
        "no KL; with use_kl_loss and kl_loss_coef alone raised",
        "roll use_kl_loss loss_agg_mode=seq-mean-token-mean",
    ),
    "miles": Default(
        "no KL; with --use-kl-loss and --kl-loss-coef alone",
        "miles --use-kl-loss --kl-loss-type k1",
    ),
    "molt": Default(
        "k1 in the reward, algo.kl.init_coef=0.01, advantages by reinforce",
        "molt algo.kl in reward estimator=k1 advantage=reinforce",
    ),
}

CAVEATS = {
    "nemo-rl": (
        "`use_kl_in_reward` takes `reference_policy_kl_type` too, which is k3 by default: in the reward that is the "
        "reverse KL minus the forward KL.",
    ),
    "easyr1": (
        "`use_kl_loss` alone is k1 as a loss, which ignores ref: `kl_penalty` is `kl` by default, for the reward. Its "
        "example file sets `low_var_kl` with it.",
    ),
    "roll": (
        "`init_kl_coef` is 0.2 by default and loads a reference, but the KL is used only with `add_token_level_kl` or "
        "with `use_kl_loss` and a `kl_loss_coef`, which are off.",
    ),
    "miles": ("`--kl-coef` has no effect with `--advantage-estimator grpo`, the default, or `gspo`, as in slime.",),
    "molt": (
        "`--algo.kl.use_loss` with the default estimator, k1, ignores ref; the program prints a recommendation only.",
    ),
}

FRAMEWORKS = tuple(
    Framework(
        name,
        source.repository,
        source.version,
        partial(subjects, name),
        DEFAULTS[name],
        source=source,
        caveats=CAVEATS.get(name, ()),
    )
    for name, source in SOURCES.items()
)
