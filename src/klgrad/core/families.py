"""What may be declared as a KL term, what it descends, its formula and its computation.

With l_t the log-ratio of a token, c the slope of the divergence and e its excess (`klgrad.core.divergences`), a sampled
term has the coefficient

    w_t c(l_t) + Σ_{s>t} discount^(s-t) w_s e(l_s)    on the score of token t,

where the future is absent at the token level; between completions it is w_T c(Σ_s l_s) on every token. An exact term
has the gradient of the divergence over the whole vocabulary in the place of c, and its value in the place of e. For the
reverse KL alone the second form is one between completions, too: there c(l) = l may stand for e (k1).

| family              | sampled and exact | discount | leave-one-out | ratios                                       |
|---------------------|-------------------|----------|---------------|----------------------------------------------|
| token               | both              | 0        | sampled only  | none, token (sampled only), prefix, sequence |
| future              | both              | (0, 1]   | yes           | none, prefix, sequence                       |
| between completions | sampled           | 1        | yes           | none, sequence                               |

The reverse KL at level="sequence" is of the family `future`. An influence bound is for sampled estimators. Their names
are k1 and, with a future, k1_k3 for the reverse KL, k3 for the forward KL, and `sampled` for all others. The reasons
for the empty cells are in `check`; a test compares it with this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor

from ..errors import MeaningError, RolloutError
from ..targets import Descends, Verdict
from . import credit
from .importance import Ratio, Weights
from .result import Reduction
from .rollout import Rollout

if TYPE_CHECKING:
    from .term import KLTerm

# The values that the fields of a `KLTerm` can take.

Direction = Literal["reverse", "forward"]
"""`reverse` is KL(π‖ref), `forward` is KL(ref‖π)."""

Level = Literal["token", "sequence", "future"]
"""`sequence`: distributions over completions. `token`: distributions over one token, prefixes held fixed. `future`: the
same, and what a token does to the divergences of later tokens."""

TermEstimator = Literal["k1", "k1_k3", "k3", "exact", "sampled"]
"""The sampled estimators of the two KLs by their names, `exact` for a sum over the vocabulary, or `sampled`."""

Baseline = Literal["none", "leave_one_out", "token_kl"]
"""What is subtracted from a coefficient to lower its variance; `token_kl` is KL_t, the mean of l_t at the prefix."""

VALUES: dict[str, tuple[str, ...]] = {
    "level": get_args(Level),
    "estimator": get_args(TermEstimator),
    "baseline": get_args(Baseline),
    "reduction": get_args(Reduction),
}
"""The allowed values of each field that takes one of a few strings."""

CHOICES = {
    "divergence": get_args(Direction),
    "level": VALUES["level"][:2],
    "estimator": VALUES["estimator"][:4],
    "baseline": VALUES["baseline"][:2],
    "reduction": VALUES["reduction"],
}
"""The values of the two KLs, which trainers offer and the catalogue of the audit combines."""

SAMPLED_ESTIMATORS: dict[str, tuple[TermEstimator, ...]] = {"reverse": ("k1", "k1_k3"), "forward": ("k3",)}
"""By divergence; any other has `sampled` alone."""


# The table: which values of the options may be declared.


def has_future(term: KLTerm) -> bool:
    """Whether later tokens enter the coefficient of a token."""
    return term.level != "token" and not is_between_completions(term)


def is_between_completions(term: KLTerm) -> bool:
    """Whether the log-ratio is that of the completion; the reverse KL there is a sum over tokens with their futures."""
    return term.level == "sequence" and term.divergence != "reverse"


def check(term: KLTerm) -> None:
    """Raise `MeaningError` for the first option that the table does not have: what would be, what is, and a remedy."""
    is_exact, is_token = term.estimator == "exact", term.level == "token"
    future, between = has_future(term), is_between_completions(term)
    estimator, discounted, ratio = repr(term.estimator), 0 < term.discount < 1, ratio_of(term)
    estimators = (*SAMPLED_ESTIMATORS.get(str(term.divergence), ("sampled",)), "exact")
    other = "forward" if term.estimator == "k3" else "reverse"
    ratios, reason = _ratios(term)
    refusals = (
        (
            is_exact and between,
            "a sampled estimator between completions (level='sequence'), whose ratio no sum over one token's "
            "vocabulary gives",
            estimator,
            "write estimator='k3' for the forward KL and 'sampled' for others, or level='token' or 'future'",
        ),
        (
            term.estimator == "k1_k3" and term.divergence == "reverse" and not future,
            "estimator='k1' or 'exact' at level='token' (discount=0), which has no future to put k3 on",
            estimator,
            "write estimator='k1', or level='sequence' with a discount above 0",
        ),
        (
            term.estimator not in estimators,
            f"estimator in {estimators} for divergence={term.divergence!r}",
            f"{estimator}, which has the gradient of the {other} KL",
            f"write estimator={estimators[-2]!r}{' for the low variance of k3' if estimators[-2] == 'k1_k3' else ''}, "
            f"or divergence={other!r} if that was meant; GRPO's term, for study, is zoo.get('k3-loss')",
        ),
        (
            discounted and not future,
            f"a discount of 0 or 1 at level={term.level!r}, where no later token has a part of its own",
            f"discount={term.discount:g}",
            "write level='future' with the discount, or drop the discount",
        ),
        (
            ratio is not None and ratio not in ratios,
            f"ratio in {ratios} for estimator={estimator} at level={term.level!r}: {reason}",
            f"ratio={ratio!r}",
            f"write ImportanceWeighting({ratios[0]!r}, ...)",
        ),
        (
            is_token and is_exact and term.baseline == "leave_one_out",
            "no baseline for an exact token term (level='token' or discount=0), whose gradient has no sampled score "
            "to centre",
            f"baseline={term.baseline!r}",
            "write baseline='none', or level='sequence' with a discount above 0: the future has a sampled score",
        ),
        (
            is_exact and term.influence_bound is not None,
            "no influence bound for estimator='exact', which sums over the vocabulary",
            f"influence_bound={term.influence_bound}",
            "drop the bound, or use a sampled estimator",
        ),
        (
            term.baseline == "token_kl" and (is_exact or term.divergence != "reverse"),
            "baseline='token_kl' with a sampled reverse KL, whose l_t has the mean KL_t",
            f"divergence={term.divergence!r}, estimator={estimator}",
            "write divergence='reverse' and estimator='k1', or baseline='none'",
        ),
    )
    for is_refused, expected, received, remedy in refusals:
        if is_refused:
            raise MeaningError(expected, received, remedy)


def _ratios(term: KLTerm) -> tuple[tuple[Ratio, ...], str]:
    """The ratios that a term may have, and why no others."""
    if is_between_completions(term):
        return ("sequence",), "the coefficient is one for all tokens"
    if has_future(term):
        return ("prefix", "sequence"), "a token ratio leaves the sampler's prefixes in the expectation"
    if term.estimator == "exact":
        return ("prefix", "sequence"), "without a ratio it is the target on the sampler's prefixes"
    return get_args(Ratio), ""


def ratio_of(term: KLTerm) -> Ratio | None:
    """The importance ratio of the term; None for on-policy terms."""
    return None if term.weighting is None else term.weighting.ratio


# What a term descends.

WHERE: dict[Level, str] = {"token": "token level", "future": "token level and its future", "sequence": "sequence level"}
"""The levels in words."""

WITHOUT_RATIO: dict[str, Verdict] = {"reverse": "squared-token", "forward": "k3-token"}
"""What the sampled token terms of the KLs descend on stale samples: the mean of k2 and of k3 under the sampler."""


def descends(term: KLTerm) -> Descends:
    """The targets whose gradients the term is, on-policy and off-policy.

    With `reduction="token"` they are those of large batches: a mean over the tokens of a small batch is biased.
    """
    of_kl, is_token = term.divergence in get_args(Direction) and term.level != "future", term.level == "token"
    if term.influence_bound is not None or (of_kl and 0 < term.discount < 1):
        return Descends("unknown", "unknown")
    target = f"{term.divergence}-kl-{term.level}" if of_kl else f"{term.generator.name}, {WHERE[term.level]}"
    target += f", discount {term.discount:g}" if 0 < term.discount < 1 else ""
    on_sampler = target + ("-sampler" if of_kl else " on the sampler's prefixes")
    off_policy = "unknown"
    if term.weighting is not None and term.weighting.bound is None:
        off_policy = on_sampler if term.weighting.ratio == "token" else target
    elif is_token and term.weighting is None and term.baseline == "none":
        off_policy = on_sampler if term.estimator == "exact" else WITHOUT_RATIO.get(str(term.divergence), off_policy)
    return Descends(cast(Verdict, target), cast(Verdict, off_policy))


# The gradient of a term as a formula in parts, joined only when it is shown.

SCORE = "∇log π(y_t)"
"""The score of the sampled token."""

UNITS = {"sequence": "summed over the sequence", "token": "averaged over the batch's tokens"}
"""How the tokens' terms become one number, by reduction."""

