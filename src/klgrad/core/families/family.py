"""What every family of KL terms has: a table of what may be declared, a target, a formula and a computation."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...errors import RolloutError
from ...targets import Descends, Verdict
from ..importance import Weights
from ..influence import clip_influence
from ..rollout import Rollout
from .choices import Declaration, Divergence, Level
from .formula import UNITS, Formula, notes, weight_symbols
from .table import Table


class Contributions(NamedTuple):
    """What the tokens of a sampled term contribute to the coefficients, neither weighted nor bounded.

    Attributes:
        own: (B, T) what each token puts on its own score.
        later: (B, T) what each token puts on the scores of all tokens before it; None at token level.
    """

    own: Tensor
    later: Tensor | None


class Parts(NamedTuple):
    """What a family computes from one batch, with the importance weights applied.

    Attributes:
        present: (B, T) the coefficient of each token's score from the token's own term.
        later: (B, T) what each token adds to the coefficients of all tokens before it; None at token level.
        value: (B,) the estimate of each completion's divergence.
        pathwise: (B, T) what is differentiated directly, the weighted full-vocabulary KL; None for sampled terms.
    """

    present: Tensor
    later: Tensor | None
    value: Tensor
    pathwise: Tensor | None


class Family(ABC):
    """A divergence at a level: what may be declared, what it descends, its formula and its computation.

    Attributes:
        divergence: the divergence.
        level: the level.
        target: the target whose gradient a term of this family is.
        symbol: how the divergence is written in formulas.
        full_kl_field: the field of `Rollout` with the divergence of each token over the full vocabulary.
        table: what may be declared.
    """

    divergence: ClassVar[Divergence]
    level: ClassVar[Level]
    target: ClassVar[Verdict]
    symbol: ClassVar[str]
    full_kl_field: ClassVar[str]
    table: ClassVar[Table]

    def descends(self, term: Declaration) -> Descends:
        """The targets whose gradients the term is, on-policy and off-policy.

        With `reduction="token"` they are those of large batches: a mean over the tokens of a small batch is biased.
        """
        if term.influence_bound is not None or 0 < term.discount < 1:
            return Descends("unknown", "unknown")
        corrected = term.weighting is not None and term.weighting.bound is None
        return Descends(self.target, self.off_policy_target(term) if corrected else self.uncorrected_target(term))

    def off_policy_target(self, term: Declaration) -> Verdict:
        """What the term descends off-policy with its ratio unbounded."""
        return self.target

    def uncorrected_target(self, term: Declaration) -> Verdict:
        """What the term descends off-policy without a ratio, or with a bounded one."""
        return "unknown"

    def formula(self, term: Declaration) -> Formula:
        """The term's gradient, with everything that was declared."""
        ratio = None if term.weighting is None else term.weighting.ratio
        return Formula(
            divergence=self.symbol,
            where=f", {self.level} level",
            sampler="π" if ratio is None else "μ",
            body=self.body(term),
            unit=UNITS[term.reduction],
            sampling="on-policy" if ratio is None else f"off-policy by the {ratio} ratio",
            notes=notes(term),
        )

    def body(self, term: Declaration) -> str:
        """What is summed over t inside the expectation: here, that of an exact token term."""
        return f"{weight_symbols(term).before}∇KL_t"

    def parts(self, term: Declaration, rollout: Rollout, weights: Weights) -> Parts:
        """Compute the parts of the gradient and the value, weighted and bounded."""
        if term.estimator == "exact":
            return self.exact_parts(rollout, weights)
        found = self.contributions(term, rollout)
        present = weights.own * clip_influence(found.own, term.influence_bound)
        later = None if found.later is None else weights.own * clip_influence(found.later, term.influence_bound)
        return Parts(present, later, self.value(rollout, found, weights), None)

    def exact_parts(self, rollout: Rollout, weights: Weights) -> Parts:
        """The parts of an exact term: no sampled score of its own, and the full KL differentiated."""
        pathwise = weights.before * self.full_kl(rollout)
        kl = pathwise.detach()
        return Parts(torch.zeros_like(kl), kl if self.level == "sequence" else None, kl.sum(-1), pathwise)

    def full_kl(self, rollout: Rollout) -> Tensor:
        """The divergence of each token over the full vocabulary, (B, T)."""
        found: Tensor | None = getattr(rollout, self.full_kl_field)
        if found is None:
            raise RolloutError(
                f"`{self.full_kl_field}` for estimator='exact'",
                "none",
                f"pass Rollout({self.full_kl_field}=...), or choose a sampled estimator",
            )
        return found

    @abstractmethod
    def contributions(self, term: Declaration, rollout: Rollout) -> Contributions:
        """What the tokens of a sampled term contribute to the coefficients."""

    @abstractmethod
    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The estimate of each completion's divergence by a sampled term, (B,)."""
