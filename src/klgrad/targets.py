"""The divergences that a gradient can descend: their names, and a record of each."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

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
    "reverse-kl-sampler-sequence",
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
    "climbs reverse-kl-sampler-sequence",
    "climbs reverse-kl-sampler-token-sampler",
    "nothing",
    "sum-of-targets",
    "unknown",
]
"""What a loss does: it descends a target (the name alone), or it climbs one. `nothing` is a zero gradient,
`sum-of-targets` the sum of two targets, which the audit names beside it, and `unknown` none of these."""

Role = Literal["reverse", "forward", "sampler", "climbs", "nothing", "sum", "unknown"]
"""Decides how a target is drawn: `klgrad.audit.page` has the icon of each role."""


class Descends(NamedTuple):
    """The targets whose gradient a loss has, with samples from π and with samples from another policy."""

    on_policy: Verdict
    off_policy: Verdict


@dataclass(frozen=True)
class Target:
    """An objective that a loss may descend or climb, or one of the other verdicts.

    Attributes:
        name: in JSON, in `--expect` and in tables.
        role: decides how the target is drawn.
        title: for headings.
        phrase: within a sentence, after "descends".
        sentence: what the verdict means.
        formula: the objective that is differentiated.
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
    role: Role
    title: str
    phrase: str
    sentence: str
    formula: str
    same_on_policy: TargetName | None = None
    climbed: TargetName | None = None

    @property
    def level(self) -> Literal["token", "sequence"] | None:
        """Whether the KL is one of tokens or of completions; None for a verdict that is no target."""
        return "sequence" if "-sequence" in self.name else "token" if "-token" in self.name else None

    @property
    def anchor(self) -> Literal["ref", "sampler"]:
        """The policy that π is compared with."""
        return "sampler" if "-kl-sampler" in self.name else "ref"

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


# One record for each verdict, simplest first: where several coincide, the audit reports the first.

