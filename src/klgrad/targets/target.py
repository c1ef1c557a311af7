"""`Target`: what is known about one verdict."""

from dataclasses import dataclass
from typing import Literal

from .names import Role, TargetName, Verdict


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
