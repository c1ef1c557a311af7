"""Draw the weight of a token's score against the ratio, for published policy losses.

Every curve is read from the derivatives of the loss by `audit_whole`. Run it with `make figures`; it writes
docs/images/weights.png and .svg.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from klgrad.audit.policy import audit_whole
from klgrad.drawing import BLUE, VERMILION, look, write_figure
from klgrad.policy_losses import get

OUT = Path(__file__).parent.parent / "images" / "weights.png"

SHOWN = {
    "reinforce": "reinforce: no ratio",
    "token-is": "token-is: no bound",
    "ppo-clip": "ppo-clip: clipped on one side",
    "gspo": "gspo: geometric mean, clipped",
    "token-tis": "token-tis: truncated",
    "token-mis": "token-mis: masked above",
    "icepop": "icepop: masked on both sides",
    "product-mask": "product-mask: only a mask",
}
"""Title of each panel, by name of the loss."""

NEAR = 0.0012
"""The largest |log r| that is drawn of a geometric mean with narrow bounds; others are drawn from 1/6 to 6."""


def main() -> None:
    """Draw one panel for each loss."""
    torch.set_num_threads(1)
    plt.rcParams.update(look(10))
    figure, axes = plt.subplots(2, 4, figsize=(12, 5.4), constrained_layout=True)
    for axis, (name, title) in zip(axes.flat, SHOWN.items(), strict=True):
        reach = NEAR if name == "gspo" else 1.8
        log_ratio, weights = audit_whole(get(name)).policy.curve(2401, reach)
        ratio = log_ratio.exp()
        axis.plot(ratio, ratio, color="#aaaaaa", linewidth=0.8)
        axis.plot(ratio, weights[0], color=BLUE, linewidth=2.6, label="A > 0")
        axis.plot(ratio, weights[1], color=VERMILION, linewidth=1.6, linestyle="--", label="A < 0")
        axis.set_title(title, loc="left", fontsize=10)
        axis.axvline(1, color="#cccccc", linewidth=0.8, zorder=0)
        if name == "gspo":
            axis.set_xticks([0.999, 1, 1.001], ["0.999", "1", "1.001"])
            axis.set_ylim(-0.15, 1.35)
        else:
            axis.set_xlim(0, 6)
            axis.set_ylim(-0.3, 5.6)
    for axis in axes[-1]:
        axis.set_xlabel("r = π/μ")
    for axis in axes[:, 0]:
        axis.set_ylabel("weight of the score")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    write_figure(figure, OUT)


if __name__ == "__main__":
    main()
