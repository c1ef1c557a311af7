"""What the integrations into TRL and verl share: the declared KL with its checks, β, and KL values to report."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, get_args

from torch import Tensor

from .core.divergences import Divergence
from .core.estimators import k3
from .core.families import VALUES, full_divergence, is_between_completions
from .core.importance import Bound, Clip, ImportanceWeighting, Mask, Ratio, Truncate, sequence_ratio, token_ratio
from .core.rollout import Rollout
from .core.term import KLTerm
from .errors import MeaningError
from .support import Json

# β: constant, or adapted so that the KL stays near a target.

LARGEST_ERROR = 0.2
"""The relative error is clipped to ±20%, as Ziegler et al. (2019) do, so that one batch changes β little."""


@dataclass
class AdaptiveCoefficient:
    """β grows while the KL is above its target and shrinks while it is below.

    Attributes:
        value: the present β.
        target: the KL to hold, or None for a constant β.
        horizon: updates over which β changes by a factor of e while the relative error is 1.

    Reference:
        Ziegler et al., Fine-Tuning Language Models from Human Preferences (2019), section 2.2.
    """

    value: float
    target: float | None
    horizon: int

    def update(self, kl: float | None) -> None:
        """Adapt β after one optimizer step, by an unbiased estimate of the KL in the unit of the target.

        It is None if the step had no live token.
        """
        if self.target is None or kl is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= math.exp(error / self.horizon)

    def state_dict(self) -> Json:
        """The present β."""
        return {"value": self.value}

    def load_state_dict(self, state: Json) -> None:
        """Continue with an adapted β. A constant β is a setting, which a resumed run may change."""
        if self.target is not None:
            self.value = state["value"]


# Bounds of importance ratios as the text of a setting.


def bound_of(text: str, setting: str = "kl_ratio_bound") -> Bound | None:
    """Parse `truncate:2`, `clip:0.5:2`, `mask:0.5:2` or `none`; an error names the setting."""
    kind, *numbers = str(text).split(":")
    kinds = {"truncate": (Truncate, 1), "clip": (Clip, 2), "mask": (Mask, 2)}
    if text == "none":
        return None
    try:
        make, count = kinds[kind]
        values = [float(x) for x in numbers]
        if len(values) != count:
            raise ValueError
    except (KeyError, ValueError):
        raise MeaningError(
            f"`{setting}` as truncate:MAX, clip:LOW:HIGH, mask:LOW:HIGH or none",
            repr(text),
            "write truncate:2, for example",
        ) from None
    return make(*values)


def bound_text(bound: Bound | None) -> str:
    """The text that `bound_of` reads as this bound."""
    if bound is None:
        return "none"
    return ":".join([type(bound).__name__.lower(), *(repr(getattr(bound, f.name)) for f in fields(bound))])


# The declared KL: the settings that it has on TRL and on verl, their checks, and notes on what they mean.


LEAST: dict[str, tuple[str, float]] = {
    "coef": (">=", 0),
    "target": (">", 0),
    "horizon": (">=", 1),
    "top_k": (">=", 1),
    "prefix_weight": (">=", 0),
}
"""The ranges of the numbers that are no part of the term, which checks its own."""


def choice_field(*choices: str) -> Any:
    """A field with one of these words, the first by default."""
    return field(default=choices[0], metadata={"choices": list(choices)})


def refuse_if(is_wrong: object, expected: str, received: str, remedy: str) -> None:
    """Raise a `MeaningError`, unless all is well."""
    if is_wrong:
        raise MeaningError(expected, received, remedy)


@contextmanager
def lend(owner: object, **values: object) -> Iterator[None]:
    """While the context lasts, these attributes of an object of another library, or of a module, have these values."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def needs_no_weights(term: KLTerm) -> bool:
    """Whether the term is right on old completions: a KL summed over the vocabulary does not depend on the sampler."""
    return term.weighting is None and term.descends.off_policy != "unknown"


