"""β: constant, or adapted so that the KL stays near a target."""

import math
from dataclasses import dataclass
from typing import Any

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
        """Adapt β after one optimizer step.

        Args:
            kl: an unbiased estimate of the KL in the unit of the target; None if the step had no live token.
        """
        if self.target is None or kl is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.value *= math.exp(error / self.horizon)

    def state_dict(self) -> dict[str, Any]:
        """The present β."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with an adapted β. A constant β is a setting, which a resumed run may change."""
        if self.target is not None:
            self.value = state["value"]
