"""The divergences that a gradient can descend: their names, and a record of each."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

# The names of the verdicts. `klgrad.targets` has the record of each.

TargetName = Literal[
    "reverse-kl-sequence",
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    "forward-kl-token",
    "forward-kl-token-sampler",
    "forward-kl-sequence",
    "k3-token",
    "squared-token",
    "squared-sequence",
    "forward-kl-sampler-sequence",
    "forward-kl-sampler-token",
    "reverse-kl-sampler-sequence",
    "reverse-kl-sampler-token",
    "reverse-kl-sampler-token-sampler",
]
"""The objectives whose gradient a loss may have.

A name has up to four parts: the divergence; `sampler` for one between π and the sampler instead of π and ref; the
level; and again `sampler` for the token level at the prefixes that the sampler visits instead of those of π.
"""

Verdict = Literal[
    TargetName,
    "climbs reverse-kl-sequence",
    "climbs reverse-kl-token",
    "climbs reverse-kl-token-sampler",
    "climbs forward-kl-token",
    "climbs forward-kl-token-sampler",
    "climbs forward-kl-sequence",
    "climbs k3-token",
    "climbs squared-token",
    "climbs squared-sequence",
    "climbs forward-kl-sampler-sequence",
    "climbs forward-kl-sampler-token",
    "climbs reverse-kl-sampler-sequence",
    "climbs reverse-kl-sampler-token",
    "climbs reverse-kl-sampler-token-sampler",
    "nothing",
    "sum-of-targets",
    "unknown",
]
"""What a loss does: it descends a target (the name alone), or it climbs one. `nothing` is a zero gradient,
`sum-of-targets` the sum of two targets, which the audit names beside it, and `unknown` none of these."""

Role = Literal["reverse", "forward", "sampler", "climbs", "nothing", "sum", "unknown"]
"""Decides how a target is drawn: `klgrad.audit.render.terminal` has the colour, icon and style of each role."""


class Descends(NamedTuple):
    """The targets whose gradient a loss has, with samples from π and with samples from another policy."""

    on_policy: Verdict
    off_policy: Verdict


# `Target`: what is known about one verdict.


@dataclass(frozen=True)
class Target:
    """An objective that a loss may descend or climb, or one of the other verdicts.

    Attributes:
        name: in JSON, in `--expect` and in tables.
        title: for headings.
        short: for the cell of a table.
        phrase: within a sentence, after "descends".
        sentence: what the verdict means.
        formula: the objective that is differentiated.
        role: decides how the target is drawn.
        level: whether the KL is one of tokens or of completions; None for a verdict that is no target.
        anchor: the policy that π is compared with.
        same_on_policy: the simpler target with the same gradient on-policy; the audit then reports that one.
        climbed: the target that is climbed, if this is the verdict of a loss that climbs.

    Example:
        >>> from klgrad.targets import TARGETS
        >>> TARGETS["forward-kl-token"].title
        'Forward KL, token by token'
        >>> TARGETS["climbs forward-kl-sampler-sequence"].does
        'climbs the forward KL between the completions of the sampler and of π'
    """

    name: Verdict
    title: str
    short: str
    phrase: str
    sentence: str
    formula: str
    role: Role
    level: Literal["token", "sequence"] | None = None
    anchor: Literal["ref", "sampler"] = "ref"
    same_on_policy: TargetName | None = None
    climbed: TargetName | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether the loss descends an objective: False for `nothing`, `unknown` and a loss that climbs."""
        return self.level is not None and self.climbed is None

    @property
    def does(self) -> str:
        """The predicate of a sentence: "descends the token-level forward KL"."""
        return f"{'climbs' if self.climbed else 'descends'} {self.phrase}"

    @property
    def title_in_sentence(self) -> str:
        """The title with a small first letter."""
        return self.title[0].lower() + self.title[1:]


# One record for each verdict. Every other module looks up its name, words and role here.

