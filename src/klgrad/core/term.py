"""`KLTerm`: a KL term declared by what it means, and computed accordingly."""

import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import MeaningError
from ..targets import Descends
from . import families
from .divergences import Divergence, by_name, named, short_number
from .estimators import MAX_EXPONENT
from .families import VALUES, Baseline, Formula, Level, TermEstimator
from .importance import ImportanceWeighting, Weights, effective_sample_size
from .result import KLResult, Reduction, assemble
from .rollout import Rollout

# Numbers about how a term was computed on one batch: lengths, extremes, and what the bounds did.


def diagnostics(term: "KLTerm", rollout: Rollout, ratios: Tensor | None) -> dict[str, Tensor]:
    """Describe one evaluation of a term by detached scalars; `ratios` are those before their bound.

    On-policy terms have none, and need no device synchronisation.
    """
    # A masked token has log-ratio 0, and so changes no maximum and no count.
    log_ratio = rollout.log_ratio
    scalars = {
        "length/mean": rollout.lengths.mean(),
        "log_ratio/abs_max": log_ratio.abs().amax(),
        "log_ratio/share_saturated": _share(log_ratio.abs() > MAX_EXPONENT, rollout),
    }
    if term.influence_bound is not None:
        own, later, _ = families.contributions(term, rollout)
        clipped = [own] if later is None else [own, later]
        largest = torch.stack(clipped).abs().amax(0)
        scalars["influence/share_bounded"] = _share(largest > term.influence_bound, rollout)
    if ratios is not None and term.weighting is not None:
        scalars |= _ratio_diagnostics(term.weighting, rollout.mask, ratios)
    return scalars


def _share(flags: Tensor, rollout: Rollout) -> Tensor:
    """The share of live tokens with the flag."""
    live = rollout.mask
    return (flags & live).sum() / live.sum().clamp(min=1).to(rollout.log_ratio.dtype)