KLS = {"reverse": "KL(π‖ref)", "forward": "KL(ref‖π)"}
"""The KLs as formulas write them."""


@dataclass(frozen=True)
class Formula:
    """A gradient in parts. `str` joins them; a caller that knows more can replace a part first.

    Attributes:
        divergence: `KL(π‖ref)`, `KL(ref‖π)`, or the name of another divergence.
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


SYMBOLS = {
    None: ("", "", "", ""),
    "token": ("r_t ", "r_s ", "", ""),
    "prefix": ("w_t ", "w_s ", "w_{t-1} ", "w_{s-1} "),
    "sequence": ("w_T ", "w_T ", "w_T ", "w_T "),
}
"""By ratio, the weight of token t, of a later token s, and of the prefixes of both."""


def formula(term: KLTerm) -> Formula:
    """The term's gradient, with everything that was declared."""
    ratio = ratio_of(term)
    return Formula(
        divergence=KLS.get(str(term.divergence), term.generator.name),
        where=f", {WHERE[term.level]}",
        sampler="π" if ratio is None else "μ",
        body=_body(term),
        unit=UNITS[term.reduction],
        sampling="on-policy" if ratio is None else f"off-policy by the {ratio} ratio",
        notes=_notes(term),
    )


def _body(term: KLTerm) -> str:
    """What is summed over t inside the expectation: the token's own part, then the future."""
    own, own_later, before, before_later = SYMBOLS[ratio_of(term)]
    of_reverse = term.divergence == "reverse"
    discount = "" if term.discount == 1 else f"{term.discount:g}^(s-t) "
    future = f" + Σ_{{s>t}} {discount}" if has_future(term) else ""
    if term.estimator == "exact":
        symbol = "KL" if str(term.divergence) in KLS else "D"
        later = f"{future}{before_later}{symbol}_s {SCORE}" if future else ""
        return f"{before}∇{symbol}_t{later}"
    at = "Σ_s l_s" if is_between_completions(term) else "l_t"
    slope = re.sub(r"\bl\b", at, term.generator.formula)
    own += slope if of_reverse else f"({slope})"
    excess = {"k1": "l_s", "k1_k3": "k3(l_s)"}.get(term.estimator, "f(u_s)/u_s")
    later = f"{future}{own_later}{excess}" if future else ""
    return f"({own}{later}) {SCORE}" if future or of_reverse else f"{own} {SCORE}"


