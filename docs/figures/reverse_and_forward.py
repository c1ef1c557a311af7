"""Draw the two directions of the KL: the nearest policy of a narrow family, and the optimum under a reward.

Run it with `make figures`; it writes docs/images/reverse-and-forward.png and .svg. `numbers` is the
generated part of the page.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from klgrad import forward_optimum, reverse_optimum
from klgrad.drawing import BLUE, GREY, ORANGE, look, write_figure

OUT = Path(__file__).parent.parent / "images" / "reverse-and-forward.png"
TOKENS = torch.arange(40, dtype=torch.float64)
BETA = 0.3
REF = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REWARD = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)


def two_peaks() -> Tensor:
    """Log-probs of a reference with two peaks: tokens 10 and 28."""
    bump = lambda at, width: torch.exp(-(((TOKENS - at) / width) ** 2) / 2)
    mass = 0.6 * bump(10, 2.5) + 0.4 * bump(28, 3.5) + 1e-6
    return (mass / mass.sum()).log()


def nearest(reverse: bool) -> Tensor:
    """Log-probs of the nearest policy with one peak, of any place and width, on a fine grid of both."""
    places, widths = torch.arange(2, 38, 0.1, dtype=torch.float64), torch.arange(1, 15, 0.1, dtype=torch.float64)
    place, width = (x.reshape(-1, 1) for x in torch.meshgrid(places, widths, indexing="ij"))
    logp = torch.log_softmax(-(((TOKENS - place) / width) ** 2) / 2, -1)
    ref = two_peaks()
    kl = (logp.exp() * (logp - ref)).sum(-1) if reverse else (ref.exp() * (ref - logp)).sum(-1)
    return logp[kl.argmin()]


def optima() -> dict[str, Tensor]:
    """The probabilities that maximise reward minus β KL, for both directions."""
    ref = REF.log()
    return {
        "reverse": reverse_optimum(ref, REWARD, BETA).exp(),
        "forward": forward_optimum(ref, REWARD, BETA).exp(),
    }


def numbers() -> str:
    """The probabilities of the rewarded answer, for the page."""
    found = {name: float(p[-1]) for name, p in optima().items()}
    return (
        f"Right panel: one of four answers has reward 1, and ref writes it with probability {REF[-1]:.2f}. With "
        f"β = {BETA} the optimum of the reverse KL writes it with probability {found['reverse']:.2f}, and that of the "
        f"forward KL with probability {found['forward']:.2f}.\n"
    )


def main() -> None:
    """Draw both panels."""
    plt.rcParams.update(look(11))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), width_ratios=(1.1, 1), constrained_layout=True)
    left.fill_between(TOKENS, two_peaks().exp(), color=GREY, alpha=0.35, label="ref")
    left.plot(TOKENS, nearest(reverse=True).exp(), color=BLUE, linewidth=2.5, label="least reverse KL(π‖ref)")
    left.plot(TOKENS, nearest(reverse=False).exp(), color=ORANGE, linewidth=2.5, label="least forward KL(ref‖π)")
    left.set_xlabel("token")
    left.set_ylabel("probability")
    left.set_title("the nearest π that has one peak", loc="left", fontsize=11)
    left.legend(fontsize=9.5)
    bars = {"ref": (REF, GREY), "reverse": (optima()["reverse"], BLUE), "forward": (optima()["forward"], ORANGE)}
    for i, (label, (p, colour)) in enumerate(bars.items()):
        placed = right.bar(torch.arange(4) + 0.27 * (i - 1), p, width=0.25, color=colour, label=label)
        right.bar_label(placed, fmt="{:.2f}", padding=1, fontsize=7)
    right.set_xticks(range(4), ["A", "B", "C", "D, reward 1"])
    right.set_title(f"the optimum under a reward, β = {BETA}", loc="left", fontsize=11)
    right.legend(fontsize=9.5)
    write_figure(figure, OUT)


if __name__ == "__main__":
    main()
