"""Convert β between two losses: the β of the second that pulls as hard near ref as the first.

Near ref every loss of a token's log-ratio l = log π/ref pulls with β c'(0) l, times what its unit gives a token. Both
factors are read from the anatomy of the loss, so the conversion is exact there; beyond, two divergences differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import MeaningError
from .record import LOG_RATIOS as LOG_RATIOS, Pull as Pull

if TYPE_CHECKING:
    from ..audit import AuditResult
    from ..audit.parts import Anatomy

WORDS = ("divergence", "looks ahead", "samples", "unit")
"""The names of `Pull.cells`."""


def pull_of(result: AuditResult) -> Pull:
    """Read it from an audit."""
    import torch

    from ..audit.sentences import cells

    a = result.anatomy
    refusal, scale = _refusal(a), 0.0 if _refusal(a) else a.scale
    values: list[float | None] = [None] * len(LOG_RATIOS)
    if not refusal:
        at = torch.tensor(LOG_RATIOS, dtype=torch.float64)
        total = a.own(at) if a.full is None else a.own(at) + a.full(at)
        values = [float(f"{x:.9g}") if math.isfinite(x) else None for x in total.tolist()]
    words = tuple(cells(a)[: len(WORDS)])
    return Pull(scale, a.unit.name, a.unit.rows, a.baseline.name, tuple(values), words, refusal)


def _refusal(a: Anatomy) -> str:
    if a.baseline.spread != "none":
        divisor = "a number" if a.baseline.signed else "the standard deviation"
        return f"it divides by {divisor} of the {a.baseline.spread}: no fixed β has its pull"
    if not a.proved_fresh:
        return "its formula could not be read on fresh samples; `klgrad audit` shows what is left unexplained"
    if a.is_nothing:
        return "ref has no effect: it pulls with no β"
    if a.anchor != "ref":
        return "it compares the policy with the sampler and not with ref"
    if a.temperature != 1:
        return f"it compares the policies at temperature {a.temperature:g}"
    if not math.isfinite(a.scale):
        return "its pull jumps at ref, as that of total variation does: it has no strength near ref"
    if a.scale == 0:
        return "it has no pull near ref"
    return f"its unit is {a.unit.name}, which has no known size" if a.unit.name == "other" else ""


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a training batch that a conversion may need; None where they were not given.

    Attributes:
        length: the mean length of the completions, in tokens.
        completions: the completions of one batch, over which the loss is averaged or summed.
        group: the completions of each prompt.
        width: the fixed length that a loss with the unit `fixed-length` divides by.
    """

    length: float | None = None
    completions: float | None = None
    group: float | None = None
    width: float | None = None


def _powers(pull: Pull) -> dict[str, int]:
    """The total weight that the tokens of a batch have, as powers of its sizes."""
    by_length = {"sum": {"length": 1}, "fixed-length": {"length": 1, "width": -1}}.get(pull.unit, {})
    has_rows = pull.unit != "token-mean" and not pull.mean_over_rows
    return by_length | ({"completions": 1} if has_rows else {})


def _own_mean(pull: Pull) -> str:
    """The size N of which a baseline takes the share 1/N of a completion's own credit off; empty for others."""
    return {"group-mean": "group", "batch-mean": "completions"}.get(pull.baseline, "")


def factor_of(first: Pull, second: Pull, batch: BatchSizes) -> float:
    """What β of the first is multiplied by to be that of the second.

    Args:
        first: the loss whose β is known.
        second: the other one.
        batch: the sizes of the batch; those that cancel are not needed.

    Returns:
        The ratio of their pulls near ref, with all tokens of the batch together.

    Raises:
        MeaningError: a loss has no fixed pull near ref, the two have opposite signs, or a size is missing.
    """
    for which, pull in (("first", first), ("second", second)):
        if pull.refusal:
            raise MeaningError("two losses with a pull near ref", f"the {which}, but {pull.refusal}", ANOTHER)
    if first.scale * second.scale < 0:
        raise MeaningError("two losses that both descend", "one that descends near ref and one that climbs", ANOTHER)
    powers = _powers(first)
    for name, power in _powers(second).items():
        powers[name] = powers.get(name, 0) - power
    means = (_own_mean(first), _own_mean(second))
    needed = [name for name, power in powers.items() if power]
    needed += [name for name in means if name and means[0] != means[1]]
    missing = [f"--{name}" for name in dict.fromkeys(needed) if getattr(batch, name) is None]
    if missing:
        raise MeaningError(
            "the sizes in which the two units differ", f"none for {' and '.join(missing)}", "give them as options"
        )
    factor = first.scale / second.scale
    for name, power in powers.items():
        factor *= getattr(batch, name) ** power if power else 1.0
    if means[0] != means[1]:
        left = [1 - 1 / getattr(batch, name) if name else 1.0 for name in means]
        if not all(left):
            raise MeaningError(
                "more than one completion where their mean is subtracted", "one", "a KL less its own mean is 0"
            )
        factor *= left[0] / left[1]
    return factor


ANOTHER = "convert between other losses; `klgrad audit` shows what this one does"


def differences_of(first: Pull, second: Pull) -> list[str]:
    """The parts in which the two differ beyond the pull near ref, by name."""
    return [
        *(name for name, one, other in zip(WORDS, first.cells, second.cells, strict=True) if one != other),
        *(["baseline"] if first.baseline != second.baseline else []),
    ]


def pulls_of(pull: Pull) -> list[float | None]:
    """Its pulls at `LOG_RATIOS` in units of that near ref: l itself for the reverse KL."""
    return [None if x is None else x / pull.scale for x in pull.coefficients]
