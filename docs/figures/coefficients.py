"""Draw the coefficient of each KL loss on the score of a sampled token, against its log-ratio.

Every curve is measured: the loss is called on one token in float32 and differentiated. Run it with
`make figures`; it writes docs/images/coefficients.png and .svg.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from klgrad import Rollout, zoo as cells
from klgrad.drawing import look, style, write_figure

OUT = Path(__file__).parent.parent / "images" / "coefficients.png"

# Wide light curves lie under narrow dark ones where they coincide.
CURVES = {"k1-loss": 2.5, "k1-reward": 4.5, "k3-loss": 4.5, "k3-loss-clamped": 2.0}
LABELS = [
    (1.9, 2.35, "k1-reward", "reverse KL: k2 as a loss,\nk1 in the reward", "right"),
    (-1.5, -5.2, "k3-loss", "forward KL:\nk3 as a loss (GRPO)", "left"),
    (-4.9, -1.4, "k3-loss-clamped", "k3 clamped at 10 (verl):\nno push far below ref", "left"),
    (-4.9, 1.15, "k1-loss", "nothing: k1 as a loss pushes every token alike", "left"),
]


def coefficient(loss: Callable[[Rollout], Tensor], log_ratio: Tensor) -> Tensor:
    """The gradient of the loss by the log-prob of one token, for each log-ratio."""
    logp = (-0.5 + log_ratio.clamp(max=0))[:, None].requires_grad_()
    ref = (-0.5 - log_ratio.clamp(min=0))[:, None]
    rollout = Rollout(logp, ref, torch.ones_like(logp), behavior_logp=logp.detach())
    (gradient,) = torch.autograd.grad(loss(rollout), logp)
    return gradient[:, 0] * len(logp)


def main() -> None:
    """Draw the curves, each with its name beside it."""
    plt.rcParams.update(look(13))
    figure, axis = plt.subplots(figsize=(10, 4.6), constrained_layout=True)
    x = torch.linspace(-5, 3, 1601)
    for name, width in CURVES.items():
        loss = cells.get("k2-loss" if name == "k1-reward" else name)  # the same coefficient; this one is differentiated
        looks: dict[str, Any] = style(name) | {"linewidth": width}
        axis.plot(x, coefficient(loss, x), **looks)
    for left, bottom, name, text, side in LABELS:
        axis.text(left, bottom, text, ha=side, va="bottom", color=style(name)["color"], fontsize=13)
    axis.axhline(0, color="#999999", linewidth=0.8, zorder=0)
    axis.axvline(0, color="#999999", linewidth=0.8, zorder=0)
    axis.set_xlim(-5, 3)
    axis.set_ylim(-6, 4)
    axis.set_xlabel("π likes the sampled token less than ref   ←   log π/ref   →   more than ref")
    axis.set_ylabel("push:  up   ←   0   →   down")
    axis.set_title("What each KL loss does to a sampled token", loc="left", fontsize=14)
    write_figure(figure, OUT)


if __name__ == "__main__":
    main()
