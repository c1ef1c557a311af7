"""Bounds of importance ratios as the text of a setting."""

from dataclasses import fields

from ..core.importance import Bound, Clip, Mask, Truncate
from ..errors import MeaningError


def bound_of(text: str, setting: str = "kl_ratio_bound") -> Bound | None:
    """Parse `truncate:2`, `clip:0.5:2`, `mask:0.5:2` or `none`.

    Args:
        text: the bound.
        setting: the name of the setting, for the error.
    """
    kind, *numbers = text.split(":")
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


def written(bound: Bound | None) -> str:
    """The text that `bound_of` reads as this bound."""
    if bound is None:
        return "none"
    return ":".join([type(bound).__name__.lower(), *(repr(getattr(bound, f.name)) for f in fields(bound))])
