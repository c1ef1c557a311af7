"""What a declared term means: which combinations are sound, what they descend, how to say it aloud."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from ..errors import MeaningError
from ..targets import Descends, Verdict
from .importance import Bound, Ratio
from .result import Reduction

if TYPE_CHECKING:
    from .term import KLTerm

Divergence = Literal["reverse", "forward"]
Level = Literal["token", "sequence"]
TermEstimator = Literal["k1", "k1_k3", "k3", "exact"]
Baseline = Literal["none", "leave_one_out"]

CHOICES: dict[str, tuple[str, ...]] = {
    "divergence": get_args(Divergence),
    "level": get_args(Level),
    "estimator": get_args(TermEstimator),
    "baseline": get_args(Baseline),
    "reduction": get_args(Reduction),
}


def check(term: KLTerm) -> None:
    """Raise `MeaningError` for a combination that cannot mean what it says."""
    _check_choices(term)
    _check_numbers(term)
    (_check_reverse if term.divergence == "reverse" else _check_forward)(term)
    if term.level == "token":
        _refuse(
            term.discount != 1.0,
            "no discount at level='token', which is discount 0",
            f"discount={term.discount:g}",
            "write level='sequence' with the discount, or drop the discount",
        )
        _refuse(
            term.estimator == "exact" and term.baseline != "none",
            "no baseline for an exact token term, whose gradient has no sampled score to centre",
            f"baseline={term.baseline!r}",
            "baseline='none'; at level='sequence' the future has a score and takes the baseline",
        )
        _refuse(
            term.estimator == "exact" and _ratio(term) == "token",
            "no token ratio for an exact token term: summed over the vocabulary it needs none, and on stale "
            "samples it is the target on the sampler's prefixes as it stands",
            "ratio='token'",
            "write weighting=None, or ImportanceWeighting('prefix', ...) for π's own prefixes",
        )
    _refuse(
        term.estimator == "exact" and term.influence_bound is not None,
        "no influence bound for estimator='exact', which sums over the vocabulary",
        f"influence_bound={term.influence_bound}",
        "drop the bound, or use estimator='k1'",
    )


def _check_choices(term: KLTerm) -> None:
    for field, allowed in CHOICES.items():
        value = getattr(term, field)
        _refuse(value not in allowed, f"{field} in {allowed}", repr(value), f"write {field}={allowed[0]!r}, say")
    _refuse(
        term.weighting is not None and not hasattr(term.weighting, "ratio"),
        "weighting=None (on-policy) or ImportanceWeighting(...)",
        repr(term.weighting),
        "write weighting=ImportanceWeighting('prefix', bound=None)",
    )


def check_weighting(ratio: object, bound: object) -> None:
    """Raise for a ratio or a bound that does not exist."""
    _refuse(
        ratio not in get_args(Ratio),
        f"ratio in {get_args(Ratio)}",
        repr(ratio),
        "write ImportanceWeighting('prefix', bound=None)",
    )
    _refuse(
        bound is not None and not isinstance(bound, Bound),
        "bound=None, Truncate(high), Clip(low, high) or Mask(low, high)",
        repr(bound),
        "write bound=Truncate(2.0), say",
    )


def check_influence_bound(bound: float | None) -> None:
    """Raise for a bound that bounds nothing."""
    _refuse(
        bound is not None and not 0 < bound < float("inf"),
        "a positive, finite influence bound, or None",
        f"{bound}",
        "bound the log-ratio at, say, 5.0",
    )


def _check_numbers(term: KLTerm) -> None:
    _refuse(
        not 0 <= term.discount <= 1,
        "a discount in [0, 1]",
        f"{term.discount:g}",
        "0 is the token level, 1 the whole future",
    )
    check_influence_bound(term.influence_bound)


def _check_reverse(term: KLTerm) -> None:
    _refuse(
        term.estimator == "k3",
        "for the reverse KL estimator='k1', 'k1_k3' or 'exact'",
        "'k3', whose slope 1 - exp(-l) is the gradient of the forward KL",
        "write estimator='k1_k3' for k3's low variance with the reverse gradient, or divergence='forward' "
        "if that was meant; GRPO's term, for study, is zoo.get('k3-loss')",
    )
    _refuse(
        term.estimator == "k1_k3" and term.level == "token",
        "estimator='k1' at level='token', which has no future to put k3 on",
        "'k1_k3'",
        "write estimator='k1', or level='sequence'",
    )
    _refuse(
        term.level == "sequence" and _ratio(term) == "token",
        "a ratio that covers the prefix, for the reverse KL at level='sequence'",
        "ratio='token', which leaves the sampler's prefixes in the expectation",
        "write ImportanceWeighting('prefix', ...), or level='token' for the target on the sampler's prefixes",
    )


def _check_forward(term: KLTerm) -> None:
    _refuse(
        term.estimator in ("k1", "k1_k3"),
        "for the forward KL estimator='k3' (coefficient 1 - exp(-l)), or 'exact' at level='token'",
        f"{term.estimator!r}, whose coefficient l is the gradient of the reverse KL",
        "write estimator='k3', or divergence='reverse'",
    )
    if term.level == "token":
        _refuse(
            _ratio(term) == "token",
            "a ratio that covers the prefix, for the forward KL",
            "ratio='token'",
            "write ImportanceWeighting('prefix', ...)",
        )
        return
    _refuse(
        term.estimator == "exact",
        "estimator='k3' for the forward KL at level='sequence': it is -E_ref[score], which no sum over "
        "one token's vocabulary gives",
        "'exact'",
        "write estimator='k3', or level='token'",
    )
    _refuse(
        term.discount != 1.0,
        "discount=1 for the forward KL at level='sequence', whose coefficient is one for all tokens",
        f"discount={term.discount:g}",
        "drop the discount, or level='token'",
    )
    _refuse(
        _ratio(term) in ("token", "prefix"),
        "the sequence ratio for the forward KL at level='sequence'",
        f"ratio={_ratio(term)!r}",
        "write ImportanceWeighting('sequence', ...)",
    )


def _refuse(wrong: bool, expected: str, received: str, remedy: str) -> None:
    if wrong:
        raise MeaningError(expected, received, remedy)


def _ratio(term: KLTerm) -> Ratio | None:
    return None if term.weighting is None else term.weighting.ratio


def descends(term: KLTerm) -> Descends:
    """What the term is the gradient of, on-policy and off-policy."""
    if term.influence_bound is not None or term.reduction == "token" or 0 < term.discount < 1:
        return Descends("unknown", "unknown")
    level = "token" if term.discount == 0 else term.level
    target: Verdict = f"{term.divergence}-kl-{level}"  # type: ignore[assignment]
    off: Verdict = "unknown" if term.weighting is None or term.weighting.bound is not None else target
    on_sampled_prefixes = term.divergence == "reverse" and level == "token" and _ratio(term) in (None, "token")
    if on_sampled_prefixes and (term.estimator == "exact" or off != "unknown"):
        off = "reverse-kl-token-sampler"
    return Descends(target, off)


def name(term: KLTerm) -> str:
    """A short name, unique by meaning, made of what differs from the plainest term."""
    parts = [term.divergence, term.level, term.estimator.replace("_", "-")]
    parts += ["loo"] if term.baseline == "leave_one_out" else []
    parts += [f"discount{term.discount:g}"] if term.discount != 1.0 else []
    if term.weighting is not None:
        parts.append(f"{term.weighting.ratio}-ratio")
        if term.weighting.bound is not None:
            bound = term.weighting.bound
            edges = "-".join(f"{getattr(bound, f.name):g}" for f in fields(bound))
            parts.append(f"{type(bound).__name__.lower()}{edges}")
    parts += [f"huber{term.influence_bound:g}"] if term.influence_bound is not None else []
    parts += ["per-token"] if term.reduction == "token" else []
    return "-".join(parts)


@dataclass(frozen=True)
class Formula:
    """A gradient in parts, for whoever shows it or knows more about a part than the term does; `str` joins them.

    Attributes:
        divergence: `KL(π‖ref)` or `KL(ref‖π)`.
        where: what qualifies the divergence, such as `, token level`.
        sampler: the policy that the expectation is taken over, π or μ.
        body: what is summed over t inside the expectation.
        unit: how the tokens' terms become one number.
        sampling: how the samples are weighted.
        notes: everything else that was declared.
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


