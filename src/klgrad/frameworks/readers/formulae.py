"""The forms that KLs have in frameworks: an estimate as a loss, or in the reward of a token, with clamps and ratios.

A form with its options is a loss to audit. Casts to float32 and the small numbers in denominators are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..run_settings import KLPart, as_type
from ..transcribed import OVER_COMPLETIONS, OVER_TOKENS, SUM, estimate, kl_subject

if TYPE_CHECKING:
    from torch import Tensor

    from ...audit import Subject
    from ...audit.batch import Batch

Form = Callable[["Batch"], "Tensor"]
REDUCTIONS = (OVER_TOKENS, OVER_COMPLETIONS, SUM)


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
        kl = kl * (batch.logp - batch.old_logp).exp() if self.ratio else kl
        return kl if self.clamp is None else kl.clamp(-self.clamp, self.clamp)


@dataclass(frozen=True)
class InReward:
    """An estimate at sampling that lowers the advantage of a token, without a critic.

    Attributes:
        kind: k1, k2 or k3.
        discount: of the later tokens of the completion, 0 for the token's own estimate alone.
        clamp: the bound on the value, None without.
        whitened: whether the batch's advantages are centred and divided by their standard deviation.
    """

    kind: str
    discount: float = 1.0
    clamp: float | None = None
    whitened: bool = False

    def __call__(self, batch: Batch) -> Tensor:
        """(B, T) terms."""
        from ...core.credit import to_go

        kl = estimate(self.kind, batch.ref_logp - batch.old_logp)
        kl = (kl if self.clamp is None else kl.clamp(-self.clamp, self.clamp)).where(batch.mask, 0)
        cost = to_go(kl, batch.mask, self.discount) if self.discount else kl
        if self.whitened:
            live = cost[batch.mask]
            cost = (cost - live.mean()) / (live.std() + 1e-8)
        return cost.where(batch.mask, 0) * (batch.logp - batch.old_logp).exp()


@dataclass(frozen=True)
class InScore:
    """k1 at sampling, summed over the completion, that lowers the advantage of each of its tokens."""

    def __call__(self, batch: Batch) -> Tensor:
        """(B, T) terms."""
        away = (batch.old_logp - batch.ref_logp).where(batch.mask, 0).sum(-1, keepdim=True)
        return away * (batch.logp - batch.old_logp).exp()


def listed(framework: str, name: str) -> Subject:
    """A loss of the list of a transcribed framework."""
    from ..transcribed import subjects

    return next(subject for subject in subjects(framework) if subject.name == name)


def number_or_none(given: dict[str, Any], name: str, default: float | None) -> float | None:
    """A setting that may be null."""
    value = given.get(name, default)
    return None if value in (None, "null", "None") else as_type(name, value, 1.0)


def part_of(
    framework: str,
    settings: str,
    form: Form,
    reduction: str,
    beta: float,
    caveat: str = "",
    place: str = "",
) -> KLPart:
    """One KL of a run.

    Args:
        framework: its name.
        settings: what names the loss.
        form: what it is.
        reduction: one of `REDUCTIONS`.
        beta: the coefficient.
        caveat: what the formula leaves out.
        place: where it is added, if that is not plain from the form.
    """
    whitened = isinstance(form, InReward) and form.whitened
    where = place or ("reward" if isinstance(form, InReward | InScore) else "loss")
    build = partial(_subject, framework, settings, form, reduction, whitened)
    return KLPart(where, f"{framework} {settings}", beta, build, caveat)  # pyright: ignore[reportArgumentType]


def _subject(framework: str, settings: str, form: Form, reduction: str, whitened: bool) -> Subject:
    return kl_subject(framework, settings, form, reduction, stacks=False if whitened else None)
