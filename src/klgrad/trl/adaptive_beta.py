"""β: constant, or adapted so that the KL stays near a target."""

import math
from dataclasses import dataclass

LARGEST_ERROR = 0.2
"""The relative error that counts is held to ±20%, as Ziegler et al. (2019) do, so that one batch moves β little."""


@dataclass
class AdaptiveCoefficient:
    """β grows while the KL is above its target and shrinks while it is below.

    Attributes:
        value: β now.
        target: the KL to hold, or None for a constant β.
        horizon: updates over which β moves by a factor of e while the relative error is 1.
    """

    value: float
    target: float | None
    horizon: int

    def update(self, kl: float | None) -> None:
        """One optimizer step's unbiased estimate, in the unit of the target; None where nothing was live."""
        if self.target is None or kl is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= math.exp(error / self.horizon)
