"""The error of the vanilla gradient falls as one over the root of n; differentiating k1 or k3 as a loss leaves an error
that no number of samples removes.

Figure 2 of the paper: root of the summed squared error of the estimated gradient of KL(π‖ref), against the number of
samples, over 100 problems, for the plain vanilla one, leave-one-out and the near-optimal baseline v* = KL. We add the
exact error of each problem, and the floors of the two incorrect methods. The exact error of leave-one-out is smaller
than that of vanilla from n = 8 on only. At n = 2 and at n = 4, the paper's default, the one or three other samples add
more noise than they remove. Points are the mean over problems of the root of one squared error, as in the paper; lines
are the root of its expectation, which is larger where errors have heavy tails.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..study import Check, Comparison, Numbers, Settings, exceeds, ours, over_repeats, within
from . import bandits

if TYPE_CHECKING:
    from matplotlib.figure import Figure


METHODS = [
    "k1-reward",
    "k1-reward-leave-one-out",
    "k1-reward-optimal-baseline",
    "k2-loss",
    "k1-loss",
    "k3-loss",
]
SAMPLES = [2**i for i in range(1, 13)]
FEWEST, DEFAULT, ENOUGH, MANY = 2, 4, 64, SAMPLES[-1]


def run(settings: Settings) -> Numbers:
    """Simulated errors, and exact ones."""
    generator = torch.Generator().manual_seed(settings.seed)
    problems = bandits.draw(settings.size(100, 50), generator)
    logp = problems.logp
    p, log_ratio = logp.exp(), logp - problems.ref_logp
    target = bandits.exact_gradient(log_ratio, p)
    methods = [*METHODS, *settings.arms]
    many = lambda x: x.expand(len(methods), -1, -1)
    errors = []
    for n in SAMPLES:
        counts = bandits.count(p[None], n, generator)
        found = bandits.estimated_gradients(methods, many(log_ratio), many(counts[0]), many(p))
        errors.append((found - target).square().sum(-1).sqrt())
    error = torch.stack(errors, 1)  # (methods, samples, repeats)
    exact = _exact(methods, log_ratio, p, target)
    at = dict(zip(methods, error, strict=True))
    saved = {
        f"{name}, n = {n}": (exact["k1-reward"][i] / exact[name][i]).log()
        for name in ("k1-reward-leave-one-out", "k1-reward-optimal-baseline")
        for i, n in enumerate(SAMPLES)
        if n in (FEWEST, DEFAULT, ENOUGH)
    }
    return {
        "samples": SAMPLES,
        "problems": len(p),
        "simulated": {name: over_repeats(x) for name, x in at.items()},
        "exact": {name: x.mean(-1).tolist() for name, x in exact.items()},
        "slope": _slope(error[0].mean(-1)),
        "floor": {
            name: {"measured": float(at[name][-1].mean()), "exact": float(floor.norm(dim=-1).mean())}
            for name, floor in _floors(log_ratio, p, target).items()
        },
        "saved": {name: over_repeats(x) for name, x in saved.items()},
    }


def _exact(methods: list[str], log_ratio: Tensor, p: Tensor, target: Tensor) -> dict[str, Tensor]:
    """(len(SAMPLES), R) root of bias² + variance / n."""
    score_size = 1 - 2 * p + p.square().sum(-1, keepdim=True)  # ‖e_y - π‖²
    found = {}
    for name in methods:
        alone = "k1-reward-optimal-baseline" if name == "k1-reward-leave-one-out" else name
        weight = bandits.weight_of(alone)(log_ratio, p, p)
        mean = bandits.exact_gradient(weight, p)
        variance = (p * weight.square() * score_size).sum(-1) - mean.square().sum(-1)
        bias = (mean - target).square().sum(-1)
        found[name] = torch.stack([(bias + variance / n).sqrt() for n in SAMPLES])
    # Leave-one-out is v* plus the noise of estimating it by the others: uncorrelated, and of this size.
    centred = log_ratio - (p * log_ratio).sum(-1, keepdim=True)
    noise = (p * centred.square()).sum(-1) * (p * score_size).sum(-1) + target.square().sum(-1)
    extra = torch.stack([noise / (n * (n - 1)) for n in SAMPLES])
    found["k1-reward-leave-one-out"] = (found["k1-reward-leave-one-out"].square() + extra).sqrt()
    return found


def _floors(log_ratio: Tensor, p: Tensor, target: Tensor) -> dict[str, Tensor]:
    """(R, ARMS) bias of the two incorrect methods: what remains for n to infinity."""
    weights = {name: bandits.WEIGHTS[name](log_ratio, p, p) for name in ("k1-loss", "k3-loss")}
    return {name: bandits.exact_gradient(weight, p) - target for name, weight in weights.items()}


def _slope(error: Tensor) -> float:
    """Of log error against log n, over the last half of the range."""
    half = len(SAMPLES) // 2
    x, y = torch.tensor(SAMPLES[half:]).double().log(), error[half:].log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def check(numbers: Numbers) -> list[Check]:
    """The claim, sentence by sentence."""
    floor = numbers["floor"]
    saved = {name: (x["mean"], x["error"]) for name, x in numbers["saved"].items()}
    return [
        within("vanilla falls as n^(-1/2)", numbers["slope"], -0.5, 0.1),
        within(
            f"k1 as loss at n = {MANY} is at its floor", floor["k1-loss"]["measured"], floor["k1-loss"]["exact"], 0.1
        ),
        within(
            f"k3 as loss at n = {MANY} is at its floor", floor["k3-loss"]["measured"], floor["k3-loss"]["exact"], 0.1
        ),
        exceeds(
            f"leave-one-out has the smaller error at n = {ENOUGH}", *saved[f"k1-reward-leave-one-out, n = {ENOUGH}"]
        ),
        *ours(
            _leave_one_out_is_worse(numbers, f"and the larger one at n = {FEWEST}", FEWEST),
            _leave_one_out_is_worse(numbers, f"and at n = {DEFAULT}, the paper's default", DEFAULT),
        ),
        exceeds("the baseline v* has a smaller error than none", *saved[f"k1-reward-optimal-baseline, n = {FEWEST}"]),
    ]


def _leave_one_out_is_worse(numbers: Numbers, claim: str, samples: int) -> Check:
    name, at = "k1-reward-leave-one-out", SAMPLES.index(samples)
    with_it, without = numbers["exact"][name][at], numbers["exact"]["k1-reward"][at]
    saved = numbers["saved"][f"{name}, n = {samples}"]
    judged = exceeds(claim, -saved["mean"], saved["error"])
    return replace(judged, measured=f"{with_it:.3f} against {without:.3f}, {judged.measured}")


def compare(numbers: Numbers) -> Comparison:
    """The exact error of each arm, for some n."""
    shown = (FEWEST, DEFAULT, ENOUGH, MANY)
    rows = {name: [error[SAMPLES.index(n)] for n in shown] for name, error in numbers["exact"].items()}
    return Comparison("root squared error of the gradient, exact", [f"n = {n}" for n in shown], rows)


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Error against samples, lines exact where known, points simulated."""
    axis = figure.subplots()
    for name, look in bandits.looks(numbers["simulated"]).items():
        seen = numbers["simulated"][name]
        axis.plot(numbers["samples"], numbers["exact"][name], **look)
        axis.errorbar(numbers["samples"], seen["mean"], seen["error"], fmt="o", ms=3.5, color=look["color"], capsize=2)
    axis.set(xscale="log", yscale="log", xlabel="samples n", ylabel="root squared error of the gradient")
    axis.set_title(
        f"means over {numbers['problems']} problems; lines: root of the exact expectation;\n"
        "points: root of one simulated error, as in the paper, ± 1 SE",
        fontsize=10,
    )
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
