"""The forms that KLs have in frameworks, written again from their source: a form with its options is a loss to audit.

Frameworks whose code is not installed are audited by them, and so are the KLs of a run whose settings the audit of a
framework does not list. Casts to float32 and the 1e-8 in denominators are left out, and so are critics: their values
are 0. A test compares each with its coefficient on ∇log π, found by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from .harness import subject
from .run_settings import KLPart, as_type

if TYPE_CHECKING:
    from .harness import Batch, Subject, Tensor

    PerToken = Callable[[Batch], Tensor]

OVER_TOKENS, OVER_COMPLETIONS, SUM = "a mean over tokens", "a mean per completion", "a sum per completion"


def kl_subject(framework: str, settings: str, per_token: PerToken, reduction: str) -> Subject:
    """The terms (B, T) of a KL, reduced, as a loss to audit."""
    from ..core.result import reduce

    def loss(batch: Batch) -> Tensor:
        terms = per_token(batch)
        if reduction == OVER_COMPLETIONS:
            terms = terms / batch.mask.sum(-1, keepdim=True)
        return reduce(terms, batch.rollout(), "token" if reduction == OVER_TOKENS else "sequence")

    return subject(f"{framework} {settings}", loss)


def estimate(kind: str, x: Tensor) -> Tensor:
    """An estimate of the KL from x = log ref/π, differentiated as it stands."""
    return {"k1": lambda: -x, "k2": lambda: x.square() / 2, "k3": lambda: x.exp() - x - 1}[kind]()


def ratio_of(batch: Batch) -> Tensor:
    """π/π_old of each token, with its gradient."""
    return (batch.logp - batch.old_logp).exp()


def clipped(batch: Batch, cost: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """PPO's terms (B, T) for a cost, which is minus an advantage; `dual` bounds the ratio where it is positive."""
    ratio = ratio_of(batch)
    terms = (cost * ratio).maximum(cost * ratio.clamp(1 - low, 1 + high))
    return terms if dual is None else terms.minimum(cost * dual).where(cost > 0, terms)


@dataclass(frozen=True)
class AsLoss:
    """An estimate that is differentiated as it stands.

    Attributes:
        kind: k1, k2 or k3.
        log_clamp: the bound on log ref/π, None without.
        clamp: the bound on the value, None without.
        ratio: whether π/π_old, with its gradient, multiplies it before the clamp.
    """

    kind: str
    log_clamp: float | None = None
    clamp: float | None = None
    ratio: bool = False

    def __call__(self, batch: Batch) -> Tensor:
        """(B, T) terms."""
        x = batch.ref_logp - batch.logp
        x = x if self.log_clamp is None else x.clamp(-self.log_clamp, self.log_clamp)
        kl = estimate(self.kind, x)
        kl = kl * ratio_of(batch) if self.ratio else kl
        return kl if self.clamp is None else kl.clamp(-self.clamp, self.clamp)


@dataclass(frozen=True)
class InReward:
    """An estimate at sampling that lowers the advantage of a token, without a critic.

    Attributes:
        kind: k1, k2 or k3.
        discount: of the later tokens of the completion, 0 for the token's own estimate alone.
        clamp: the bound on the value, None without.
        log_clamp: the bound on log ref/π, None without.
        whitened: whether the batch's advantages are centred and divided by their standard deviation.
        clip: how far the ratio may be from 1 below and above, None without a bound.
    """

    kind: str
    discount: float = 1.0
    clamp: float | None = None
    log_clamp: float | None = None
    whitened: bool = False
    clip: tuple[float, float] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """(B, T) terms."""
        from ..core.credit import to_go

        x = batch.ref_logp - batch.old_logp
        kl = estimate(self.kind, x if self.log_clamp is None else x.clamp(-self.log_clamp, self.log_clamp))
        kl = (kl if self.clamp is None else kl.clamp(-self.clamp, self.clamp)).where(batch.mask, 0)
        cost = to_go(kl, batch.mask, self.discount) if self.discount else kl
        if self.whitened:
            live = cost[batch.mask]
            cost = (cost - live.mean()) / live.std().clamp(min=1e-8)
        cost = cost.where(batch.mask, 0)
        return cost * ratio_of(batch) if self.clip is None else clipped(batch, cost, *self.clip)


@dataclass(frozen=True)
class InScore:
    """k1 at sampling, summed over the completion, that lowers the advantage of each of its tokens."""

    def __call__(self, batch: Batch) -> Tensor:
        """(B, T) terms."""
        away = (batch.old_logp - batch.ref_logp).where(batch.mask, 0).sum(-1, keepdim=True)
        return away * ratio_of(batch)


def number_or_none(given: dict[str, Any], name: str, default: float | None) -> float | None:
    """A setting that may be null."""
    value = given.get(name, default)
    return None if value in (None, "null", "None") else as_type(name, value, 1.0)


def part_of(
    framework: str,
    settings: str,
    form: PerToken,
    reduction: str,
    beta: float,
    caveat: str = "",
    place: Literal["loss", "reward", "advantage"] = "loss",
) -> KLPart:
    """One KL of a run, by its form.

    Args:
        framework: its name.
        settings: what names the loss.
        form: what it is.
        reduction: one of `OVER_TOKENS`, `OVER_COMPLETIONS` and `SUM`.
        beta: the coefficient.
        caveat: what the formula leaves out.
        place: where it is added; forms in the reward know it.
    """
    where = "reward" if place == "loss" and isinstance(form, InReward | InScore) else place
    build = partial(kl_subject, framework, settings, form, reduction)
    return KLPart(where, f"{framework} {settings}", beta, build, caveat)
