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
OPTIMUM = Tol(1e-8, 1e-9, "two nested bisections in float64, and a slope that may be steep")
DRAWN = Tol(1e-2, 2e-3, "curves read at points and integrated by the trapezoid rule; a pixel is more")
QUANTILE = Tol(1e-9, 1e-12, "1 - level loses digits for levels near 1; Simpson's rule over 20,000 steps loses none")
DIFFERENCE = Tol(1e-6, 1e-9, "central differences with step 1e-5 are good to about 1e-10 of the function")
NEAR_REF = Tol(1e-6, 0.0, "log-ratios of 1e-7: two divergences differ by as much, and float64 leaves 1e-9 of them")
SINGLE = Tol(1e-5, 1e-6, "float32 arithmetic over a few dozen terms")
FLOAT32_REWARD = Tol(1e-6, 1e-9, "TRL holds rewards in float32, whatever computes them")
SAME_STEPS = Tol(
    1e-4, 5e-6, "float32 training steps, in which sums are taken in another order; Adam divides by small gradients"
)
GPU_STEP = Tol(1e-4, 1e-7, "float32 on a GPU and on a CPU: a dozen products, each summed in another order")
GPU_SUMS = Tol(1e-4, 1e-6, "float32 logits from products over a thousand numbers, an exp of them, and sums of 49152")
BFLOAT16 = Tol(5e-3, 1e-6, "a gradient rounded to bfloat16 twice, towards the logits and after the product: 2^-9 each")
FLOAT16 = Tol(1e-3, 1e-6, "a gradient rounded to float16 twice: 2^-12 each")
TENSOR_CORES = Tol(
    5e-5, 1e-6, "products of 16-bit numbers that a tensor core adds up in float32, and sums over 128 entries"
)
KEPT = Tol(1e-2, 0.0, "logits kept in 16 bits, and a gradient rounded to bfloat16 twice: in all below one percent")
NEAR_KL = Tol(1e-2, 0.0, "a KL of 1e-8 between float32 logits of size 1, each rounded at 1e-7: a percent at worst")
FAR = Tol(1e-3, 0.0, "a KL of about 10 as the difference of two float32 numbers as large as the vocabulary")
DRAWN_AGAIN = Tol(0.05, 0.0, "a standard error from 2,000 repetitions is known to 1.6%")
