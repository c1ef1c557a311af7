"""The influence bound: how much one sample's log-ratio may contribute to a coefficient."""

from torch import Tensor

from ..errors import MeaningError


def check_influence_bound(bound: float | None) -> None:
    """Raise `MeaningError` unless the bound is None or a positive, finite number."""
    if bound is not None and not 0 < bound < float("inf"):
        raise MeaningError(
            "a positive, finite influence bound, or None", f"{bound}", "write influence_bound=5.0, for example"
        )


def clip_influence(x: Tensor, bound: float | None) -> Tensor:
    """Clip `x` to [-bound, bound], the slope of a Huber loss; None leaves it as it is."""
    return x if bound is None else x.clamp(-bound, bound)
