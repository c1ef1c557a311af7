"""KLs in a run's scalars, by their names, and their symptoms: what each looks like, its causes, and the cure.

`klgrad diagnose` and the page of the symptoms are made from these tables, and from `threads.json`: public threads on KL
terms.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .diagnosis import ScalarLog, Series

ADVISE = "klgrad advise --config FILE"
AUDIT = "klgrad audit FILE:FUNCTION"
LOGS = "klgrad logs rollouts"
DIAGNOSE = "klgrad diagnose RUN"
CALLBACK = "KLCallback(log_rollouts='rollouts')"
BOUNDED = 'KLTerm(level="token", influence_bound=5.0)'

Fact = Literal["no-kl", "unread", "both", "ignores-ref", "climbs", "forward", "cut", "divided", "stale"]
"""What a configuration file can say of a run."""


@dataclass(frozen=True)
class Explanation:
    """A cause of a symptom.

    Attributes:
        what: the cause.
        decides: the command, or the metric, that tells whether it is this one.
        cure: what to do then.
        facts: what in the configuration of the run settles it.
    """

    what: str
    decides: str
    cure: str
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class Symptom:
    """What a log may show.

    Attributes:
        name: its name in JSON and on the page.
        title: in words.
        looks: what is seen, as the command tests it.
        causes: the likeliest first.
    """

    name: str
    title: str
    looks: str
    causes: tuple[Explanation, ...]


IGNORES_REF = Explanation(
    "The gradient has no reference in it: k1 as a loss, a KL under no_grad, or detached log-probs. The value is right, "
    "and nothing pulls.",
    f"`{ADVISE}`, or `{AUDIT}` for a loss of your own",
    "the gradient of k2: `low_var_kl+` in verl, `use_bias_correction_kl=True` in TRL, `KLTerm()` anywhere",
    ("ignores-ref",),
)
UNREAD = Explanation(
    "The coefficient is set and nothing reads it: slime's kl-coef with GRPO, a β of a trainer without a KL, a switch "
    "that belongs to the other place.",
    f"`{ADVISE}`, which lists coefficients that are never read",
    "set the coefficient that this algorithm reads",
    ("unread",),
)
NOT_THE_SAMPLER = Explanation(
    "The samples are not the policy's: later updates on a batch, another temperature or top-p, an inference engine, "
    "other experts of a mixture. A mean of log π/ref over another policy's tokens has either sign.",
    f"`{LOGS}`, its part on trainer and sampler; `{CALLBACK}` of klgrad.trl writes such a folder",
    "make them equal, or weight the KL: `ImportanceWeighting`",
    ("stale",),
)
CUT = Explanation(
    "A clamp on the value: beyond it the gradient is 0, so that the tokens furthest from the reference are not pulled.",
    f"`{ADVISE}`, or `{AUDIT}`: its line on the divergence has the edges",
    f"bound the coefficient and not the value: `{BOUNDED}`",
    ("cut",),
)
DIVIDED = Explanation(
    "A KL in the reward is divided by the standard deviation of the group or batch: in groups with equal rewards β "
    "cancels.",
    f"`{ADVISE}`",
    "an advantage without the division, or the KL after it",
    ("divided",),
)
FEW_RUNS = Explanation(
    "Noise: with one run per β the error here is that of its steps, and not of another seed.",
    "a second seed of two runs",
    "none",
)

SYMPTOMS: dict[str, Symptom] = {
    symptom.name: symptom
    for symptom in (
        Symptom(
            "zero",
            "The KL is exactly 0",
            "half of the values after the first, or more, are 0 to the last bit; the first one may be, because the "
            "policy starts at the reference",
            (
                Explanation(
                    "The KL is off: a coefficient of 0, a switch that is not set, or a coefficient that nothing reads.",
                    f"`{ADVISE}`",
                    "set the coefficient that the run reads",
                    ("no-kl", "unread"),
                ),
                Explanation(
                    "The reference is the policy: one object for both, LoRA whose adapter stays on for the reference, "
                    "or a reference that is synchronised at every step.",
                    f"`{LOGS}`: every log-ratio is 0 although the weights moved",
                    "a frozen copy; with LoRA switch the adapter off for the reference",
                ),
                Explanation(
                    "The policy does not move: every group has equal rewards, or the learning rate is 0.",
                    "the gradient norm in the same log",
                    "prompts of medium difficulty; the schedule",
                ),
                Explanation(
                    "It is another KL: that to the policy before the update is 0 on the first update by construction.",
                    f"`{DIAGNOSE}`, its first lines",
                    "log the KL to the reference: `KLCallback`",
                ),
                Explanation(
                    "Rounding: log-probs in bfloat16 have 8 bits, and a small difference is 0.",
                    f"`{LOGS}`: log-ratios are multiples of a power of 2",
                    "compute log-probs in float32",
                ),
            ),
        ),
        Symptom(
            "negative",
            "The KL is negative beyond its error",
            "the mean over the run, or over its second half, is more than 3 standard errors below 0; or one value is "
            "below 0 though the estimate is k2 or k3, which cannot be. A single negative batch of k1 is no symptom",
            (
                NOT_THE_SAMPLER,
                Explanation(
                    "The sign or the order of the arguments: log ref/π was logged, or a reward of -β KL.",
                    f"`{AUDIT}`, which says whether the loss climbs",
                    "log π first, then log ref",
                    ("climbs",),
                ),
                Explanation(
                    "Other tokens are counted for one of the two: those of tools, of the prompt, or padding.",
                    f"`{LOGS}` with the mask that the loss has",
                    "one mask for both, applied once",
                ),
                Explanation(
                    "A KL over the top k entries alone, whose tail is left out: no divergence, and negative where the "
                    "policy has less probability there.",
                    f"`{AUDIT}`",
                    "count the tail: `lumped_kl`",
                ),
            ),
        ),
        Symptom(
            "constant",
            "The KL is the same whatever β is",
            "several runs whose β differ by a factor of 2 or more end at one KL, within 2 standard errors or 10%",
            (
                UNREAD,
                IGNORES_REF,
                DIVIDED,
                CUT,
                Explanation(
                    "β is too small for any of them: β times the KL is far below the spread of the rewards.",
                    "β times the KL, beside the standard deviation of the rewards",
                    "raise β by a factor of 10",
                ),
                FEW_RUNS,
            ),
        ),
        Symptom(
            "rising-with-beta",
            "A larger β gives a larger KL",
            "of several runs, the one with the largest β ends at a KL that is 20% and 3 standard errors above that of "
            "the smallest, and none between breaks the order",
            (
                Explanation(
                    "The sign is wrong: the loss climbs the KL.",
                    f"`{AUDIT}`, or `{ADVISE}`",
                    "add the KL to the loss, subtract it from the reward",
                    ("climbs",),
                ),
                Explanation(
                    "k1 as a loss: nothing on fresh samples; on stale ones it climbs the KL from the sampler; with a "
                    "mean per completion it makes completions longer. All of it grows with β.",
                    f"`{ADVISE}`; the mean length in the same log",
                    "the gradient of k2",
                    ("ignores-ref",),
                ),
                Explanation(
                    "The forward KL is descended, and another KL is logged.",
                    f"`{AUDIT}`, its line on the divergence",
                    "the gradient of k2, or log the KL that is descended",
                    ("forward",),
                ),
                FEW_RUNS,
            ),
        ),
        Symptom(
            "rising",
            "The KL rises to the end",
            "four of five pairs of values are in rising order, and the last quarter is 3 times the second",
            (
                Explanation(
                    "Nothing is wrong: the reward pulls, and β is small against it.",
                    "β times the KL, beside the rewards",
                    "a larger β, or a target for the KL: `kl_target` of KLConfig",
                ),
                UNREAD,
                IGNORES_REF,
                CUT,
                DIVIDED,
            ),
        ),
        Symptom(
            "spike",
            "The KL spikes and comes back",
            "values above 3 times the median of their ten neighbours, and 8 robust deviations away",
            (
                Explanation(
                    "One token that the policy has left: k3 has exp(log ref/π), and a few tokens are the whole mean. "
                    "k1 of the same tokens is calm.",
                    f"`{LOGS}`: the largest log-ratio, and k1 beside k3 with their errors",
                    f"the gradient of k2, or `{BOUNDED}`; log k1 too",
                ),
                NOT_THE_SAMPLER,
                Explanation(
                    "A few completions: cut off at the limit, repeating themselves, or scored without their image.",
                    f"`{LOGS}` by step",
                    "read those completions; give the reference all inputs of the policy",
                ),
                Explanation(
                    "An update that was too large.",
                    "the gradient norm at the same step",
                    "a smaller learning rate, or clipping of the gradient norm",
                ),
            ),
        ),
        Symptom(
            "jump",
            "The KL jumps and stays",
            "five values in a row are all above 3 times the five before them, and the run does not come back",
            (
                Explanation(
                    "The policy collapsed onto an answer of its own: rewards fall at the same step.",
                    "the rewards in the same log; the KL before the jump, which often rises first",
                    "start again before the jump with a larger β; an early stop at a KL",
                ),
                Explanation(
                    "The reference changed: it was reset, synchronised, or not restored with a checkpoint.",
                    "the settings that synchronise it; whether the run was resumed at this step",
                    "restore it; a KL to a moving reference is no distance from the start",
                ),
                CUT,
                Explanation(
                    "The prompts changed: another stage or data set, at another distance from the reference.",
                    "the schedule of the data",
                    "compare KLs on one set of prompts",
                ),
            ),
        ),
        Symptom(
            "nan",
            "The KL or the gradient is NaN or infinite",
            "a value was logged and is no finite number. A step without a value is none",
            (
                Explanation(
                    "k3 overflows: exp(log ref/π) is infinite backward where its value is still clamped and finite.",
                    f"`{AUDIT}`: its line on float32",
                    f"`{BOUNDED}`, or clamp the log-ratio before the exponential",
                ),
                Explanation(
                    "A log-prob of -inf: a token that a filter or a mask excludes, minus another -inf.",
                    f"`{LOGS}`, which names the row and the token",
                    "compute log-probs before the filters; mask with `where` and not by a product",
                ),
                Explanation(
                    "A division by 0: a completion without tokens, or a group whose rewards are equal.",
                    "the lengths, and the share of such groups, in the same log",
                    "leave such rows out; add a small number to the deviation",
                ),
                Explanation("float16, or softmax in bfloat16.", "the same step in float32", "log-probs in float32"),
            ),
        ),
        Symptom(
            "units",
            "The KL is in other units than thought",
            "two KLs of one run have the ratio of the mean length; or a KL moves with the length from step to step",
            (
                Explanation(
                    "One is a mean per token and the other a sum per completion.",
                    f"`{LOGS}` prints both, with errors",
                    "state the unit beside every KL and every β; a target per token is not one per completion",
                ),
                Explanation(
                    "The loss's own reduction was logged: a sum with seq-mean-token-sum, a mean with token-mean.",
                    f"`{ADVISE}`",
                    "compare runs in one unit: `kl_report`",
                ),
                Explanation(
                    "It has β in it, or a sign: kl_rewards of AReaL is minus kl_ctl times the KL.",
                    "the same run with twice the coefficient",
                    "log the KL itself",
                ),
            ),
        ),
        Symptom(
            "other-kl",
            "The KL in the log has no reference in it",
            "the only KLs are to the sampler or to the policy before the update, such as ppo_kl and approx_kl",
            (
                Explanation(
                    "The run has no KL to a reference: at a coefficient of 0 most trainers load none and log none.",
                    f"`{ADVISE}`",
                    "measure it all the same: `KLCallback` works at β = 0",
                    ("no-kl", "unread"),
                ),
                Explanation("It is logged under a name that is not known here.", f"`{DIAGNOSE} --kl NAME`", "name it"),
            ),
        ),
        Symptom(
            "flat-groups",
            "Most groups have equal rewards",
            "in half of the groups or more every completion has the same reward, over the last quarter of the run",
            (
                Explanation(
                    "The prompts are too easy or too hard by now. These groups have no policy gradient: the KL is all "
                    "that moves the policy there, and divided by the group's deviation it is β-free noise.",
                    "the rewards, by prompt",
                    "sample prompts by their success rate; no division where the KL is in the reward",
                    ("divided",),
                ),
            ),
        ),
        Symptom(
            "zero-gradient",
            "The gradient is exactly 0",
            "the gradient norm is 0 to the last bit in one step of five or more",
            (
                Explanation(
                    "Every group of those steps had equal rewards, and no KL is in the loss.",
                    "the share of groups with equal rewards, in the same log",
                    "as above",
                    ("no-kl", "unread"),
                ),
                Explanation(
                    "The KL is in the loss and under no_grad, or its coefficient is not read.",
                    f"`{ADVISE}`, or `{AUDIT}`",
                    "remove the decorator; set the coefficient that is read",
                    ("unread",),
                ),
            ),
        ),
        Symptom(
            "wiring",
            "The configuration does not say what it seems to",
            "with --config: a coefficient that is never read, a KL in both places, or a KL whose gradient has no "
            "reference in it",
            (
                UNREAD,
                Explanation(
                    "Both places are on, the loss and the reward: two KLs add up, of two kinds.",
                    f"`{ADVISE}`",
                    "switch one off",
                    ("both",),
                ),
                IGNORES_REF,
                Explanation("The loss climbs the KL.", f"`{ADVISE}`", "turn the sign", ("climbs",)),
            ),
        ),
    )
}


# Public threads on KL terms: what is asked, what answers it here, and which symptom it is.


@dataclass(frozen=True)
class Topic:
    """Threads that ask one thing.

    Attributes:
        threads: as OWNER/NAME#NUMBER, on GitHub.
        asks: the question or the report.
        answer: what answers it; "In part" begins one that is not all, "Not answered" one that is none.
        symptoms: the names of the symptoms that it shows, if any.
    """

    threads: str
    asks: str
    answer: str
    symptoms: str = ""

    @property
    def names(self) -> list[str]:
        """The single threads: `owner/name#1, #2; owner/other#3` has three."""
        names: list[str] = []
        for part in self.threads.replace(";", ",").split(","):
            thread = part.strip()
            names.append(f"{names[-1].split('#')[0]}{thread}" if thread.startswith("#") else thread)
        return names


@cache
def topics() -> tuple[Topic, ...]:
    """The questions of `threads.json`, in its order."""
    rows = json.loads(Path(__file__).with_name("threads.json").read_text(encoding="utf-8"))
    return tuple(Topic(**row) for row in rows)


def threads_of(symptom: str) -> list[str]:
    """The threads that show a symptom."""
    return [name for topic in topics() if symptom in topic.symptoms.split() for name in topic.names]


def link(thread: str) -> str:
    """Its address; GitHub leads from an issue's to a pull request's."""
    repository, _, number = thread.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


# What the metrics of trainers are, by their names: which KL, in which unit.

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
    metrics = []
    for name, series in log.series.items():
        plain = name.lower()
        endings = [ending for ending in REFERENCE if _ends(plain, ending)]
        if not endings or HELD_OUT.match(plain) or TO_SAMPLER.search(plain):
            continue
        unit, remark = REFERENCE[max(endings, key=len)]
        if plain in ("kl", "train/kl") and named(log, ("completions/mean_length",)):
            unit = "token"  # of TRL, whose two trainers divide by tokens alike
        metrics.append(KLMetric(name, unit, remark, series))
    return sorted(metrics, key=lambda metric: not metric.unit)


def sampler_kls(log: ScalarLog) -> list[str]:
    """The names of KLs in which there is no reference."""
    return [name for name in log.series if TO_SAMPLER.search(name.lower()) and not HELD_OUT.match(name.lower())]


def unrecognised_kls(log: ScalarLog) -> list[str]:
    """Names that may be of a KL and are not known."""
    known = {metric.name for metric in reference_kls(log)} | set(sampler_kls(log))
    like = [name for name in log.series if "kl" in re.split(r"[^a-z0-9]+", name.lower())]
    return [name for name in like if name not in known and not HELD_OUT.match(name) and not OTHERS.search(name.lower())]
