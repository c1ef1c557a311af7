"""The families of KL terms, one for each divergence at each level.

| family            | estimators       | discount | leave-one-out | ratios                                       |
|-------------------|------------------|----------|---------------|----------------------------------------------|
| reverse, sequence | k1, k1_k3, exact | (0, 1]   | yes           | none, prefix, sequence                       |
| reverse, token    | k1, exact        | 0        | sampled only  | none, token (sampled only), prefix, sequence |
| forward, token    | k3, exact        | 0        | sampled only  | none, prefix, sequence                       |
| forward, sequence | k3               | 1        | yes           | none, sequence                               |

An influence bound is for sampled estimators. The classes hold this table with the reasons for its empty cells; a test
compares the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..errors import MeaningError, RolloutError
from ..targets import Descends, Verdict
from . import credit
from .estimators import forward_k3, k3
from .importance import Ratio, Weights
from .result import Reduction
from .rollout import Rollout

if TYPE_CHECKING:
    from .term import KLTerm

# The values that the fields of a `KLTerm` can take.

Divergence = Literal["reverse", "forward"]
"""`reverse` is KL(π‖ref), `forward` is KL(ref‖π)."""

Level = Literal["token", "sequence"]
"""`sequence`: distributions over completions. `token`: distributions over one token, prefixes held fixed."""

TermEstimator = Literal["k1", "k1_k3", "k3", "exact"]
"""The sampled estimators of `klgrad.estimators`, or `exact` for a sum over the vocabulary."""

Baseline = Literal["none", "leave_one_out"]
"""What is subtracted from a coefficient to lower its variance."""

CHOICES: dict[str, tuple[str, ...]] = {
    "divergence": get_args(Divergence),
    "level": get_args(Level),
    "estimator": get_args(TermEstimator),
    "baseline": get_args(Baseline),
    "reduction": get_args(Reduction),
}
"""The allowed values of each field that takes one of a few strings."""


# The influence bound: how much one sample's log-ratio may contribute to a coefficient.


def check_influence_bound(bound: float | None) -> None:
    """Raise `MeaningError` unless the bound is None or a positive, finite number."""
    if bound is not None and not 0 < bound < float("inf"):
        raise MeaningError(
            "a positive, finite influence bound, or None", f"{bound}", "write influence_bound=5.0, for example"
        )


def clip_influence(x: Tensor, bound: float | None) -> Tensor:
    """Clip `x` to [-bound, bound], the slope of a Huber loss; None leaves it as it is."""
    return x if bound is None else x.clamp(-bound, bound)


# The table of a family: which values of its options may be declared.
#
# The table has a cell for each value of each option. A cell is `ALLOWED`, or a `Refusal` with the reason and the
# remedy.


@dataclass(frozen=True)
class Refusal:
    """An empty cell of a family's table.

    Attributes:
        expected: what would be allowed, and why.
        received: what was given; `{}` stands for the value.
        remedy: what to write instead.
        only_exact: the cell is empty for estimator='exact' alone, and allowed for sampled estimators.
    """

    expected: str
    received: str
    remedy: str
    only_exact: bool = False


ALLOWED = None
"""A cell of a table whose value is allowed."""

TableCell = Refusal | None

NO_FUTURE_TO_DISCOUNT = Refusal(
    "no discount at level='token', which is discount 0",
    "discount={}",
    "write level='sequence' with the discount, or drop the discount",
)

NO_SCORE_TO_CENTRE = Refusal(
    "no baseline for an exact token term (level='token' or discount=0), whose gradient has no sampled score to centre",
    "baseline={!r}",
    "write baseline='none', or level='sequence' with a discount above 0: the future has a sampled score",
    only_exact=True,
)

NO_BOUND_FOR_EXACT = Refusal(
    "no influence bound for estimator='exact', which sums over the vocabulary",
    "influence_bound={}",
    "drop the bound, or use a sampled estimator",
    only_exact=True,
)


@dataclass(frozen=True)
class Table:
    """The cells of a family's table.

    Attributes:
        estimators: by `estimator`.
        ratios: by the ratio of `weighting`; None for on-policy terms.
        baselines: by `baseline`.
        partial_discount: for a `discount` strictly between 0 and 1.
        influence_bound: for an `influence_bound` that is not None.
    """

    estimators: Mapping[TermEstimator, TableCell]
    ratios: Mapping[Ratio | None, TableCell]
    baselines: Mapping[Baseline, TableCell]
    partial_discount: TableCell
    influence_bound: TableCell = NO_BOUND_FOR_EXACT

    def check(self, term: KLTerm) -> None:
        """Raise `MeaningError` if an option of the term is an empty cell."""
        ratio = None if term.weighting is None else term.weighting.ratio
        cells: list[tuple[TableCell, object]] = [
            (self.estimators[term.estimator], term.estimator),
            (self.partial_discount if 0 < term.discount < 1 else ALLOWED, f"{term.discount:g}"),
            (self.ratios[ratio], ratio),
            (self.baselines[term.baseline], term.baseline),
            (ALLOWED if term.influence_bound is None else self.influence_bound, term.influence_bound),
        ]
        for cell, value in cells:
            if cell is not None and (term.estimator == "exact" or not cell.only_exact):
                raise MeaningError(cell.expected, cell.received.format(value), cell.remedy)


# The gradient of a term as a formula in parts, joined only when it is shown.

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


def weight_symbols(term: KLTerm) -> WeightSymbols:
    """The symbols of the weights that the term uses."""
    return SYMBOLS[None if term.weighting is None else term.weighting.ratio]


def notes(term: KLTerm) -> tuple[str, ...]:
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


# What every family of KL terms has: a table of what may be declared, a target, a formula and a computation.


class Contributions(NamedTuple):
    """What the tokens of a sampled term contribute to the coefficients, neither weighted nor bounded.

    Attributes:
        own: (B, T) what each token puts on its own score.
        later: (B, T) what each token puts on the scores of all tokens before it; None at token level.
    """

    own: Tensor
    later: Tensor | None


class TermParts(NamedTuple):
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

    def descends(self, term: KLTerm) -> Descends:
        """The targets whose gradients the term is, on-policy and off-policy.

        With `reduction="token"` they are those of large batches: a mean over the tokens of a small batch is biased.
        """
        if term.influence_bound is not None or 0 < term.discount < 1:
            return Descends("unknown", "unknown")
        corrected = term.weighting is not None and term.weighting.bound is None
        return Descends(self.target, self.off_policy_target(term) if corrected else self.uncorrected_target(term))

    def off_policy_target(self, term: KLTerm) -> Verdict:
        """What the term descends off-policy with its ratio unbounded."""
        return self.target

    def uncorrected_target(self, term: KLTerm) -> Verdict:
        """What the term descends off-policy without a ratio, or with a bounded one."""
        return "unknown"

    def formula(self, term: KLTerm) -> Formula:
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

    def body(self, term: KLTerm) -> str:
        """What is summed over t inside the expectation: here, that of an exact token term."""
        return f"{weight_symbols(term).before}∇KL_t"

    def parts(self, term: KLTerm, rollout: Rollout, weights: Weights) -> TermParts:
        """Compute the parts of the gradient and the value, weighted and bounded."""
        if term.estimator == "exact":
            return self.exact_parts(rollout, weights)
        found = self.contributions(term, rollout)
        present = weights.own * clip_influence(found.own, term.influence_bound)
        later = None if found.later is None else weights.own * clip_influence(found.later, term.influence_bound)
        return TermParts(present, later, self.value(rollout, found, weights), None)

    def exact_parts(self, rollout: Rollout, weights: Weights) -> TermParts:
        """The parts of an exact term: no sampled score of its own, and the full KL differentiated."""
        pathwise = weights.before * self.full_kl(rollout)
        kl = pathwise.detach()
        return TermParts(torch.zeros_like(kl), kl if self.level == "sequence" else None, kl.sum(-1), pathwise)

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
    def contributions(self, term: KLTerm, rollout: Rollout) -> Contributions:
        """What the tokens of a sampled term contribute to the coefficients."""

    @abstractmethod
    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The estimate of each completion's divergence by a sampled term, (B,)."""


