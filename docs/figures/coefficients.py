"""Draw what each KL loss puts on the score of a sampled token, against its log-ratio.

Every curve is measured: the loss is called on one token in float32 and differentiated. Run it with
`make figures`; it writes docs/images/coefficients.png.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from klgrad import KLTerm, Rollout, cells

OUT = Path(__file__).parent.parent / "images" / "coefficients.png"

# Okabe and Ito's palette: distinguishable without colour vision, and in print by its line styles.
# Wide light curves lie under narrow dark ones where they coincide.
BOUNDED = KLTerm(level="token", influence_bound=5.0)
CURVES: list[tuple[str, Callable[[Rollout], Tensor], str, str, float]] = [
    ("k1 as loss: descends nothing", cells.get("k1-loss"), "#000000", ":", 2),
    ("k2 as loss = k1 in reward: reverse KL", cells.get("k2-loss"), "#009E73", "-", 4.5),
    ("k3 as loss (GRPO): forward KL", cells.get("k3-loss"), "#E69F00", "-", 4.5),
    ("k3 as loss, clamped at 10: no gradient", cells.get("k3-loss-clamped"), "#D55E00", "--", 1.8),
    ("ratio x k3, as in DeepSeek-V3.2: float32 loses it", cells.get("ratio-k3-loss"), "#CC79A7", "-", 1.0),
    ("KLTerm with influence_bound=5", lambda r: BOUNDED(r).loss, "#0072B2", "-", 1.8),
]


def coefficient(loss: Callable[[Rollout], Tensor], log_ratio: Tensor) -> Tensor:
    """The gradient of the loss towards the log-prob of one token, for each log-ratio."""
    logp = (-0.5 + log_ratio.clamp(max=0))[:, None].requires_grad_()
    ref = (-0.5 - log_ratio.clamp(min=0))[:, None]
    rollout = Rollout(logp, ref, torch.ones_like(logp), behavior_logp=logp.detach())
    (gradient,) = torch.autograd.grad(loss(rollout), logp)
    return gradient[:, 0] * len(logp)


def main() -> None:
    """Draw both panels."""
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (near, far) = plt.subplots(1, 2, figsize=(11, 4.6), width_ratios=(1, 1.15), constrained_layout=True)
    for axis, low, high in ((near, -4.0, 4.0), (far, -30.0, 8.0)):
        x = torch.linspace(low, high, 1601)
        for label, loss, colour, style, width in CURVES:
            axis.plot(x, coefficient(loss, x), color=colour, linestyle=style, linewidth=width, label=label)
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
    figure.legend(*far.get_legend_handles_labels(), frameon=False, fontsize=9.5, loc="outside lower center", ncols=3)
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, dpi=130)


if __name__ == "__main__":
    main()