_DESCENDED = (
    Target(
        "reverse-kl-sequence",
        "reverse",
        "Reverse KL, whole completions",
        "the reverse KL of whole completions",
        "The gradient of KL(π‖ref) of whole completions.",
        "KL(π‖ref) between distributions over completions",
    ),
    Target(
        "reverse-kl-token",
        "reverse",
        "Reverse KL, token by token",
        "the token-level reverse KL (prefixes held fixed)",
        "The gradient of KL(π‖ref) of each next token; a token's effect on later tokens is left out.",
        "Σ KL(π‖ref) of the next token over the prefixes that π visits, the visits held fixed",
    ),
    Target(
        "reverse-kl-token-sampler",
        "reverse",
        "Reverse KL, token by token, on the sampler's prefixes",
        "the token-level reverse KL on the sampler's prefixes",
        "The gradient of KL(π‖ref) of each next token, at the prefixes that the sampler visits.",
        "Σ KL(π‖ref) of the next token over the prefixes that the sampler visits",
        same_on_policy="reverse-kl-token",
    ),
    Target(
        "forward-kl-token",
        "forward",
        "Forward KL, token by token",
        "the token-level forward KL",
        "The gradient of KL(ref‖π) of each next token. Its optimum differs from that of the reverse KL.",
        "Σ KL(ref‖π) of the next token over the prefixes that π visits, the visits held fixed",
    ),
    Target(
        "forward-kl-token-sampler",
        "forward",
        "Forward KL, token by token, on the sampler's prefixes",
        "the token-level forward KL on the sampler's prefixes",
        "The gradient of KL(ref‖π) of each next token, at the prefixes that the sampler visits.",
        "Σ KL(ref‖π) of the next token over the prefixes that the sampler visits",
        same_on_policy="forward-kl-token",
    ),
    Target(
        "forward-kl-sequence",
        "forward",
        "Forward KL, whole completions",
        "the forward KL of whole completions",
        "The gradient of KL(ref‖π) of whole completions. Its optimum differs from that of the reverse KL.",
        "KL(ref‖π) between distributions over completions",
    ),
    Target(
        "k3-token",
        "forward",
        "k3 of each token, averaged over the sampler's tokens",
        "the mean of k3 over the sampler's tokens",
        "The gradient of its mean. It is a KL only if π is the sampler; it is 0 only where π is ref.",
        "E[Σ (ref/π - 1 - log ref/π of the token)] over the sampler's completions, the sampler held fixed",
        same_on_policy="forward-kl-token",
    ),
    Target(
        "squared-token",
        "reverse",
        "Squared log-ratio of each token",
        "the squared log-ratio of each token",
        "The gradient of its mean over the sampler's tokens. It is 0 only where π is ref at all of them.",
        "E[Σ (log π/ref of the token)²/2] over the sampler's completions, the sampler held fixed",
        same_on_policy="reverse-kl-token",
    ),
    Target(
        "squared-sequence",
        "reverse",
        "Squared log-ratio of the completion",
        "the squared sequence log-ratio",
        "The gradient of its mean over the sampler's completions. It has the same optimum as the reverse KL.",
        "E[(log π(y)/ref(y))²/2] over the sampler's completions, the sampler held fixed",
        same_on_policy="reverse-kl-sequence",
    ),
    Target(
        "forward-kl-sampler-sequence",
        "sampler",
        "Forward KL to the sampler, whole completions",
        "the forward KL between the completions of the sampler and of π",
        "The gradient of KL(sampler‖π) between completions: π is pulled to whatever was sampled.",
        "KL(sampler‖π) between distributions over completions",
    ),
    Target(
        "reverse-kl-sampler-sequence",
        "sampler",
        "Reverse KL to the sampler, whole completions",
        "the reverse KL between the completions of π and of the sampler",
        "The gradient of KL(π‖sampler) between completions.",
        "KL(π‖sampler) between distributions over completions",
    ),
    Target(
        "reverse-kl-sampler-token-sampler",
        "sampler",
        "Reverse KL to the sampler, token by token, on the sampler's prefixes",
        "the token-level reverse KL to the sampler on the sampler's prefixes",
        "The gradient of KL(π‖sampler) of each next token, at the prefixes that the sampler visits.",
        "Σ KL(π‖sampler) of the next token over the prefixes that the sampler visits",
    ),
)

_OTHERS = (
    Target("nothing", "nothing", "Nothing", "nothing", "Zero in expectation: it regularises nothing.", "zero"),
    Target(
        "sum-of-targets",
        "sum",
        "A sum of two targets",
        "a sum of two targets",
        "Its gradient is exactly a sum of multiples of the gradients of two targets.",
        "a · one target + b · another",
    ),
    Target(
        "unknown",
        "unknown",
        "No known divergence",
        "no known divergence",
        "Its gradient is that of no target.",
        "none of these",
    ),
)


def _climbing(target: Target) -> Target:
    """The verdict of a loss whose gradient is that of a target with the sign reversed."""
    away = "the sampler" if target.anchor == "sampler" else "ref"
    name = cast(TargetName, target.name)
    return replace(
        target,
        name=signed(name, climbs=True),
        role="climbs",
        title=f"Climbs: {target.title_in_sentence}",
        sentence=f"The gradient of the target with the sign reversed: minimising the loss moves π away from {away}.",
        formula=f"- {target.formula}",
        same_on_policy=None,
        climbed=name,
    )


def signed(target: TargetName, *, climbs: bool) -> Verdict:
    """The verdict of a loss that descends a target, or that climbs it."""
    return cast(Verdict, f"climbs {target}") if climbs else target


TARGETS: dict[Verdict, Target] = {
    target.name: target for target in (*_DESCENDED, *map(_climbing, _DESCENDED), *_OTHERS)
}
"""Every verdict by name."""

UNCORRECTED: frozenset[TargetName] = frozenset({"squared-token", "k3-token"})
"""Means of an estimator over the sampler's tokens. They are KLs only if π is the sampler."""