# The reverse KL, KL(π‖ref), between completions and between tokens.

NOT_K3 = Refusal(
    "for the reverse KL estimator='k1', 'k1_k3' or 'exact'",
    "{!r}, whose slope 1 - exp(-l) is the gradient of the forward KL",
    "write estimator='k1_k3' for k3's low variance with the reverse gradient, or divergence='forward' "
    "if that was meant; GRPO's term, for study, is zoo.get('k3-loss')",
)


class ReverseSequence(Family):
    """KL(π‖ref) between distributions over completions.

    The score of a token is paired with its own log-ratio and with the estimates of all later tokens.
    """

    divergence = "reverse"
    level = "sequence"
    target = "reverse-kl-sequence"
    symbol = "KL(π‖ref)"
    full_kl_field = "token_reverse_kl"

    table = Table(
        estimators={"k1": ALLOWED, "k1_k3": ALLOWED, "k3": NOT_K3, "exact": ALLOWED},
        ratios={
            None: ALLOWED,
            "token": Refusal(
                "a ratio that covers the prefix, for the reverse KL at level='sequence'",
                "ratio={!r}, which leaves the sampler's prefixes in the expectation",
                "write ImportanceWeighting('prefix', ...), or level='token' for the target on the sampler's prefixes",
            ),
            "prefix": ALLOWED,
            "sequence": ALLOWED,
        },
        baselines={"none": ALLOWED, "leave_one_out": ALLOWED},
        partial_discount=ALLOWED,
    )

    def contributions(self, term: KLTerm, rollout: Rollout) -> Contributions:
        """The log-ratio on the token's own score; on earlier scores the log-ratio (k1) or k3 (k1_k3)."""
        own = rollout.log_ratio
        return Contributions(own, own if term.estimator == "k1" else k3.value(own))

    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The sum of what the tokens put on earlier scores, which is an estimate of their KL."""
        return (weights.own * (found.own if found.later is None else found.later)).sum(-1)

    def body(self, term: KLTerm) -> str:
        """The token's own part, then the future."""
        weight = weight_symbols(term)
        future = " + Σ_{s>t} " + ("" if term.discount == 1 else f"{term.discount:g}^(s-t) ")
        if term.estimator == "exact":
            return f"{super().body(term)}{future}{weight.before_later}KL_s {SCORE}"
        paid = "l_s" if term.estimator == "k1" else "k3(l_s)"
        return f"({weight.own}l_t{future}{weight.own_later}{paid}) {SCORE}"


