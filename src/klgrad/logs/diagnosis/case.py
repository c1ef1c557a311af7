"""A mismatch of trainer and sampler, and the cause that explains it."""

from dataclasses import dataclass, field
from functools import cached_property

from .evidence import Evidence, Line, Prompts
from .temperature import Range, allowed

AGREE = 1e-3
"""Root mean square of d below which trainer and sampler agree: the size of differences between float32 kernels."""


@dataclass(frozen=True)
class Cause:
    """The likely cause of a mismatch.

    Attributes:
        name: `none`, `shift`, `rounding`, `filter`, `temperature`, `random trainer`, `systematic` or `unexplained`.
        description: one or two sentences with the statistics that show the cause.
        remedy: what to change; empty for `none`.
        alone: whether the cause explains the whole difference; None if the data are not sufficient to decide.
        statistics: the numbers in the description.
    """

    name: str
    description: str
    remedy: str = ""
    alone: bool | None = True
    statistics: dict[str, float] = field(default_factory=dict)


class Case:
    """The evidence, with the quantities that several checks use: x and y of some tokens, and d = y - x."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.x, self.y = evidence.tokens()
        self.d = self.y - self.x
        self.rms = float(self.d.square().mean().sqrt())
        self.prompts: Prompts | None = evidence.prompts()
        self.line: Line | None = evidence.line()

    @cached_property
    def temperatures(self) -> Range:
        """The temperatures that are possible for all of the tokens."""
        return allowed(self.x, self.y)

    @property
    def opposite_share(self) -> float:
        """Differences that make a token less likely under the sampler, relative to the others: 0 for a filter."""
        return float((-self.d).clamp(min=0).mean() / self.d.clamp(min=0).mean().clamp(min=1e-12))

    @property
    def noise(self) -> float | None:
        """Share of the difference, as a root mean square, that varies between repeats; None if not known."""
        return None if self.prompts is None else self.prompts.noise / max(self.prompts.off, 1e-12)

    def missing_data(self, what: str) -> str:
        """Describe the data that would be needed to decide `what`."""
        if not self.evidence.grouped:
            return f"A `group` column would show {what}."
        return f"The prompts in the `group` column have too few first tokens in common to show {what}."
