"""The objectives whose gradient a KL loss may have: one record each.

Every other module looks up a target's name, words and role here.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Verdict = Literal[
    "reverse-kl-sequence",
    "reverse-kl-token",
    "reverse-kl-token-sampler",
    "forward-kl-token",
    "forward-kl-sequence",
    "squared-sequence",
    "nothing",
    "unknown",
]
"""The name of a target, `nothing` for a zero gradient, or `unknown` for the gradient of no known target."""

Role = Literal["reverse", "forward", "nothing", "unknown"]
"""Decides how a target is drawn: `klgrad.audit.render.roles` has the colour, icon and terminal style of each role."""


class Descends(NamedTuple):
    """The targets whose gradient a loss has, with samples from π and with samples from another policy."""

    on_policy: Verdict
    off_policy: Verdict


@dataclass(frozen=True)
class Target:
    """An objective that a loss may descend.

    Attributes:
        name: in JSON, in `--expect` and in tables.
        title: for headings.
        short: for the cell of a table.
        phrase: within a sentence, after "descends".
        sentence: what the verdict means.
        formula: the objective that is differentiated.
        role: decides how the target is drawn.
        level: whether the KL is one of tokens or of completions; None for `nothing` and `unknown`.
        same_on_policy: the simpler target with the same gradient on-policy; the audit then reports that one.

    Example:
        >>> from klgrad.targets import TARGETS
        >>> TARGETS["forward-kl-token"].title
        'Forward KL, token by token'
    """

    name: Verdict
    title: str
    short: str
    phrase: str
    sentence: str
    formula: str
    role: Role
    level: Literal["token", "sequence"] | None = None
    same_on_policy: Verdict | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether there is an objective with a gradient to compare with: False for `nothing` and `unknown`."""
        return self.level is not None

    @property
    def title_in_sentence(self) -> str:
        """The title with a small first letter."""
        return self.title[0].lower() + self.title[1:]


_RECORDS = (
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
        name="unknown",
        title="No known divergence",
        short="unknown",
        phrase="no known divergence",
        sentence="Its gradient is that of no target.",
        formula="none of these",
        role="unknown",
    ),
)

TARGETS: dict[Verdict, Target] = {target.name: target for target in _RECORDS}
"""Every target by name, simplest first: where several coincide, the audit reports the first."""

WITH_GRADIENT: tuple[Verdict, ...] = tuple(name for name, target in TARGETS.items() if target.has_gradient)
"""The names of the targets with a gradient to compare with, in the same order."""
