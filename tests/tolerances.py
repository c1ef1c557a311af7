"""Every tolerance of the tests, by name and with its reason."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tol:
    rtol: float
    atol: float
    why: str

    def __post_init__(self) -> None:
        if not 0 <= self.rtol < 0.5:
            raise ValueError(f"rtol={self.rtol:g} accepts almost anything; did you mean 1e-6?")

    def check(self, actual: Tensor | float, expected: Tensor | float) -> None:
        """As `torch.testing.assert_close`, with the reason in the message."""
        a, b = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (actual, expected))
        torch.testing.assert_close(a, b, rtol=self.rtol, atol=self.atol, msg=lambda m: f"{m}\n{self.why}")

    def check_vector(self, actual: Tensor, expected: Tensor) -> None:
        """Distance of two vectors relative to the expected one's length, as gradients are judged."""
        off = float((actual - expected).norm())
        limit = self.rtol * float(expected.norm()) + self.atol
        assert off <= limit, f"off by {off:.3g}, allowed {limit:.3g}: {self.why}"


EXACT = Tol(1e-9, 1e-13, "sums over all outcomes in float64 lose a few digits of sixteen, no more")
DIFFERENCE = Tol(1e-6, 1e-9, "central differences with step 1e-5 are good to about 1e-10 of the function")
SINGLE = Tol(1e-5, 1e-6, "float32 arithmetic over a few dozen terms")
