"""What the figures of several results draw."""

from collections.abc import Sequence
from typing import Any


def band(axis: Any, at: Sequence[float], path: dict[str, list[float]], colour: str, alpha: float = 0.13) -> None:
    """A band of one standard error around a mean.

    Args:
        axis: where to draw it.
        at: the places of the means.
        path: lists under "mean" and "error".
        colour: of the band.
        alpha: its opacity.
    """
    pairs = list(zip(path["mean"], path["error"], strict=True))
    low, high = ([mean + sign * error for mean, error in pairs] for sign in (-1, 1))
    axis.fill_between(at, low, high, color=colour, alpha=alpha, lw=0)