@dataclass(frozen=True)
class Facts:
    """What a framework's own settings say of the completions and of the loss.

    Attributes:
        framework: its name.
        stale: the setting by which completions are older than the policy that is trained on them, or None.
        filters: the settings by which completions are not samples of the policy.
        entropy: the setting that adds an entropy bonus, or None.
        mean: the setting by which a loss is averaged over the tokens of each completion, or None.
        sums: the settings that keep the declared KL instead of `mean`.
    """

    framework: str
    stale: str | None = None
    filters: Sequence[str] = ()
    entropy: str | None = None
    mean: str | None = None
    sums: str = ""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is trained beside the reward: β times a KL. `docs/train.md` and `docs/verl.md` explain each setting.

    Attributes:
        coef: β, the weight of the KL. With `target`, its starting value.
        target: adapt β so that KL(π‖ref) stays near this value; None for a constant β.
        horizon: updates over which β changes by a factor of e if the relative error is 1.
    """

    prefix: ClassVar[str] = "kl_"

    coef: float = 0.05
    placement: str = choice_field("loss", "advantage", "reward")
    divergence: str | Divergence = "reverse"
    level: str = field(default="sequence", metadata={"choices": list(VALUES["level"])})
    estimator: str = field(default="k1", metadata={"choices": list(VALUES["estimator"])})
    discount: float = 1.0
    baseline: str = field(default="none", metadata={"choices": list(VALUES["baseline"])})
    ratio: str = choice_field("none", *get_args(Ratio))
    ratio_bound: str = "truncate:2"
    influence_bound: float | None = None
    reduction: str = choice_field("policy", "sequence")
    target: float | None = None
    target_unit: str = choice_field("sequence", "token")
    horizon: int = 50

    def __post_init__(self) -> None:
        for f in fields(self):
            value, choices, remedy = getattr(self, f.name), f.metadata.get("choices"), f"{f.default} is the default"
            if choices is not None:
                refuse_if(value not in choices, f"`{self.prefix}{f.name}` {' or '.join(choices)}", repr(value), remedy)
            if f.name in LEAST and value is not None:
                sign, least = LEAST[f.name]
                inside = isinstance(value, int | float) and least <= value < math.inf and (sign, value) != (">", least)
                refuse_if(not inside, f"`{self.prefix}{f.name}` {sign} {least:g}", repr(value), remedy)
        _ = self.bound
        refuse_if(
            self.target is not None and not self.coef > 0,
            f"`{self.prefix}coef` > 0 with `{self.prefix}target`",
            "0",
            f"use a positive `{self.prefix}coef`: β is adapted by multiplication, and 0 would stay 0",
        )
        refuse_if(
            self.placement != "loss" and self.reduction != "policy",
            f"{self.named('reduction', 'policy')} with {self.named('placement', self.placement)}",
            self.named("reduction", self.reduction),
            f"use {self.named('placement', 'loss')} to sum the KL: advantages are reduced like the policy loss",
        )

    def named(self, name: str, value: object) -> str:
        """A setting as a user writes it."""
        return f"{self.prefix}{name}={value!r}"

    @cached_property
    def bound(self) -> Bound | None:
        """The bound of the importance ratio."""
        return bound_of(self.ratio_bound, f"{self.prefix}ratio_bound")

    @cached_property
    def declared_term(self) -> KLTerm:
        """The term that the settings describe."""
        names = ("divergence", "level", "estimator", "baseline", "influence_bound")
        described: Json = {name: getattr(self, name) for name in names}
        ratio: Any = self.ratio
        weighting = None if ratio == "none" else ImportanceWeighting(ratio, self.bound)
        return KLTerm(**described, discount=float(self.discount), weighting=weighting)

    @property
    def is_corrected(self) -> bool:
        """Whether the KL has importance weights, or needs none for old completions."""
        return self.ratio != "none" or needs_no_weights(self.declared_term)

    def beta(self) -> AdaptiveCoefficient:
        """β as the run starts."""
        return AdaptiveCoefficient(self.coef, self.target, self.horizon)

    def notes(self, facts: Facts) -> list[str]:
        """A sentence for each setting of the framework that changes what the KL means without being an error."""
        complaints, ratio = [], lambda value: self.named("ratio", value)
        if facts.stale is not None and not self.is_corrected:
            complaints.append(
                f"{facts.stale} trains on completions that another policy sampled, and {ratio('none')} leaves the KL "
                f"uncorrected for it; {ratio('prefix')} corrects it at sequence level, {ratio('token')} on the "
                "sampler's prefixes"
            )
        if facts.filters and (self.ratio != "none" or not self.is_corrected):
            complaints.append(
                f"{', '.join(facts.filters)}: completions are not sampled from the policy that is trained, so that the "
                f"KL is an average over other completions than its own, and {self.prefix}ratio does not correct for it"
            )
        if facts.entropy is not None:
            complaints.append(
                f"{facts.entropy}: {facts.framework} adds an entropy bonus to the loss, so that the optimum is not "
                "that of the reward and the KL alone"
            )
        if facts.mean is not None and self.reduction == "policy" and self.coef:
            complaints.append(
                f"{facts.mean} averages the KL over the tokens of each completion, so that a token of a short "
                "completion counts more, and the gradient is that of no divergence, however large the batch; "
                f"{facts.sums} keeps the declared KL"
            )
        return complaints


# Values of the KL to the reference that a trainer logs or adapts β by.


def token_values(term: KLTerm, rollout: Rollout) -> Tensor:
    """(B, T) what the term adds to the value of the loss, detached: an estimate of its divergence.

    It is exact, or the excess, which is k3 for the reverse KL, weighted by the token's ratio. Between completions a
    divergence other than the reverse KL is no sum of its tokens': the estimate of a completion is spread evenly over
    its tokens.
    """
    if term.estimator == "exact":
        return full_divergence(term, rollout).detach()
    excess = term.generator.excess
    if not is_between_completions(term):
        return token_ratio(rollout) * excess(rollout.log_ratio)
    total = sequence_ratio(rollout) * excess(rollout.log_ratio.sum(-1, keepdim=True))
    return rollout.mask * total / rollout.lengths.clamp(min=1)[:, None]


def weighted_k3(rollout: Rollout) -> Tensor:
    """(B, T) k3 of each token, weighted by its ratio to the sampler; TRL logs its mean as `kl`."""
    return token_ratio(rollout) * k3.value(rollout.log_ratio)


def total_reverse_kl(rollout: Rollout, weighting: ImportanceWeighting | None, *, exact: bool) -> Tensor:
    """KL(π‖ref) summed over the completions, unbiased unless a bound is active; without `weighting` on-policy.

    It is `exact` by `Rollout.token_reverse_kl`, instead of estimated by k3.
    """
    if weighting is not None and weighting.ratio == "token":  # on the sampler's prefixes, like the term itself
        ratio = token_ratio(rollout)
        return ((ratio if weighting.bound is None else weighting.bound(ratio)) * k3.value(rollout.log_ratio)).sum()
    term = KLTerm(estimator="exact" if exact else "k1_k3", weighting=weighting)
    return term(rollout).value.mean * len(rollout.mask)
