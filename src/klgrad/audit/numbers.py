"""Numbers as text: a difference is never rounded away."""

import math
from collections.abc import Callable


def percent(share: float) -> str:
    """A share in percent, with more digits if it is small, so that only 0 reads 0%."""
    if not math.isfinite(share):
        return "–"
    if share >= 0.01 or share <= 0:
        return f"{share:.0%}"
    return f"{share:.1%}" if share >= 0.0005 else f"{100 * share:.1g}%"


def outside(below: float | None, above: float | None, number: Callable[[float], str] = "{:.3g}".format) -> str:
    """A range that is open on one or both sides; `number` writes its ends. Empty if there is none.

    Example:
        >>> outside(-2.61, 11.0)
        'below -2.61 and above 11'
    """
    ends = (("below", below), ("above", above))
    return " and ".join(f"{word} {number(end)}" for word, end in ends if end is not None)


def at_and_beyond(log_ratio: float, number: Callable[[float], str] = "{:g}".format) -> str:
    """Where log π/ref has this value, or one farther from 0; `number` writes the value.

    Example:
        >>> at_and_beyond(-16)
        'where log π/ref is -16 or less'
    """
    return f"where log π/ref is {number(log_ratio)} or {'less' if log_ratio < 0 else 'more'}"


def apart(low: float, high: float, digits: int = 3) -> tuple[str, str]:
    """Two different numbers, with enough digits to tell them apart."""
    while f"{low:.{digits}g}" == f"{high:.{digits}g}" and digits < 17:
        digits += 1
    return f"{low:.{digits}g}", f"{high:.{digits}g}"


def listed(words: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
