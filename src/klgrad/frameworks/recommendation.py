"""What a framework is advised to write for a given KL: settings, and code where no setting has that meaning.

The modules of the frameworks have the settings and the places; here is what they have in common.
"""

from dataclasses import dataclass
from typing import Literal

from ..targets import Descends, Verdict

Meaning = tuple[Literal["reverse", "forward"], Literal["token", "sequence"]]
"""The divergence and the level of a `KLTerm`."""

TARGET_OF: dict[Meaning, Verdict] = {
    ("reverse", "sequence"): "reverse-kl-sequence",
    ("reverse", "token"): "reverse-kl-token",
    ("forward", "token"): "forward-kl-token",
    ("forward", "sequence"): "forward-kl-sequence",
}
"""The target of each meaning. A test compares it with `KLTerm.descends`, which needs torch."""


@dataclass(frozen=True)
class SettingLines:
    """Configuration lines of one framework.

    Attributes:
        lines: the lines as a user writes them.
        subject: the name of the audited loss with these settings.
        descends: on-policy and off-policy, as the audit finds.
        note: further information.
        policy_loss: what the lines do to the policy loss beside the KL.
    """

    lines: str
    subject: str
    descends: Descends
    note: str = ""
    policy_loss: str = ""


DR_GRPO = (
    "dr_grpo divides the policy loss and the KL alike by rows x max_completion_length, where dapo, the default, "
    "divides by the tokens of the batch: gradients are smaller by mean length / max_completion_length, and β keeps "
    "its meaning."
)
"""Of TRL and of Liger, which has the same loss types."""


def expresses(setting: SettingLines, meaning: Meaning, off_policy: bool) -> bool:
    """Whether the setting has this meaning on all problems, on-policy or off-policy."""
    return (setting.descends.off_policy if off_policy else setting.descends.on_policy) == TARGET_OF[meaning]


# A `KLTerm` in a framework: code, the place where it goes, and where the framework keeps the tensors.
#
# The code is complete but for the names that the place has already. Tests run it, in the framework's own environment
# where it calls the framework.

IN_PLACE = """\
from klgrad import {names}

term = {term}
kl = term(Rollout({logp}, {ref_logp}, {mask}{behavior}))
{result}\
"""


@dataclass(frozen=True)
class Home:
    """Where a term of one's own goes in a framework.

    Attributes:
        place: the place, after "in".
        code: the lines, with the term to be filled in.
        scope: the function in which the tensors have these names.
        tensors: where `logp`, `ref_logp`, `mask` and `behavior_logp` are.
        note: what else has to be set, and what the lines do.
        sampler: the sampler's log-probs in the code, if `tensors` has more than their name.

    Example:
        >>> from klgrad.frameworks import HOMES
        >>> print(HOMES["openrlhf"].lines(("reverse", "token"), off_policy=False))
        from klgrad import KLTerm, Rollout
        <BLANKLINE>
        term = KLTerm(level="token")
        kl = term(Rollout(action_log_probs, base_action_log_probs, experience.action_mask))
        kl = kl.per_token
    """

    place: str
    code: str
    scope: str
    tensors: dict[str, str]
    note: str
    sampler: str = ""

    def lines(self, meaning: Meaning, off_policy: bool) -> str:
        """The lines that add a KL with this meaning to the loss of the framework.

        Args:
            meaning: the divergence and the level.
            off_policy: whether the samples are stale or from another engine.

        Returns:
            Python code. It has the names that `place` has, and for TRL `model`, `reward` and `prompts`.
        """
        names = {"KLTerm"} | ({"ImportanceWeighting", "Truncate"} if off_policy else set())
        names |= {"Rollout"} if "Rollout(" in self.code else set()
        return self.code.format(
            names=", ".join(sorted(names)),
            term=term_of(meaning, off_policy),
            behavior=f", behavior_logp={self.sampler or self.tensors['behavior_logp']}" if off_policy else "",
            field=', "rollout_log_probs"' if off_policy else "",
        )


def term_of(meaning: Meaning, off_policy: bool) -> str:
    """The code of a `KLTerm` with this meaning, off-policy with bounded importance ratios."""
    divergence, level = meaning
    choices = [f'level="{level}"'] if divergence == "reverse" else ['divergence="forward"', f'level="{level}"']
    choices += ['estimator="k3"'] if divergence == "forward" else []
    if off_policy:
        ratio = "sequence" if meaning == ("forward", "sequence") else "prefix"
        choices.append(f'weighting=ImportanceWeighting("{ratio}", bound=Truncate(2.0))')
    return f"KLTerm({', '.join(choices)})"


def in_place(result: str, tensors: dict[str, str]) -> str:
    """The template of code that stands among a framework's own lines."""
    names = {role: tensors[role] for role in ("logp", "ref_logp", "mask")}
    return IN_PLACE.format(**names, result=result, names="{names}", term="{term}", behavior="{behavior}")
