"""One KL of a run, by the form that it has: see `transcribed`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ..run_settings import KLPart, as_type
from ..transcribed import OVER_COMPLETIONS, OVER_TOKENS, SUM, AsLoss as AsLoss, InReward, InScore, kl_subject

if TYPE_CHECKING:
    from ...audit import Subject
    from ..transcribed import PerToken

REDUCTIONS = (OVER_TOKENS, OVER_COMPLETIONS, SUM)


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
    form: PerToken,
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


def _subject(framework: str, settings: str, form: PerToken, reduction: str, whitened: bool) -> Subject:
    return kl_subject(framework, settings, form, reduction, stacks=False if whitened else None)
