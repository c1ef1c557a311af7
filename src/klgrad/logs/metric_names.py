"""What the metrics of trainers are, by their names: which KL, in which unit."""

import re
from dataclasses import dataclass
from typing import Literal

from .scalars import ScalarLog, Series

Unit = Literal["token", "completion", ""]


@dataclass(frozen=True)
class KLMetric:
    """A metric that is a KL to a reference.

    Attributes:
        name: its name in the log.
        unit: nats per token or per completion; empty if the name does not tell.
        remark: what else is to know of it.
        series: its values.
    """

    name: str
    unit: Unit
    remark: str
    series: Series


REFERENCE: dict[str, tuple[Unit, str]] = {
    "kl": ("", "TRL: k3 of GRPO and k1 of RLOO, per token. OpenRLHF, ms-swift and Tunix have the name too"),
    "actor/kl_loss": ("", "verl: per token with token-mean, per completion with seq-mean-token-sum; without β"),
    "actor/reward_kl_penalty": ("token", "verl: in the reward, without β"),
    "kl_penalty": ("token", "NeMo-RL: without β"),
    "kl_loss": ("", "slime and Tunix: a mean per completion of its tokens' mean, without β"),
    "policy_kl": ("token", "SkyRL: a mean per completion of its tokens' mean"),
    "ref_kl": ("token", "prime-rl: to the teacher"),
    "teacher_kl": ("token", "ms-swift: to the teacher"),
    "opd_reverse_kl": ("token", "slime: to the teacher"),
    "objective/kl": ("completion", "TRL's older PPO: a sum over the completion"),
    "distillation/loss": ("", "verl: to the teacher"),
    "kl/reverse/k1/per_token": ("token", "klgrad"),
    "kl/reverse/k3/per_token": ("token", "klgrad"),
    "kl/reverse/k1/per_sequence": ("completion", "klgrad"),
    "kl/reverse/k3/per_sequence": ("completion", "klgrad"),
}
"""By the end of the name: a prefix such as `train/` or `policy/` says where it was logged."""

TO_SAMPLER = re.compile(
    r"ppo_kl|approx_?kl|mismatch|rollout_corr|rollout_kl|gen_kl|policy_kl_error|sampling_logp|old_kl|behave|is_kl"
)
"""A KL between two of policy, sampler and policy before the update: no reference is in it."""

TIMES_BETA = {"kl_rewards": "AReaL: minus kl_ctl times the KL, so that it is negative where the KL is positive"}
OTHERS = re.compile(r"coef|target|clip|horizon|min|max|std|ratio|scale")
HELD_OUT = re.compile(r"^(eval|val|test|validation)[-_/]|^val-(core|aux)/")

LENGTHS = ("completions/mean_length", "response_length/mean", "length/mean", "completion_length", "response_len/mean")
COEFFICIENTS = ("actor/kl_coef", "actor/reward_kl_penalty_coeff", "kl/coef", "kl_coef", "kl_beta")
GRADIENTS = ("grad_norm",)
FLAT_GROUPS = ("frac_reward_zero_std",)
REWARDS = ("reward", "critic/score/mean", "critic/rewards/mean", "raw_reward", "rewards/mean")


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f"/{ending}")


def named(log: ScalarLog, endings: tuple[str, ...]) -> tuple[str, Series] | None:
    """The metric with one of these names, the first in their order, and not of held-out prompts."""
    for ending in endings:
        for name, series in log.series.items():
            if _ends(name.lower(), ending) and not HELD_OUT.match(name.lower()):
                return name, series
    return None


def reference_kls(log: ScalarLog) -> list[KLMetric]:
    """The KLs to a reference, those first whose unit is known."""
    found = []
    for name, series in log.series.items():
        plain = name.lower()
        endings = [ending for ending in REFERENCE if _ends(plain, ending)]
        if not endings or HELD_OUT.match(plain) or TO_SAMPLER.search(plain):
            continue
        unit, remark = REFERENCE[max(endings, key=len)]
        if plain in ("kl", "train/kl") and named(log, ("completions/mean_length",)):
            unit = "token"  # of TRL, whose two trainers divide by tokens alike
        found.append(KLMetric(name, unit, remark, series))
    return sorted(found, key=lambda metric: not metric.unit)


def sampler_kls(log: ScalarLog) -> list[str]:
    """The names of KLs in which there is no reference."""
    return [name for name in log.series if TO_SAMPLER.search(name.lower()) and not HELD_OUT.match(name.lower())]


def unrecognised_kls(log: ScalarLog) -> list[str]:
    """Names that may be of a KL and are not known."""
    known = {metric.name for metric in reference_kls(log)} | set(sampler_kls(log))
    like = [name for name in log.series if "kl" in re.split(r"[^a-z0-9]+", name.lower())]
    return [name for name in like if name not in known and not HELD_OUT.match(name) and not OTHERS.search(name.lower())]