def _ratio_diagnostics(weighting: ImportanceWeighting, live: Tensor, ratios: Tensor) -> dict[str, Tensor]:
    # One weight per sample of what is weighted: a live token, or a completion (for a (B, 1) ratio).
    raw = ratios[live] if ratios.shape == live.shape else ratios[live.any(-1), 0]
    if not len(raw):
        return {}
    used = raw if weighting.bound is None else weighting.bound(raw)
    return {
        "ratio/share_bounded": (used != raw).to(raw.dtype).mean(),
        "ratio/effective_sample_size": effective_sample_size(used),
        "ratio/max": raw.amax(),
    }


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    r"""A KL term by what it means. A combination that could not mean it raises `MeaningError`.

    Estimates:
        the declared divergence, in the unit of `reduction`, unbiased unless a bound is active.
    Gradient:
        reverse, sequence: `reverse-kl-sequence`.
        reverse, token: `reverse-kl-token`, and with the token ratio off-policy `reverse-kl-token-sampler`.
        forward, token: `forward-kl-token`.
        forward, sequence: `forward-kl-sequence`.
        Other divergences, and level="future": `descends` names them in words.
        With a discount strictly between 0 and 1 or an active bound the gradient is near these but equal to none of
        them, and `descends` says `unknown`. With reduction="token" and varying lengths it is that of the target in
        the limit of large batches; in small ones it is biased.
    Requires:
        y ~ π, or `weighting=ImportanceWeighting(...)` and `Rollout.behavior_logp`.

    `level="token"` and `discount=0` mean the same. Terms declared either way are equal; their fields are then
    level="token", discount=0.0.

    Args:
        divergence: `reverse` is KL(π‖ref), `forward` is KL(ref‖π). Others by name are `jensen-shannon`, `chi-square`,
            `hellinger`, `total-variation`, `alpha(0.3)`, `jensen-shannon(0.1)` and `huber(2)`, and sums such as
            `0.3 forward + 0.7 reverse`; or a `klgrad.divergences.Divergence`, such as one of your own by
            `klgrad.divergences.from_slope`.
        level: `sequence` is the gradient of the divergence between distributions over completions; `token` that of
            each token's divergence, with the visited prefixes held fixed; `future` that of the sum of the tokens'
            divergences, in which a token also counts for the prefixes that it leads to. For the reverse KL alone
            `future` and `sequence` are one.
        estimator: for reverse `k1`, the default; `k1_k3` (sequence level: the token's own part by k1, the future by
            k3); `exact` (full vocabulary, needs `Rollout.token_reverse_kl`). For forward `k3`, or `exact`
            (`Rollout.token_forward_kl`). For others `sampled`, the default, or `exact` (`Rollout.token_divergence`).
            Between completions nothing but the reverse KL has an exact form.
        discount: g in [0, 1] on the future: 0 is the token level, 1 the whole future.
        baseline: `leave_one_out` needs `Rollout.group`; `token_kl` subtracts the exact KL of the token, and needs
            `Rollout.token_reverse_kl`. They do not change the expected gradient, unless a ratio is bounded or
            reduction="token": they then change their bias.
        weighting: None for on-policy, or `ImportanceWeighting`.
        influence_bound: c > 0 clips each token's own part (its log-ratio, and its k3 in the future of others) to
            [-c, c] before credit and weights: the slope of a Huber loss, which is nowhere zero but at 0.
        reduction: `sequence` sums over the completion, `token` averages over all live tokens.

    Raises:
        MeaningError: with the reason and the sound alternative.

    Examples:
        >>> import torch
        >>> from klgrad import KLTerm, Rollout
        >>> logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> rollout = Rollout(logp, ref_logp=torch.tensor([[-1.5, -2.25]]), mask=torch.ones(1, 2))
        >>> term = KLTerm()
        >>> print(term)
        ∇ KL(π‖ref), sequence level = E_π[ Σ_t (l_t + Σ_{s>t} l_s) ∇log π(y_t) ]; summed over the sequence; on-policy
        >>> result = term(rollout)
        >>> result.coefficient
        tensor([[0.7500, 0.2500]])
        >>> result.loss.backward()  # or subtract β times the coefficient from the advantages
        >>> torch.equal(logp.grad, result.coefficient)
        True
        >>> KLTerm(discount=0) == KLTerm(level="token")
        True
        >>> print(KLTerm(divergence="chi-square", level="token"))
        ∇ chi-square, token level = E_π[ Σ_t (exp(l_t) - 1) ∇log π(y_t) ]; summed over the sequence; on-policy

    References:
        Tang and Munos, On a few pitfalls in KL divergence gradient estimation for RL, 2025, arXiv:2506.09477 (the
        gradient of the sequence-level KL pairs a token's score with all later log-ratios).
        Amini, Vieira and Cotterell, Better estimation of the KL divergence between language models, 2025,
        arXiv:2504.10637 (the exact estimator and its gradient).
    """

    divergence: str | Divergence = "reverse"
    level: Level = "sequence"
    estimator: TermEstimator = "sampled"
    discount: float = 1.0
    baseline: Baseline = "none"
    weighting: ImportanceWeighting | None = None
    influence_bound: float | None = None
    reduction: Reduction = "sequence"

    def __post_init__(self) -> None:
        self._check_fields()
        self._name_divergence()
        # One meaning, one form: equality, hash, name and formula then agree by themselves. At level="token" a
        # discount of 1 may be the default, and means the same.
        if self.discount == 0 or (self.level == "token" and self.discount == 1):
            object.__setattr__(self, "level", "token")
            object.__setattr__(self, "discount", 0.0)
        families.check(self)

    def _name_divergence(self) -> None:
        """Hold a divergence that has a name by its name, which can be pickled and compared."""
        divergence = self.generator
        try:
            is_named = by_name(divergence.name) == divergence
        except MeaningError:
            is_named = False
        short = {f"{name}-kl": name for name in families.KLS}.get(divergence.name, divergence.name)
        object.__setattr__(self, "divergence", short if is_named else divergence)
        if self.divergence in families.KLS:
            if self.estimator == "sampled":
                object.__setattr__(self, "estimator", "k1")
            if self.divergence == "reverse" and self.level == "future":
                object.__setattr__(self, "level", "sequence")

    def _check_fields(self) -> None:
        """Each field by itself; the family checks how they combine."""
        for field, allowed in VALUES.items():
            value: object = getattr(self, field)
            if value not in allowed:
                raise MeaningError(f"{field} in {allowed}", repr(value), f"write {field}={allowed[0]!r}, for example")
        weighting = cast("object", self.weighting)
        if weighting is not None and not isinstance(weighting, ImportanceWeighting):
            raise MeaningError(
                "weighting=None (on-policy) or ImportanceWeighting(...)",
                repr(weighting),
                "write weighting=ImportanceWeighting('prefix', bound=None)",
            )
        if not 0 <= self.discount <= 1:
            raise MeaningError(
                "a discount in [0, 1]", f"{self.discount:g}", "write 1 for the whole future, or 0 for the token level"
            )
        if self.influence_bound is not None and not 0 < self.influence_bound < math.inf:
            raise MeaningError(
                "a positive, finite influence bound, or None",
                f"{self.influence_bound}",
                "write influence_bound=5.0, for example",
            )

    @property
    def generator(self) -> Divergence:
        """The divergence with its slope and its excess."""
        return by_name(self.divergence) if isinstance(self.divergence, str) else named(self.divergence)

    @property
    def name(self) -> str:
        """A short name, unique by meaning: `reverse-sequence-k1`, `reverse-token-exact-prefix-ratio`."""
        divergence = self.divergence if isinstance(self.divergence, str) else self.divergence.name
        parts = [divergence, self.level, self.estimator.replace("_", "-")]
        parts += {"none": [], "leave_one_out": ["loo"], "token_kl": ["token-kl"]}[self.baseline]
        parts += [f"discount{short_number(self.discount)}"] if 0 < self.discount < 1 else []
        if self.weighting is not None:
            parts.append(f"{self.weighting.ratio}-ratio")
            bound = self.weighting.bound
            if bound is not None:
                edges = "-".join(short_number(getattr(bound, f.name)) for f in fields(bound))
                parts.append(f"{type(bound).__name__.lower()}{edges}")
        parts += [f"huber{short_number(self.influence_bound)}"] if self.influence_bound is not None else []
        parts += ["per-token"] if self.reduction == "token" else []
        return "-".join(parts)

    @property
    def descends(self) -> Descends:
        """The targets whose gradients this term is, on-policy and off-policy, as the audit finds them."""
        return families.descends(self)

    @property
    def formula(self) -> Formula:
        """The gradient as a formula in parts; `str(term)` joins them."""
        return families.formula(self)

    def __str__(self) -> str:
        return str(self.formula)

    def __call__(self, rollout: Rollout) -> KLResult:
        """Evaluate the term on one batch.

        Args:
            rollout: the batch, with the fields that the term needs.

        Returns:
            The loss, the coefficients and the estimate; see `KLResult`.

        Raises:
            RolloutError: if `behavior_logp`, `group` or the full-vocabulary KL is needed and missing.
        """
        one = torch.ones_like(rollout.log_ratio)
        weights = Weights(one, one, None) if self.weighting is None else self.weighting.weights(rollout)
        coefficient, value, pathwise = families.evaluate(self, rollout, weights)
        return assemble(
            rollout,
            self.reduction,
            coefficient=coefficient,
            pathwise=pathwise,
            value_per_sequence=value,
            diagnose=partial(diagnostics, self, rollout, weights.raw),
        )


