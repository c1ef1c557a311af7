"""A mismatch as the judges take it, and the cause that they find."""

from dataclasses import dataclass, field
from functools import cached_property

from .evidence import Evidence, Line, Prompts
from .temperature import Range, allowed

AGREE = 1e-3
"""Root mean square of d below which trainer and sampler agree: of the size of float32 kernels' differences."""


@dataclass(frozen=True)
class Cause:
    """What explains a mismatch.

    Attributes:
        name: `none`, `shift`, `rounding`, `filter`, `temperature`, `random trainer`, `systematic` or `unexplained`.
        says: a sentence or two with the statistics that show it.
        remedy: what to change; empty for `none`.
        alone: whether it explains all of the difference; None where the data cannot tell.
        statistics: the numbers of the sentences.
    """

    name: str
    says: str
    remedy: str = ""
    alone: bool | None = True
    statistics: dict[str, float] = field(default_factory=dict)


class Case:
    """The evidence with what all judges ask for."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.x, self.y = evidence.tokens()
        self.d = self.y - self.x
        self.rms = float(self.d.square().mean().sqrt())
        self.prompts: Prompts | None = evidence.prompts()
        self.line: Line | None = evidence.line()

    @cached_property
    def temperatures(self) -> Range:
        """Those that no token speaks against."""
        return allowed(self.x, self.y)

    @property
    def back(self) -> float:
        """Differences that make a token less likely to the sampler, against the others: 0 for a filter."""
        return float((-self.d).clamp(min=0).mean() / self.d.clamp(min=0).mean().clamp(min=1e-12))

    @property
    def noise(self) -> float | None:
        """Share of the difference, as a root mean square, that is another one every time; None if not known."""
        return None if self.prompts is None else self.prompts.noise / max(self.prompts.off, 1e-12)

    def ask(self, what: str) -> str:
        """What further data would tell."""
        if not self.evidence.grouped:
            return f"A `group` column would tell {what}."
        return f"The prompts in the `group` column have too few first tokens in common to tell {what}."
