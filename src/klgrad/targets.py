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


class Descends(NamedTuple):
    """The targets whose gradient a loss has, with samples from π and with samples from another policy."""

    on_policy: Verdict
    off_policy: Verdict


@dataclass(frozen=True)
class Target:
    """An objective that a loss may descend or climb, or one of the other verdicts.

    Attributes:
        name: in JSON and in `--expect`.
        phrase: within a sentence, after "the".
        formula: the objective that is differentiated.
        same_on_policy: the simpler target with the same gradient on-policy; the audit then reports that one.
        climbed: the target that is climbed, if this is the verdict of a loss that climbs.

    Example:
        >>> from klgrad.targets import TARGETS
        >>> TARGETS["forward-kl-token"].title
        'Forward KL, token by token'
        >>> TARGETS["climbs forward-kl-sampler-sequence"].does
        'climbs the forward KL to the sampler, whole completions'
    """

    name: Verdict
    phrase: str
    formula: str
    same_on_policy: TargetName | None = None
    climbed: TargetName | None = None

    @property
    def title(self) -> str:
        """For headings."""
        title = f"Climbs: {self.phrase}" if self.climbed else self.phrase
        return title[0].upper() + title[1:]

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
        """The predicate of a sentence: "descends the forward KL, token by token"."""
        return f"{'climbs' if self.climbed else 'descends'} the {self.phrase}"


# One record for each verdict, simplest first: where several coincide, the audit reports the first.

_PREFIXES = "of the next token over the prefixes that"
_SAMPLED = "over the sampler's completions, the sampler held fixed"

_TARGETS = (
    Target("reverse-kl-sequence", "reverse KL, whole completions", "KL(π‖ref) between distributions over completions"),
    Target(
        "reverse-kl-token", "reverse KL, token by token", f"Σ KL(π‖ref) {_PREFIXES} π visits, the visits held fixed"
    ),
    Target(
        "reverse-kl-token-sampler",
        "reverse KL, token by token, on the sampler's prefixes",
        f"Σ KL(π‖ref) {_PREFIXES} the sampler visits",
        "reverse-kl-token",
    ),
    Target(
        "forward-kl-token", "forward KL, token by token", f"Σ KL(ref‖π) {_PREFIXES} π visits, the visits held fixed"
    ),
    Target(
        "forward-kl-token-sampler",
        "forward KL, token by token, on the sampler's prefixes",
        f"Σ KL(ref‖π) {_PREFIXES} the sampler visits",
        "forward-kl-token",
    ),
    Target("forward-kl-sequence", "forward KL, whole completions", "KL(ref‖π) between distributions over completions"),
    Target(
        "k3-token",
        "mean of k3 over the sampler's tokens",
        f"E[Σ (ref/π - 1 - log ref/π of the token)] {_SAMPLED}",
        "forward-kl-token",
    ),
    Target(
        "squared-token",
        "mean squared log-ratio of the sampler's tokens",
        f"E[Σ (log π/ref of the token)²/2] {_SAMPLED}",
        "reverse-kl-token",
    ),
    Target(
        "squared-sequence",
        "mean squared log-ratio of the sampler's completions",
        f"E[(log π(y)/ref(y))²/2] {_SAMPLED}",
        "reverse-kl-sequence",
    ),
    Target(
        "forward-kl-sampler-sequence",
        "forward KL to the sampler, whole completions",
        "KL(sampler‖π) between distributions over completions",
    ),
    Target(
        "reverse-kl-sampler-sequence",
        "reverse KL to the sampler, whole completions",
        "KL(π‖sampler) between distributions over completions",
    ),
    Target(
        "reverse-kl-sampler-token-sampler",
        "reverse KL to the sampler, token by token, on the sampler's prefixes",
        f"Σ KL(π‖sampler) {_PREFIXES} the sampler visits",
    ),
)

_OTHERS = (
    Target("nothing", "nothing", "zero"),
    Target("sum-of-targets", "sum of two targets", "a · one target + b · another"),
    Target("unknown", "divergence without a name", "none of these"),
)


def signed(target: TargetName, *, climbs: bool) -> Verdict:
    """The verdict of a loss that descends a target, or that climbs it."""
    return cast(Verdict, f"climbs {target}") if climbs else target


def _climbing(target: Target) -> Target:
    """The verdict of a loss whose gradient is that of a target with the sign reversed."""
    name = cast(TargetName, target.name)
    formula = f"- {target.formula}"
    return replace(target, name=signed(name, climbs=True), formula=formula, same_on_policy=None, climbed=name)


TARGETS: dict[Verdict, Target] = {target.name: target for target in (*_TARGETS, *map(_climbing, _TARGETS), *_OTHERS)}
"""Every verdict by name."""

UNCORRECTED: frozenset[TargetName] = frozenset({"squared-token", "k3-token"})
"""Means of an estimator over the sampler's tokens. They are KLs only if π is the sampler."""
