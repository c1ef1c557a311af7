"""Draw what the token level leaves out: a policy that can only choose its first token.

Everything is exact: there are four completions. Run it with `make figures`; it writes
docs/images/token-and-sequence.png and .svg. `numbers` is the generated part of the page.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from klgrad.drawing import BLUE, GREY, ORANGE, look, write_figure
from klgrad.enumeration import CompletionSpace, Problem, target_gradients
from klgrad.targets import TargetName

OUT = Path(__file__).parent.parent / "images" / "token-and-sequence.png"
LEVELS: dict[TargetName, tuple[str, str]] = {
    "reverse-kl-token": ("token level", ORANGE),
    "reverse-kl-sequence": ("sequence level", BLUE),
}
STEPS, RATE = 60, 0.5
FIRST, AFTER_A, AFTER_B = 0, 1, 2
"""The prefixes: none, the token a, the token b."""


def problem() -> Problem:
    """At the first token π is ref. After a it is ref too; after b it is far from it."""
    logits = torch.zeros(3, 2, dtype=torch.float64)
    ref_logits = logits.clone()
    ref_logits[AFTER_B] = torch.tensor([4.0, 0.0], dtype=torch.float64)
    return Problem(CompletionSpace(2, 2, ends=False), logits, ref_logits, logits)


def descend(target: TargetName) -> list[tuple[float, float]]:
    """The probability of b and the KL between completions, while the first token's logits follow the gradient."""
    now, path = problem(), []
    for _ in range(STEPS + 1):
        visits = now.prefix_probability(now.logits)
        path.append((float(visits[AFTER_B]), float((visits * now.prefix_kl()).sum())))
        step = torch.zeros_like(now.logits)
        step[FIRST] = target_gradients(now.on_policy())[target].reshape(step.shape)[FIRST]
        now = now.with_logits(now.logits - RATE * step)
    return path


def numbers() -> str:
    """What both levels end at, for the page."""
    token, sequence = (descend(target)[-1] for target in LEVELS)
    kl = float(problem().prefix_kl()[AFTER_B])
    return (
        f"After b the KL of the next token is {kl:.2f} nats. After {STEPS} steps at the rate {RATE}, the token level "
        f"still writes b with probability {token[0]:.2f}, and the KL between completions is {token[1]:.2f}. The "
        f"sequence level writes b with probability {sequence[0]:.2f}, and the KL is {sequence[1]:.2f}.\n"
    )


def main() -> None:
    """Draw both panels."""
    plt.rcParams.update(look(11))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    prefixes = ["first token", "after a", "after b"]
    bars = left.bar(prefixes, problem().prefix_kl().tolist(), color=GREY, width=0.6)
    left.bar_label(bars, fmt="{:.2f}", padding=2)
    left.margins(y=0.12)
    left.set_ylabel("KL(π‖ref) of the next token, nats")
    left.set_title("only after b is π far from ref", loc="left", fontsize=11)
    for target, (label, colour) in LEVELS.items():
        right.plot([chance for chance, _ in descend(target)], color=colour, label=label, linewidth=2.5)
    right.set_ylim(0, 0.6)
    right.set_xlabel("step")
    right.set_ylabel("probability of writing b")
    right.set_title("the sequence level avoids b", loc="left", fontsize=11)
    right.legend()
    write_figure(figure, OUT)


if __name__ == "__main__":
    main()
