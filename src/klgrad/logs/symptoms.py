"""KLs in a run's scalars, by their names, and their symptoms: what each looks like, its causes, and the cure.

`klgrad diagnose` and the page of the symptoms have their words from `symptoms.json`, and from `threads.json`: public
threads on KL terms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .diagnosis import ScalarLog, Series

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
    facts: Sequence[Fact] = ()


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


def _symptoms() -> dict[str, Symptom]:
    data = json.loads(Path(__file__).with_name("symptoms.json").read_text(encoding="utf-8"))
    symptoms = {}
    for row in data["symptoms"]:
        causes = (data["shared"][cause] if isinstance(cause, str) else cause for cause in row.pop("causes"))
        symptoms[row["name"]] = Symptom(**row, causes=tuple(Explanation(**cause) for cause in causes))
    return symptoms


SYMPTOMS = _symptoms()
"""The symptoms of `symptoms.json` by name, in its order."""


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

OTHER_METRICS = {
    "length": (
        *("completions/mean_length", "response_length/mean", "length/mean", "completion_length", "response_len/mean"),
    ),
    "length of TRL": ("completions/mean_length",),
    "coefficient": ("actor/kl_coef", "actor/reward_kl_penalty_coeff", "kl/coef", "kl_coef", "kl_beta"),
    "gradient": ("grad_norm",),
    "flat groups": ("frac_reward_zero_std",),
    "reward": ("reward", "critic/score/mean", "critic/rewards/mean", "raw_reward", "rewards/mean"),
}


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f"/{ending}")


def other_metric(log: ScalarLog, what: str) -> tuple[str, Series] | None:
    """The metric with one of the names, the first in their order, and not of held-out prompts."""
    for ending in OTHER_METRICS[what]:
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
        if plain in ("kl", "train/kl") and other_metric(log, "length of TRL"):
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
