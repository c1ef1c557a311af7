"""Draw the drift of each policy loss, and the direction of its update, as the sampler gets staler.

Everything is exact: sums over all completions, in the limit of large batches. Run it with `make figures`; it writes
docs/images/drift.png and .svg.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from klgrad.audit.subject import as_subject
from klgrad.audit.whole import Updates, WholeCase, gradient, policy_gradients, whole_cases
from klgrad.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, look, write_figure
from klgrad.policy_losses import get

OUT = Path(__file__).parent.parent / "images" / "drift.png"

DISTANCES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.1, 1.5, 2.0)
"""Standard deviation of the logits of π from those of the sampler."""

POLICIES = 8
"""Random policies at each distance, on each problem."""

Style = dict[str, Any]
# There are more losses than colours: no two losses of the figure have the same colour and the same line.
DRIFTS: dict[str, Style] = {
    "reinforce": {"color": BLACK},
    "ppo-clip": {"color": VERMILION, "linestyle": "-."},
    "dppo": {"color": ORANGE},
    "product-mask": {"color": PURPLE, "linestyle": "-."},
    "icepop": {"color": BLUE, "linestyle": "-."},
    "geometric-mask": {"color": GREY, "linestyle": "--"},
    "sequence-mis": {"color": SKY, "linestyle": "--"},
    "sequence-tis": {"color": SKY},
    "token-mis": {"color": GREEN, "linestyle": "--"},
    "token-tis": {"color": GREEN},
    "token-is": {"color": GREY, "linestyle": ":", "label": "token-is and sequence-is: none"},
}
UPDATES: dict[str, Style] = {
    "sequence-is": {"color": GREY, "linestyle": ":"},
    "sequence-tis": {"color": SKY},
    "token-is": {"color": GREEN, "linestyle": ":"},
    "token-tis": {"color": GREEN},
    "cispo": {"color": BLUE},
    "reinforce": {"color": BLACK},
    "rloo": {"color": BLACK, "linestyle": "--"},
    "gspo": {"color": PURPLE},
    "dr-grpo": {"color": VERMILION, "linestyle": "--"},
    "grpo": {"color": VERMILION},
    "geometric-mask": {"color": GREY, "linestyle": "--"},
}


@cache
def cases(distance: float) -> tuple[WholeCase, ...]:
    """Random policies at a distance from the samplers of the problems that have completions of several tokens."""
    return tuple(_cases(distance))


def _cases(distance: float) -> Iterator[WholeCase]:
    standard = [
        case for case in whole_cases(on_policy=True) if case.problem.space.length > 1 and case.distance == "near"
    ]
    for case in standard:
        sampler = case.problem.behavior_logits
        for seed in range(POLICIES):
            noise = torch.randn(sampler.shape, generator=torch.Generator().manual_seed(seed), dtype=sampler.dtype)
            yield replace(case, problem=replace(case.problem, logits=sampler + distance * noise))


def staleness(distance: float) -> float:
    """KL(sampler‖π) of a completion in nats, averaged."""
    each = [(c.problem.probability * (c.problem.behavior_logp - c.problem.logp).sum(-1)).sum() for c in cases(distance)]
    return float(torch.stack(each).mean())


def drift(name: str, case: WholeCase) -> Tensor:
    """The length of the update under the advantage 1, where a token without a ratio has the weight 1."""
    updates, one = Updates(as_subject(get(name).loss), case), case.constant(1.0)
    weight = updates.as_sampler(one).abs().sum() / (case.batch(one).mask.sum() / len(case.batch(one).mask))
    return gradient(case, updates.effect(one)).mean.norm() / weight


def agreement(name: str, case: WholeCase) -> Tensor:
    """The cosine of the update with the policy gradient of the loss's own advantages."""
    updates, advantage = Updates(as_subject(get(name).loss), case), case.different(1)
    right = policy_gradients(case, updates.as_sampler(advantage))["policy-gradient"]
    return torch.cosine_similarity(gradient(case, updates.effect(advantage)).mean, right, dim=0)


def main() -> None:
    """Draw both panels."""
    torch.set_num_threads(1)
    plt.rcParams.update(look(11))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 6), constrained_layout=True)
    x = [staleness(distance) for distance in DISTANCES]
    for axis, measure, shown in ((left, drift, DRIFTS), (right, agreement, UPDATES)):
        for name, style in shown.items():
            y = [float(torch.stack([measure(name, case) for case in cases(d)]).mean()) for d in DISTANCES]
            axis.plot(x, y, **{"label": name, "linewidth": 2} | style)
        axis.set_xscale("log")
        axis.set_xlabel("staleness: KL(sampler‖π) of a completion, nats")
    left.set_ylabel("length of the update under the advantage 1")
    left.set_title("drift: it should be 0", loc="left", fontsize=11)
    right.set_ylabel("cosine with the policy gradient")
    right.set_title("direction of the update when advantages differ: it should be 1", loc="left", fontsize=11)
    for axis in (left, right):
        axis.legend(fontsize=9.5, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    write_figure(figure, OUT)


if __name__ == "__main__":
    main()