def formula(term: KLTerm) -> Formula:
    """The term's gradient, with everything that was declared."""
    weight, before = {None: ("", ""), "token": ("r_t ", ""), "prefix": ("w_t ", "w_{t-1} ")}.get(
        _ratio(term), ("w_T ", "w_T ")
    )
    notes = []
    if term.weighting is not None:
        notes.append(f"ratio bounded by {term.weighting.bound}" if term.weighting.bound else "ratio unbounded")
    if term.baseline != "none":
        notes.append("leave-one-out baseline")
    if term.influence_bound is not None:
        notes.append(f"each token's own part clipped at ±{term.influence_bound:g} before credit and weights")
    return Formula(
        divergence="KL(π‖ref)" if term.divergence == "reverse" else "KL(ref‖π)",
        where=f", {term.level} level",
        sampler="π" if term.weighting is None else "μ",
        body=_body(term, weight, before),
        unit=_unit(term),
        sampling="on-policy" if term.weighting is None else f"off-policy by the {_ratio(term)} ratio",
        notes=tuple(notes),
    )


def _body(term: KLTerm, weight: str, before: str) -> str:
    future = "" if term.level == "token" or term.discount == 0 else " + Σ_{s>t} "
    discount = "" if term.discount == 1 else f"{term.discount:g}^(s-t) "
    score = "∇log π(y_t)"
    if term.divergence == "forward":
        if term.estimator == "exact":
            return f"{before}∇KL_t"
        return f"{weight}(1 - exp(-{'Σ_s l_s' if term.level == 'sequence' else 'l_t'})) {score}"
    if term.estimator == "exact":
        tail = f"{future}{discount}{before.replace('t-1', 's-1')}KL_s {score}" if future else ""
        return f"{before}∇KL_t{tail}"
    paid = "l_s" if term.estimator == "k1" else "k3(l_s)"
    tail = f"{future}{discount}{weight.replace('_t', '_s')}{paid}" if future else ""
    return f"({weight}l_t{tail}) {score}"


def _unit(term: KLTerm) -> str:
    return "summed over the sequence" if term.reduction == "sequence" else "averaged over the batch's tokens"
