"""One record for each verdict. Every other module looks up its name, words and role here."""

from dataclasses import replace
from typing import cast

from .names import TargetName, Verdict
from .target import Target

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
