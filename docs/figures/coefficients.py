"""Draw the coefficient of each KL loss on the score of a sampled token, against its log-ratio.

Every curve is measured: the loss is called on one token in float32 and differentiated. Run it with
`make figures`; it writes docs/images/coefficients.png and .svg.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from klgrad import KLTerm, Rollout, zoo as cells
from klgrad.drawing import look, style, write_figure

OUT = Path(__file__).parent.parent / "images" / "coefficients.png"

# Wide light curves lie under narrow dark ones where they coincide.
BOUNDED = KLTerm(level="token", influence_bound=5.0)
CURVES: list[tuple[str, str, Callable[[Rollout], Tensor], float]] = [
    ("k1-loss", "k1 as loss: descends nothing", cells.get("k1-loss"), 2),
    ("k1-reward", "k2 as loss = k1 in reward: reverse KL", cells.get("k2-loss"), 4.5),
    ("k3-loss", "k3 as loss (GRPO): forward KL", cells.get("k3-loss"), 4.5),
    ("k3-loss-clamped", "k3 as loss, clamped at 10: no gradient", cells.get("k3-loss-clamped"), 1.8),
    ("ratio-k3-loss", "ratio x k3, as in DeepSeek-V3.2: float32 loses it", cells.get("ratio-k3-loss"), 1.0),
    ("influence-bound", "KLTerm with influence_bound=5", lambda r: BOUNDED(r).loss, 1.8),
]


def coefficient(loss: Callable[[Rollout], Tensor], log_ratio: Tensor) -> Tensor:
    """The gradient of the loss by the log-prob of one token, for each log-ratio."""
    logp = (-0.5 + log_ratio.clamp(max=0))[:, None].requires_grad_()
    ref = (-0.5 - log_ratio.clamp(min=0))[:, None]
    rollout = Rollout(logp, ref, torch.ones_like(logp), behavior_logp=logp.detach())
    (gradient,) = torch.autograd.grad(loss(rollout), logp)
    return gradient[:, 0] * len(logp)


def main() -> None:
    """Draw both panels."""
    plt.rcParams.update(look(11))
    figure, (near, far) = plt.subplots(1, 2, figsize=(11, 4.6), width_ratios=(1, 1.15), constrained_layout=True)
    for axis, low, high in ((near, -4.0, 4.0), (far, -30.0, 8.0)):
        x = torch.linspace(low, high, 1601)
        for name, label, loss, width in CURVES:
            axis.plot(x, coefficient(loss, x), **style(name) | {"label": label, "linewidth": width})
        axis.axhline(0, color="#999999", linewidth=0.8, zorder=0)
        axis.axvline(0, color="#999999", linewidth=0.8, zorder=0)
        axis.set_xlim(low, high)
        axis.set_xlabel("log π/ref of the sampled token")
    near.set_ylim(-9, 5)
    near.axvspan(-4.0, -2.61, color="#D55E00", alpha=0.10, lw=0)
    near.text(-3.3, 2.4, "k3's clamp:\nno gradient", ha="center", fontsize=9, color="#8a3c00")
    near.set_ylabel("coefficient on the score")
    near.set_title("near the reference", loc="left", fontsize=11)
    far.set_ylim(-33, 10)
    far.set_title("where π has left tokens that ref likes", loc="left", fontsize=11)
    figure.legend(*far.get_legend_handles_labels(), fontsize=9.5, loc="outside lower center", ncols=3)
    write_figure(figure, OUT)


if __name__ == "__main__":
    main()
