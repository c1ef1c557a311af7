"""The gradient of a term as a formula in parts, joined only when it is shown."""

from dataclasses import dataclass
from typing import NamedTuple

from .choices import Declaration

SCORE = "∇log π(y_t)"
"""The score of the sampled token."""

UNITS = {"sequence": "summed over the sequence", "token": "averaged over the batch's tokens"}
"""How the tokens' terms become one number, by reduction."""


@dataclass(frozen=True)
class Formula:
    """A gradient in parts. `str` joins them; a caller that knows more can replace a part first.

    Attributes:
        divergence: `KL(π‖ref)` or `KL(ref‖π)`.
        where: what qualifies the divergence, such as `, token level`.
        sampler: the policy that the expectation is taken over, π or μ.
        body: what is summed over t inside the expectation.
        unit: how the tokens' terms become one number.
        sampling: how the samples are weighted.
        notes: everything else that was declared.

    Examples:
        >>> print(Formula("KL(π‖ref)", ", token level", "π", "l_t ∇log π(y_t)", "summed", "on-policy"))
        ∇ KL(π‖ref), token level = E_π[ Σ_t l_t ∇log π(y_t) ]; summed; on-policy
    """

    divergence: str
    where: str
    sampler: str
    body: str
    unit: str
    sampling: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        gradient = f"∇ {self.divergence}{self.where} = E_{self.sampler}[ Σ_t {self.body} ]"
        return "; ".join([gradient, self.unit, self.sampling, *self.notes])


class WeightSymbols(NamedTuple):
    """How the importance weights are written; empty for on-policy terms.

    Attributes:
        own: the weight of token t's own term.
        own_later: the same at a later token s.
        before: the weight of token t's prefix alone.
        before_later: the same at a later token s.
    """

    own: str
    own_later: str
    before: str
    before_later: str


SYMBOLS = {
    None: WeightSymbols("", "", "", ""),
    "token": WeightSymbols("r_t ", "r_s ", "", ""),
    "prefix": WeightSymbols("w_t ", "w_s ", "w_{t-1} ", "w_{s-1} "),
    "sequence": WeightSymbols("w_T ", "w_T ", "w_T ", "w_T "),
}
"""The symbols of the weights, by ratio."""


def weight_symbols(term: Declaration) -> WeightSymbols:
    """The symbols of the weights that the term uses."""
    return SYMBOLS[None if term.weighting is None else term.weighting.ratio]


def notes(term: Declaration) -> tuple[str, ...]:
    """The declared bounds and baseline, one sentence each."""
    found: list[str] = []
    if term.weighting is not None:
        bound = term.weighting.bound
        found.append("ratio unbounded" if bound is None else f"ratio bounded by {bound}")
    if term.baseline == "leave_one_out":
        found.append("leave-one-out baseline")
    if term.influence_bound is not None:
        found.append(f"each token's own part clipped at ±{term.influence_bound:g} before credit and weights")
    return tuple(found)
