"""Frameworks whose code is not installed: their KL formulae, written again from the published source.

What is audited here is this transcription of a formula, at the version named in `klgrad.frameworks`, and not the
framework's code. Casts to float32 and the 1e-8 in denominators are left out. A test compares each with its coefficient
on ∇log π, found by hand.
"""

from __future__ import annotations

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

    def per_token(kind: str, unbiased: bool) -> PerToken:
        def terms(batch: Batch) -> Tensor:
            kl = estimate("k3" if kind == "low_var_kl" else kind, batch.ref_logp - batch.logp)
            kl = kl * _ratio(batch) if unbiased else kl
            return kl.clamp(-10, 10) if kind == "low_var_kl" else kl

        return terms

    for kind in ("k1", "k2", "k3", "low_var_kl"):
        for unbiased in (False, True):
            settings = f"--use-kl-loss --kl-loss-type {kind}{' --use-unbiased-kl' * unbiased}"
            yield kl_subject("slime", settings, per_token(kind, unbiased), OVER_COMPLETIONS)
    settings = "--use-kl-loss --kl-loss-type k3 --use-unbiased-kl --calculate-per-token-loss"
    yield kl_subject("slime", settings, per_token("k3", True), OVER_TOKENS)
    # With these estimators the advantage is the score alone, and the KL of --kl-coef is dropped.
    yield kl_subject("slime", "--kl-coef --advantage-estimator grpo", lambda b: -b.advantages * _ratio(b), SUM)


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
}

SOURCES = {
    "nemo-rl": Source(
        "NVIDIA-NeMo/RL", "0.7.0", ("nemo_rl/algorithms/utils.py", "nemo_rl/algorithms/loss/loss_functions.py")
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
}

FRAMEWORKS = tuple(
    Framework(name, source.repository, source.version, partial(subjects, name), DEFAULTS[name], source=source)
    for name, source in SOURCES.items()
)