_TO_REFERENCE = (
    Target(
        name="reverse-kl-sequence",
        title="Reverse KL, whole completions",
        short="reverse, sequence",
        phrase="the reverse KL between completions",
        sentence="The gradient of KL(π‖ref) between completions.",
        formula="KL(π‖ref) between distributions over completions",
        role="reverse",
        level="sequence",
    ),
    Target(
        name="reverse-kl-token",
        title="Reverse KL, token by token",
        short="reverse, token",
        phrase="the token-level reverse KL (prefixes held fixed)",
        sentence="The gradient of KL(π‖ref) of each next token; a token's effect on later tokens is left out.",
        formula="Σ KL(π‖ref) of the next token over the prefixes that π visits, the visits held fixed",
        role="reverse",
        level="token",
    ),
    Target(
        name="reverse-kl-token-sampler",
        title="Reverse KL, token by token, on the sampler's prefixes",
        short="reverse, token (sampler)",
        phrase="the token-level reverse KL on the sampler's prefixes",
        sentence="The gradient of KL(π‖ref) of each next token, at the prefixes that the sampler visits.",
        formula="Σ KL(π‖ref) of the next token over the prefixes that the sampler visits",
        role="reverse",
        level="token",
        same_on_policy="reverse-kl-token",
    ),
    Target(
        name="forward-kl-token",
        title="Forward KL, token by token",
        short="forward, token",
        phrase="the token-level forward KL",
        sentence="The gradient of KL(ref‖π) of each next token. Its optimum differs from that of the reverse KL.",
        formula="Σ KL(ref‖π) of the next token over the prefixes that π visits, the visits held fixed",
        role="forward",
        level="token",
    ),
    Target(
        name="forward-kl-token-sampler",
        title="Forward KL, token by token, on the sampler's prefixes",
        short="forward, token (sampler)",
        phrase="the token-level forward KL on the sampler's prefixes",
        sentence="The gradient of KL(ref‖π) of each next token, at the prefixes that the sampler visits.",
        formula="Σ KL(ref‖π) of the next token over the prefixes that the sampler visits",
        role="forward",
        level="token",
        same_on_policy="forward-kl-token",
    ),
    Target(
        name="forward-kl-sequence",
        title="Forward KL, whole completions",
        short="forward, sequence",
        phrase="the forward KL between completions",
        sentence="The gradient of KL(ref‖π) between completions. Its optimum differs from that of the reverse KL.",
        formula="KL(ref‖π) between distributions over completions",
        role="forward",
        level="sequence",
    ),
    Target(
        name="k3-token",
        title="k3 of each token, averaged over the sampler's tokens",
        short="k3, token",
        phrase="the mean of k3 over the sampler's tokens",
        sentence="The gradient of its mean. It is a KL only if π is the sampler; it is 0 only where π is ref.",
        formula="E[Σ (ref/π - 1 - log ref/π of the token)] over the sampler's completions, the sampler held fixed",
        role="forward",
        level="token",
        same_on_policy="forward-kl-token",
    ),
    Target(
        name="squared-token",
        title="Squared log-ratio of each token",
        short="squared, token",
        phrase="the squared log-ratio of each token",
        sentence="The gradient of its mean over the sampler's tokens. It is 0 only where π is ref at all of them.",
        formula="E[Σ (log π/ref of the token)²/2] over the sampler's completions, the sampler held fixed",
        role="reverse",
        level="token",
        same_on_policy="reverse-kl-token",
    ),
    Target(
        name="squared-sequence",
        title="Squared log-ratio of the completion",
        short="squared, sequence",
        phrase="the squared sequence log-ratio",
        sentence="The gradient of its mean over the sampler's completions. It has the same optimum as the reverse KL.",
        formula="E[(log π(y)/ref(y))²/2] over the sampler's completions, the sampler held fixed",
        role="reverse",
        level="sequence",
        same_on_policy="reverse-kl-sequence",
    ),
)