class ReverseToken(Family):
    """KL(π‖ref) between distributions over one token, with the visited prefixes held fixed.

    It is `ReverseSequence` without the future: discount 0.
    """

    divergence = "reverse"
    level = "token"
    target = "reverse-kl-token"
    symbol = "KL(π‖ref)"
    full_kl_field = "token_reverse_kl"

    table = Table(
        estimators={
            "k1": ALLOWED,
            "k1_k3": Refusal(
                "estimator='k1' or 'exact' at level='token' (discount=0), which has no future to put k3 on",
                "{!r}",
                "write estimator='k1', or level='sequence' with a discount above 0",
            ),
            "k3": NOT_K3,
            "exact": ALLOWED,
        },
        ratios={
            None: ALLOWED,
            "token": Refusal(
                "no token ratio for an exact token term: a sum over the vocabulary needs none, and on stale samples "
                "the term without a ratio is the target on the sampler's prefixes",
                "ratio={!r}",
                "write weighting=None, or ImportanceWeighting('prefix', ...) for π's own prefixes",
                only_exact=True,
            ),
            "prefix": ALLOWED,
            "sequence": ALLOWED,
        },
        baselines={"none": ALLOWED, "leave_one_out": NO_SCORE_TO_CENTRE},
        partial_discount=NO_FUTURE_TO_DISCOUNT,
    )

    def off_policy_target(self, term: KLTerm) -> Verdict:
        """The token ratio corrects the token and leaves the sampler's prefixes."""
        on_sampled_prefixes = term.weighting is not None and term.weighting.ratio == "token"
        return "reverse-kl-token-sampler" if on_sampled_prefixes else self.target

    def uncorrected_target(self, term: KLTerm) -> Verdict:
        """A sum over the vocabulary samples no token, and so needs no ratio on the sampler's prefixes."""
        if term.weighting is not None or term.baseline != "none":
            return "unknown"
        return "reverse-kl-token-sampler" if term.estimator == "exact" else "squared-token"

    def contributions(self, term: KLTerm, rollout: Rollout) -> Contributions:
        """The log-ratio on the token's own score."""
        return Contributions(rollout.log_ratio, None)

    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The sum of the log-ratios."""
        return (weights.own * found.own).sum(-1)

    def body(self, term: KLTerm) -> str:
        """The token's own part."""
        if term.estimator == "exact":
            return super().body(term)
        return f"({weight_symbols(term).own}l_t) {SCORE}"


# The forward KL, KL(ref‖π), between completions and between tokens.