def _notes(term: KLTerm) -> tuple[str, ...]:
    """The declared bounds and baseline, one sentence each."""
    qualifiers: list[str] = []
    if term.weighting is not None:
        bound = term.weighting.bound
        qualifiers.append("ratio unbounded" if bound is None else f"ratio bounded by {bound}")
    if term.baseline != "none":
        qualifiers.append({"leave_one_out": "leave-one-out baseline", "token_kl": "baseline KL_t"}[term.baseline])
    if term.influence_bound is not None:
        qualifiers.append(f"each token's own part clipped at ±{term.influence_bound:g} before credit and weights")
    return tuple(qualifiers)


# The computation.


def contributions(term: KLTerm, rollout: Rollout) -> tuple[Tensor, Tensor | None, Tensor]:
    """What each token of a sampled term puts on its own score and on those before it, and the estimate; unweighted.

    The second is None without a future. The estimate, (B, T) or between completions (B, 1), is the excess; for k1 it is
    the log-ratio itself.
    """
    generator, at = term.generator, rollout.log_ratio
    if is_between_completions(term):
        whole = credit.whole(at, rollout.mask)
        return generator.slope(whole), None, generator.excess(at.sum(-1, keepdim=True))
    estimate = at if term.estimator == "k1" else generator.excess(at)
    return generator.slope(at), estimate if has_future(term) else None, estimate


def evaluate(term: KLTerm, rollout: Rollout, weights: Weights) -> tuple[Tensor, Tensor, Tensor | None]:
    """The (B, T) coefficients, the (B,) values and the (B, T) part that is differentiated, None for sampled terms."""
    if term.estimator == "exact":
        pathwise = weights.before * full_divergence(term, rollout)
        later = pathwise.detach()
        coefficient, value = torch.zeros_like(later), later.sum(-1)
        later = later if has_future(term) else None
    else:
        own, later, estimate = contributions(term, rollout)
        bound = float("inf") if term.influence_bound is None else term.influence_bound  # the slope of a Huber loss
        coefficient = weights.own * own.clamp(-bound, bound)
        later = None if later is None else weights.own * later.clamp(-bound, bound)
        value, pathwise = (weights.own[:, : estimate.shape[1]] * estimate).sum(-1), None
    if later is not None:
        coefficient = coefficient + credit.future(later, rollout.mask, term.discount)
    if term.baseline == "leave_one_out":
        # The baseline is weighted like the score it multiplies: E_μ[w_t s_t] = 0, E_μ[s_t] is not.
        coefficient = coefficient - weights.own * credit.leave_one_out(coefficient, rollout.group)
    elif term.baseline == "token_kl":
        coefficient = coefficient - weights.own * full_divergence(term, rollout).detach()
    return coefficient, value, pathwise


def full_divergence(term: KLTerm, rollout: Rollout) -> Tensor:
    """The divergence of each token over the full vocabulary, (B, T)."""
    field = f"token_{term.divergence}_kl" if str(term.divergence) in KLS else "token_divergence"
    divergence: Tensor | None = getattr(rollout, field)
    if divergence is None:
        raise RolloutError(
            f"`{field}` for estimator='exact' or baseline='token_kl'",
            "none",
            f"pass Rollout({field}=...), or choose a sampled estimator without that baseline",
        )
    return divergence
