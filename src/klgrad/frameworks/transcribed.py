"""EasyR1, ROLL, Molt, open-instruct, tinker-cookbook and prime-rl: KL formulae, written again from published source.

prime-rl has no reference by default: a squared log-ratio to the sampler. Its distillation has log-ratios as advantages.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .formulae import (
    OVER_COMPLETIONS,
    OVER_TOKENS,
    SUM,
    AsLoss,
    InReward,
    clipped,
    estimate,
    kl_subject,
    part_of,
    ratio_of,
)
from .framework import Framework
from .run_settings import EARLIER, KLPart, Reader, Run, one_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .formulae import PerToken
    from .harness import Batch, Subject, Tensor


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
        yield kl_subject("molt", settings, form, OVER_TOKENS)
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
            yield kl_subject("tinker-cookbook", settings, per_token(centred, discount), SUM)


def prime_rl() -> Iterator[Subject]:
    """The default, and distillation."""
    yield kl_subject("prime-rl", "trainer.loss.type=default kl_tau", _drift, OVER_TOKENS)
    yield kl_subject("prime-rl", "algorithm=opd", _distilled, OVER_TOKENS)


def _drift(batch: Batch) -> Tensor:
    return (batch.logp - batch.behavior_logp).square()


def _distilled(batch: Batch) -> Tensor:
    ratio = (batch.logp - batch.behavior_logp).exp()
    kept = batch.logp.exp() - batch.behavior_logp.exp() >= -0.2
    return kept * (batch.logp - batch.ref_logp).detach() * ratio + 1e-3 * _drift(batch)


# The configurations of prime-rl: the algorithm of each source of prompts, and `trainer.loss`.

KNOWN: dict[str, object] = {
    "orchestrator.algo.type": "grpo",
    "trainer.loss.type": "default",
    "trainer.loss.kl_tau": 0.001,
    "orchestrator.max_off_policy_steps": 8,
}
SOURCES = "orchestrator.train.source"
DISTILLS = ("opd", "opsd")
ALGORITHMS = ("grpo", "echo", "max_rl", "rae", "hierarchical_grpo", *DISTILLS, "sft")
TO_SAMPLER = (
    "kl_tau={:g} is no KL to a reference: a squared log-ratio to the sampler, which is 0 with its gradient on fresh "
    "samples."
)
FIXED = "the loss of opd and opsd has a fixed 0.001 in its place"


def read_config(given: dict[str, Any], _: str | None = None) -> Run:
    """Read the algorithms of all sources, with prime-rl's defaults for what is missing."""
    run = Run("prime-rl", given, KNOWN)
    run.one_of("trainer.loss.type", ("default", "ipo"))
    algorithms = [one_of("orchestrator.algo.type", x, ALGORITHMS) for x in _algorithms(run.settings, given)]
    run.parts = [_part(x) for x in sorted({x for x in algorithms if x in DISTILLS})]
    others = sorted({x for x in algorithms if x not in DISTILLS})
    if "trainer.loss.kl_tau" in given and not others:
        run.unread["trainer.loss.kl_tau"] = FIXED
    run.notes += [TO_SAMPLER.format(run["trainer.loss.kl_tau"])] * bool(others)
    run.notes += [f"Sources with {', '.join(others)} have no KL to a reference."] * bool(others and run.parts)
    run.is_stale_by("orchestrator.max_off_policy_steps", EARLIER)
    run.is_sampled_by("vLLM")
    return run.of(", ".join(dict.fromkeys(algorithms)), "reverse-kl-token")


def _algorithms(settings: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """One for each source, which may have its own."""
    common = settings["orchestrator.algo.type"]
    sources = given.get(SOURCES)
    if not isinstance(sources, list) or not sources:
        return [common]
    own = [source.get("algo") if isinstance(source, dict) else None for source in sources]
    return [str(algo.get("type", common)) if isinstance(algo, dict) else common for algo in own]


def _part(algorithm: str) -> KLPart:
    caveat = "ref is the teacher here" + (", which is the policy with a demonstration." if algorithm == "opsd" else ".")
    return part_of("prime-rl", "algorithm=opd", _distilled, OVER_TOKENS, 1.0, caveat, "advantage")


PRIME_RL = Framework.of(
    "prime-rl",
    prime_rl,
    reader=Reader(
        "prime-rl",
        KNOWN,
        read_config,
        re.compile(r"prime_rl\..*"),
        beginnings=("orchestrator.", "trainer.loss."),
        harmless=("trainer.optim.", "orchestrator.advantage."),
    ),
)

FRAMEWORKS = (
    Framework.of("open-instruct", open_instruct),
    Framework.of("tinker-cookbook", tinker_cookbook),
    Framework.of("easyr1", easyr1),
    Framework.of("roll", roll),
    Framework.of("molt", molt),
)