REVERSE_COEFFICIENT = Refusal(
    "for the forward KL estimator='k3' (coefficient 1 - exp(-l)), or 'exact' at level='token'",
    "{!r}, whose coefficient l is the gradient of the reverse KL",
    "write estimator='k3', or divergence='reverse'",
)

ONE_RATIO_PER_COMPLETION = Refusal(
    "the sequence ratio for the forward KL at level='sequence'",
    "ratio={!r}",
    "write ImportanceWeighting('sequence', ...)",
)


class ForwardToken(Family):
    """KL(ref‖π) between distributions over one token, with the visited prefixes held fixed."""

    divergence = "forward"
    level = "token"
    target = "forward-kl-token"
    symbol = "KL(ref‖π)"
    full_kl_field = "token_forward_kl"

    table = Table(
        estimators={"k1": REVERSE_COEFFICIENT, "k1_k3": REVERSE_COEFFICIENT, "k3": ALLOWED, "exact": ALLOWED},
        ratios={
            None: ALLOWED,
            "token": Refusal(
                "a ratio that covers the prefix, for the forward KL",
                "ratio={!r}",
                "write ImportanceWeighting('prefix', ...)",
            ),
            "prefix": ALLOWED,
            "sequence": ALLOWED,
        },
        baselines={"none": ALLOWED, "leave_one_out": NO_SCORE_TO_CENTRE},
        partial_discount=NO_FUTURE_TO_DISCOUNT,
    )

    def uncorrected_target(self, term: KLTerm) -> Verdict:
        """A sum over the vocabulary samples no token, and so needs no ratio on the sampler's prefixes."""
        if term.weighting is not None or term.baseline != "none":
            return "unknown"
        return "forward-kl-token-sampler" if term.estimator == "exact" else "k3-token"

    def contributions(self, term: KLTerm, rollout: Rollout) -> Contributions:
        """The slope of k3 on the token's own score."""
        return Contributions(k3.slope(rollout.log_ratio), None)

    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The forward estimate of each token, summed."""
        return (weights.own * forward_k3.value(rollout.log_ratio)).sum(-1)

    def body(self, term: KLTerm) -> str:
        """The token's own part."""
        if term.estimator == "exact":
            return super().body(term)
        return f"{weight_symbols(term).own}(1 - exp(-l_t)) {SCORE}"


class ForwardSequence(Family):
    """KL(ref‖π) between distributions over completions: one coefficient for all tokens of a completion."""

    divergence = "forward"
    level = "sequence"
    target = "forward-kl-sequence"
    symbol = "KL(ref‖π)"
    full_kl_field = "token_forward_kl"

    table = Table(
        estimators={
            "k1": REVERSE_COEFFICIENT,
            "k1_k3": REVERSE_COEFFICIENT,
            "k3": ALLOWED,
            "exact": Refusal(
                "estimator='k3' for the forward KL at level='sequence': it is -E_ref[score], which no sum over "
                "one token's vocabulary gives",
                "{!r}",
                "write estimator='k3', or level='token'",
            ),
        },
        ratios={
            None: ALLOWED,
            "token": ONE_RATIO_PER_COMPLETION,
            "prefix": ONE_RATIO_PER_COMPLETION,
            "sequence": ALLOWED,
        },
        baselines={"none": ALLOWED, "leave_one_out": ALLOWED},
        partial_discount=Refusal(
            "discount=1 for the forward KL at level='sequence', whose coefficient is one for all tokens",
            "discount={}",
            "drop the discount, or level='token'",
        ),
    )

    def contributions(self, term: KLTerm, rollout: Rollout) -> Contributions:
        """The slope of k3 at the completion's log-ratio, on every token's score."""
        return Contributions(k3.slope(credit.whole(rollout.log_ratio, rollout.mask)), None)

    def value(self, rollout: Rollout, found: Contributions, weights: Weights) -> Tensor:
        """The forward estimate at the completion's log-ratio."""
        return weights.own[:, 0] * forward_k3.value(rollout.log_ratio.sum(-1))

    def body(self, term: KLTerm) -> str:
        """The completion's part."""
        return f"{weight_symbols(term).own}(1 - exp(-Σ_s l_s)) {SCORE}"


FAMILIES: dict[tuple[Divergence, Level], Family] = {
    (family.divergence, family.level): family
    for family in (ReverseSequence(), ReverseToken(), ForwardToken(), ForwardSequence())
}
"""The family of each divergence at each level."""
