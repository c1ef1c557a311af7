"""What to write in a framework, and which of its lines the card of a loss shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...targets import TARGETS, Target, Verdict
from ..audit_result import AuditResult


@dataclass(frozen=True)
class Fix:
    """What to write to descend a target, in a framework's own settings or in code.

    Attributes:
        target: the verdict that is wanted.
        lines: configuration to copy, or code where no setting has this target.
        on_policy, off_policy: what the lines descend.
        subject: the name of the audited loss that they configure; empty for code.
        place: where the code goes; empty for configuration.
        note: further information.
    """

    target: Verdict
    lines: str
    on_policy: Verdict
    off_policy: Verdict
    subject: str = ""
    place: str = ""
    note: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the lines have the wanted target on every problem."""
        return self.on_policy == self.target

    @property
    def heading(self) -> str:
        """The title of its panel."""
        how = ", in code" if self.place else "" if self.is_exact else ", nearest setting"
        return TARGETS[self.target].title + how

    @property
    def reason(self) -> str:
        """Introduces its lines in the card of another loss."""
        wanted = f"For the {TARGETS[self.target].title_in_sentence}"
        if self.place:
            return f"{wanted} on every batch, in code"
        return f"{wanted}, " + ("write" if self.is_exact else "the nearest setting")


Fixes = Mapping[str, Sequence[Fix]]
"""By name of the framework."""


def own_lines(r: AuditResult, fixes: Sequence[Fix]) -> list[tuple[Fix, str]]:
    """The framework's lines for the reverse KL nearest to this loss, each with the sentence that introduces it."""
    for fix in fixes:
        if fix.subject == r.name and fix.is_exact:
            return [(fix, f"These are its lines, for the {TARGETS[fix.target].title_in_sentence}")]
    level = _nearest(r).level or "token"
    reverse: Verdict = "reverse-kl-sequence" if level == "sequence" else "reverse-kl-token"
    wanted = [f for f in fixes if f.target == reverse and f.subject != r.name] or list(fixes)
    exact = [f for f in wanted if f.is_exact and not f.place]
    return [(fix, fix.reason) for fix in exact[:1] or wanted]


def _nearest(r: AuditResult) -> Target:
    """What is probably meant. A loss that descends `nothing` is mostly a token's KL that was differentiated."""
    verdict = r.verdict_fixed_lengths if r.length_sensitive else r.verdict
    return TARGETS[r.nearest if verdict == "unknown" else verdict]