_TO_SAMPLER = (
    Target(
        name="forward-kl-sampler-sequence",
        title="Forward KL to the sampler, whole completions",
        short="forward to sampler, sequence",
        phrase="the forward KL between the completions of the sampler and of π",
        sentence="The gradient of KL(sampler‖π) between completions: π is pulled to whatever was sampled.",
        formula="KL(sampler‖π) between distributions over completions",
        role="sampler",
        level="sequence",
        anchor="sampler",
    ),
    Target(
        name="forward-kl-sampler-token",
        title="Forward KL to the sampler, token by token",
        short="forward to sampler, token",
        phrase="the token-level forward KL to the sampler",
        sentence="The gradient of KL(sampler‖π) of each next token, at the prefixes that π visits.",
        formula="Σ KL(sampler‖π) of the next token over the prefixes that π visits, the visits held fixed",
        role="sampler",
        level="token",
        anchor="sampler",
    ),
    Target(
        name="reverse-kl-sampler-sequence",
        title="Reverse KL to the sampler, whole completions",
        short="reverse to sampler, sequence",
        phrase="the reverse KL between the completions of π and of the sampler",
        sentence="The gradient of KL(π‖sampler) between completions.",
        formula="KL(π‖sampler) between distributions over completions",
        role="sampler",
        level="sequence",
        anchor="sampler",
    ),
    Target(
        name="reverse-kl-sampler-token",
        title="Reverse KL to the sampler, token by token",
        short="reverse to sampler, token",
        phrase="the token-level reverse KL to the sampler",
        sentence="The gradient of KL(π‖sampler) of each next token, at the prefixes that π visits.",
        formula="Σ KL(π‖sampler) of the next token over the prefixes that π visits, the visits held fixed",
        role="sampler",
        level="token",
        anchor="sampler",
    ),
    Target(
        name="reverse-kl-sampler-token-sampler",
        title="Reverse KL to the sampler, token by token, on the sampler's prefixes",
        short="reverse to sampler, token (sampler)",
        phrase="the token-level reverse KL to the sampler on the sampler's prefixes",
        sentence="The gradient of KL(π‖sampler) of each next token, at the prefixes that the sampler visits.",
        formula="Σ KL(π‖sampler) of the next token over the prefixes that the sampler visits",
        role="sampler",
        level="token",
        anchor="sampler",
    ),
)

_OTHERS = (
    Target(
        name="nothing",
        title="Nothing",
        short="nothing",
        phrase="nothing",
        sentence="Zero in expectation: it regularises nothing.",
        formula="zero",
        role="nothing",
    ),
    Target(
        name="sum-of-targets",
        title="A sum of two targets",
        short="sum",
        phrase="a sum of two targets",
        sentence="Its gradient is exactly a sum of multiples of the gradients of two targets.",
        formula="a · one target + b · another",
        role="sum",
    ),
    Target(
        name="unknown",
        title="No known divergence",
        short="unknown",
        phrase="no known divergence",
        sentence="Its gradient is that of no target.",
        formula="none of these",
        role="unknown",
    ),
)


def _climbing(target: Target) -> Target:
    """The verdict of a loss whose gradient is that of a target with the sign reversed."""
    away = "the sampler" if target.anchor == "sampler" else "ref"
    return replace(
        target,
        name=cast(Verdict, f"climbs {target.name}"),
        title=f"Climbs: {target.title_in_sentence}",
        short=f"climbs {target.short}",
        sentence=f"The gradient of the target with the sign reversed: minimising the loss moves π away from {away}.",
        formula=f"- {target.formula}",
        role="climbs",
        same_on_policy=None,
        climbed=cast(TargetName, target.name),
    )


_DESCENDED = (*_TO_REFERENCE, *_TO_SAMPLER)

TARGETS: dict[Verdict, Target] = {
    target.name: target for target in (*_DESCENDED, *map(_climbing, _DESCENDED), *_OTHERS)
}
"""Every verdict by name, simplest first: where several coincide, the audit reports the first."""

WITH_GRADIENT: tuple[TargetName, ...] = tuple(cast(TargetName, target.name) for target in _DESCENDED)
"""The names of the targets with a gradient to compare with, in the same order."""

TO_REFERENCE: tuple[TargetName, ...] = tuple(cast(TargetName, target.name) for target in _TO_REFERENCE)
"""Those that compare π with ref. On-policy there are no others: π is the sampler."""

UNCORRECTED: frozenset[TargetName] = frozenset({"squared-token", "k3-token"})
"""Means of an estimator over the sampler's tokens. They are KLs only if π is the sampler."""


def signed(target: TargetName, *, climbs: bool) -> Verdict:
    """The verdict of a loss that descends or climbs a target.

    Args:
        target: the name of the target.
        climbs: whether the loss has its gradient with the sign reversed.

    Returns:
        The name of the verdict.

    Example:
        >>> from klgrad.targets import signed
        >>> signed("reverse-kl-token", climbs=True)
        'climbs reverse-kl-token'
    """
    return cast(Verdict, f"climbs {target}") if climbs else target


# The objectives whose gradient a KL loss may have: one record each.

__all__ = [
    "TARGETS",
    "TO_REFERENCE",
    "UNCORRECTED",
    "WITH_GRADIENT",
    "Descends",
    "Role",
    "Target",
    "TargetName",
    "Verdict",
    "signed",
]