# What to do about an unsound loss, as data. Reports render it last: as a sentence, as HTML, or as JSON.


class Piece(NamedTuple):
    """A part of a rendered text, and whether it is code."""

    text: str
    is_code: bool = False


@dataclass(frozen=True)
class Remedy:
    """One thing to do about a loss.

    Attributes:
        do: the step or the purpose, such as "detach the ratio"; empty for a plain replacement.
        use: the replacements to choose from: terms, or names of losses of `klgrad.zoo`.
        why: what the replacement is good for.

    Example:
        >>> from klgrad import KLTerm
        >>> from klgrad.core.term import Remedy
        >>> str(Remedy(use=("k2-loss", KLTerm(level="token"))))
        "Use k2-loss or KLTerm(level='token') instead."
    """

    do: str = ""
    use: tuple[KLTerm | str, ...] = ()
    why: str = ""

    @property
    def terms(self) -> tuple[KLTerm, ...]:
        """The terms among the replacements."""
        return tuple(x for x in self.use if isinstance(x, KLTerm))

    @property
    def pieces(self) -> list[Piece]:
        """One sentence, with the replacements marked as code."""
        joint = ", use " if self.do.startswith("for ") else ": use "
        before = capitalised(f"{self.do}{joint}" if self.do and self.use else self.do or "use ")
        after = " instead" if self.use else ""
        sentence = [Piece(before)]
        for i, replacement in enumerate(self.use):
            sentence += [Piece(" or ")] * (i > 0) + [Piece(as_code(replacement), is_code=True)]
        return [*sentence, Piece(f"{after}{f' ({self.why})' if self.why else ''}.")]

    def __str__(self) -> str:
        return joined(self.pieces)

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        return {"do": self.do, "use": [as_code(x) for x in self.use], "why": self.why}


def joined(pieces: Iterable[Piece]) -> str:
    """The pieces as plain text."""
    return "".join(piece.text for piece in pieces)


def capitalised(text: str) -> str:
    """The text with a capital first letter; other letters stay as they are, unlike with `str.capitalize`."""
    return text[:1].upper() + text[1:]


def as_code(value: object) -> str:
    """Python code for a replacement: a name as it is, a dataclass by the fields that it needs.

    Its first field is written without a name if it is required.

    Example:
        >>> from klgrad import ImportanceWeighting, KLTerm
        >>> as_code(KLTerm(weighting=ImportanceWeighting("prefix", bound=None)))
        "KLTerm(weighting=ImportanceWeighting('prefix', bound=None))"
    """
    return value if isinstance(value, str) else _literal(value)


def _literal(value: Any) -> str:
    if not is_dataclass(value):
        return repr(value)
    # A term at the token level has a discount of 0, and its sampled estimator of the reverse KL is called k1.
    is_term = isinstance(value, KLTerm)
    implied = {"discount": is_term and value.level == "token", "estimator": is_term and value.estimator == "k1"}
    arguments: list[str] = []
    for f in fields(value):
        given, is_required = getattr(value, f.name), f.default is MISSING
        if is_required or (given != f.default and not implied.get(f.name)):
            is_first = is_required and not f.kw_only and not arguments
            arguments.append(_literal(given) if is_first else f"{f.name}={_literal(given)}")
    return f"{type(value).__name__}({', '.join(arguments)})"
