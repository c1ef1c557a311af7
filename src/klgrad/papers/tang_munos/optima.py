"""Reward maximised under a KL penalty: where each gradient ends, seen from π* and from π*_rev; figures 4, 5 and 6."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ...core.regularizers import forward_optimum, reverse_optimum
from ...drawing import BLACK, ORANGE, style
from ..study import Axes, Check, Comparison, Figure, Numbers, Settings, columns, exceeds, no_gain, ours, over_repeats
from . import bandits

# KL-regularised reward maximisation on many bandits: the simulation behind figures 4, 5 and 6.
#
# π starts at ref; a step adds the leave-one-out policy gradient of a Gaussian reward and subtracts β times an
# estimate of the KL's gradient, at learning rate 1, in float32. The paper gives neither β nor the number of steps. With
# β = 1 the figures look as printed; each of them sweeps β.

METHODS = ("exact", "k1-reward", "k1-reward-leave-one-out", "k1-loss", "k3-loss")
BETA = 1.0
EVERY = 10
TAIL = 0.2
"""The share of steps at the end over which a converged value is averaged."""

ENOUGH = 1000
"""Problems for what needs no simulation."""


@dataclass(frozen=True)
class Paths:
    """KL(π‖π*) and KL(π‖π*_rev) over KL(ref‖π*), each (methods, points, repeats)."""

    methods: Sequence[str]
    to_optimum: Tensor
    to_forward_optimum: Tensor

    @property
    def ends(self) -> dict[str, Tensor]:
        """By method the mean over the tail of the way to π*."""
        return self._tails(self.to_optimum)

    @property
    def forward_ends(self) -> dict[str, Tensor]:
        """By method the same of the way to π*_rev."""
        return self._tails(self.to_forward_optimum)

    def _tails(self, path: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.methods, path[:, -max(1, int(TAIL * path.shape[1])) :].mean(1), strict=True))


@cache
def simulate(settings: Settings, samples: int, beta: float, steps: int, methods: Sequence[str] = METHODS) -> Paths:
    """Run all methods on the same problems with the same random numbers; the cache lets figures share simulations."""
    repeats = settings.size(100, 60)
    generator = torch.Generator().manual_seed(settings.seed)
    problems = bandits.draw(repeats, generator, torch.float32)
    ref, reward = problems.ref_logp, problems.reward
    optimum, forward = reverse_optimum(ref, reward, beta), forward_optimum(ref, reward, beta)
    start = bandits.divergence(ref, optimum)
    logits, seen = ref.expand(len(methods), -1, -1).clone(), []
    for step in range(steps + 1):
        logp = torch.log_softmax(logits, -1)
        if step % EVERY == 0:
            seen.append(torch.stack([bandits.divergence(logp, x) / start for x in (optimum, forward)]))
        p = logp.exp()
        counts = bandits.count(p, samples, generator)
        # The same estimate for every method except `exact`, which has the exact gradient.
        gain = bandits.mean_score(reward - bandits.others_mean(reward.expand_as(p), counts), counts, p)
        if "exact" in methods:
            m = list(methods).index("exact")
            gain[m] = bandits.exact_gradient(reward, p[m])
        logits = logits + bandits.RATE * (gain - beta * bandits.estimated_gradients(methods, logp - ref, counts, p))
    return Paths(methods, *torch.stack(seen, 2))


def optima_apart(settings: Settings, beta: float) -> Tensor:
    """(`ENOUGH`,) KL(π*_rev‖π*) over KL(ref‖π*): where k3 as a loss would end without noise, exactly."""
    problems = bandits.draw(ENOUGH, torch.Generator().manual_seed(settings.seed))
    ref, reward = problems.ref_logp, problems.reward
    optimum = reverse_optimum(ref, reward, beta)
    return bandits.divergence(forward_optimum(ref, reward, beta), optimum) / bandits.divergence(ref, optimum)


DEFAULT = 4
BETAS = [0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0]
NEARER, EDGES, INSIDE = (0.1, 0.3, 0.5, 3.0), (0.7, 2.0), 1.5
"""Besides the β of the figure: where k3 as a loss does approach π*, where it begins not to, and between those."""
LONG = 3000
"""Steps at the smallest β, where 1000 are far too few."""
ABOUT = 1.5
"""A mean KL that fell by less than this factor is about what it was; over 100 problems it varies by a tenth or two."""


class Fig4:
    """Maximising a reward under a KL penalty, the vanilla gradients bring π towards the optimum π*; k1 and k3
    differentiated as losses do not.

    Figure 4 of the paper: KL(π‖π*) over its initial value against steps, n = 4. β and the number of steps are not
    given; we take 1000 steps and sweep β. At β = 1 the figure looks as printed. That k3 as a loss gets no nearer to π*
    holds for β from about 0.7 to 2, by the mean over problems, which the paper draws; by the median it holds at 1 and
    1.5, and no more at 0.7 and 2. It fails at β = 0.5 and less, and at 3. The reason is where k3 as a loss is going:
    π*_rev, the optimum of the forward-KL problem, is further from π* than ref is for these β only, by the mean of exact
    values (crosses). For every β from 0.3 to 3 k3 ends further from π* than vanilla. At β = 0.1 even the analytic
    gradient is far from converged after 1000 steps, and after 3000 the mean of k3 is below vanilla's. The checks marked
    as ours are about the sweep; their β were chosen after a look at the numbers.
    """

    def run(self, settings: Settings) -> Numbers:
        methods = (*METHODS, *settings.arms)
        quick = lambda beta: 800 if beta in (BETA, INSIDE) else 400
        paths = {beta: simulate(settings, DEFAULT, beta, settings.size(1000, quick(beta)), methods) for beta in BETAS}
        main, ends = paths[BETA].to_optimum, {beta: x.ends for beta, x in paths.items()}
        vanilla, leave_one_out = (ends[BETA][f"k1-reward{baseline}"] for baseline in ("", "-leave-one-out"))
        long = simulate(settings, DEFAULT, BETAS[0], LONG).ends
        return {
            "steps": [EVERY * i for i in range(main.shape[1])],
            "problems": main.shape[-1],
            "normalised kl": {name: over_repeats(x) for name, x in zip(methods, main, strict=True)},
            "betas": BETAS,
            "converged": {name: [over_repeats(ends[beta][name]) for beta in BETAS] for name in methods},
            "median": {name: [ends[beta][name].median().item() for beta in BETAS] for name in methods},
            "optima apart": [over_repeats(optima_apart(settings, beta)) for beta in BETAS],
            "log end over start": {name: over_repeats(ends[BETA][name].log()) for name in methods},
            "log end over start, k3": {str(beta): over_repeats(end["k3-loss"].log()) for beta, end in ends.items()},
            "vanilla minus k3, long": over_repeats(long["k1-reward"] - long["k3-loss"]),
            "log k3 over vanilla": {
                str(beta): over_repeats((end["k3-loss"] / end["k1-reward"]).log()) for beta, end in ends.items()
            },
            "log vanilla over leave-one-out": over_repeats((vanilla / leave_one_out).log()),
        }

    def check(self, numbers: Numbers) -> list[Check]:
        """The claim, sentence by sentence, at β = 1; then what the sweep adds."""
        end, worse = numbers["log end over start"], numbers["log k3 over vanilla"]
        approach = ["exact", "k1-reward", "k1-reward-leave-one-out"]
        return [
            *(exceeds(f"{name} approaches π*", end[name], sign=-1) for name in approach),
            exceeds("k1 as loss ends further from π* than it began", end["k1-loss"]),
            no_gain("k3 as loss ends no nearer π* than it began", end["k3-loss"], sign=-1),
            exceeds("k3 as loss ends further from π* than vanilla", worse[str(BETA)]),
            exceeds("leave-one-out ends nearer than vanilla", numbers["log vanilla over leave-one-out"]),
            *ours(
                exceeds(
                    f"k3 as loss ends further from π* than vanilla at every β from {BETAS[1]:g} to {BETAS[-1]:g}",
                    *(worse[str(beta)] for beta in BETAS[1:]),
                ),
                *_sweep(numbers),
            ),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        paths, sweep = figure.subplots(1, 2, width_ratios=(1.4, 1))
        bandits.draw_paths(paths, numbers["steps"], numbers["normalised kl"], least=1e-4)
        for name, look in bandits.looks(numbers["converged"]).items():
            sweep.plot(numbers["betas"], *columns(numbers["converged"][name], "mean"), marker="o", ms=4, **look)
        color, (target,) = style("k3-loss")["color"], columns(numbers["optima apart"], "mean")
        look = {"ms": 4, "mfc": "none", "color": color, "label": "k3 as loss, median"}
        sweep.plot(numbers["betas"], numbers["median"]["k3-loss"], "s", **look)
        sweep.plot(numbers["betas"], target, "x", ms=5, color="black", label="π*_rev, exact mean")
        sweep.legend(*(x[-2:] for x in sweep.get_legend_handles_labels()), fontsize=8, loc="upper left")
        paths.axhline(1, color="#999999", lw=0.8)
        paths.set(yscale="log", xlabel="steps", ylabel="KL(π‖π*) / KL(ref‖π*)")
        number = numbers["problems"]
        paths.set_title(f"β = {BETA:g}, n = {DEFAULT}: means over\n{number} problems, ± 1 SE", fontsize=10)
        sweep.set_title(f"every β: means over\n{number} problems", fontsize=10)
        sweep.axhline(1, color="#999999", lw=0.8)
        sweep.set(xscale="log", yscale="log", xlabel="β", ylabel="the same, at the end")
        sweep.set_xticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
        sweep.set_xticks([], minor=True)
        figure.legend(*paths.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)

    def compare(self, numbers: Numbers) -> Comparison:
        return _ends(numbers, "β", numbers["betas"])


def _ends(numbers: Numbers, name: str, values: Sequence[float]) -> Comparison:
    """Where each arm ends, by what is varied."""
    rows = {arm: [x["mean"] for x in ends] for arm, ends in numbers["converged"].items()}
    return Comparison("KL(π‖π*) / KL(ref‖π*) at the end", [f"{name} = {value:g}" for value in values], rows)


def _label_samples(axis: Axes, samples: list[int]) -> None:
    axis.set(xscale="log", yscale="log", xlabel="samples n")
    axis.set_xticks(samples, [str(n) for n in samples])
    axis.set_xticks([], minor=True)


def _sweep(numbers: Numbers) -> list[Check]:
    """For which β k3 as a loss ends no nearer π* than it began, and why."""
    lost = numbers["log end over start, k3"]
    below = f"after {LONG} steps at β = {BETAS[0]:g} the mean of k3 as loss is below vanilla's"
    return [
        no_gain(f"k3 as loss ends no nearer π* at β = {INSIDE:g} either", lost[str(INSIDE)], sign=-1),
        *(_mean_no_nearer(numbers, beta) for beta in EDGES),
        *(exceeds(f"k3 as loss does approach π* at β = {beta:g}", lost[str(beta)], sign=-1) for beta in NEARER),
        exceeds(below, numbers["vanilla minus k3, long"]),
        _target(numbers, "further from", [beta for beta in BETAS if beta not in NEARER]),
        _target(numbers, "nearer", NEARER),
    ]


def _target(numbers: Numbers, place: str, betas: Sequence[float]) -> Check:
    """Where the optimum that k3 as a loss aims at is, against ref."""
    ratios = [numbers["optima apart"][numbers["betas"].index(beta)] for beta in betas]
    sign = 1 if place == "further from" else -1
    claim = f"π*_rev is {place} π* than ref is at β = {', '.join(f'{beta:g}' for beta in betas)}"
    judged = exceeds(claim, *({**x, "mean": x["mean"] - 1} for x in ratios), sign=sign)
    means = ", ".join(f"{x['mean']:.2f}" for x in ratios)
    return replace(judged, measured=f"{means} of its KL, {judged.measured}")


def _mean_no_nearer(numbers: Numbers, beta: float) -> Check:
    at = numbers["betas"].index(beta)
    mean, median = numbers["converged"]["k3-loss"][at]["mean"], numbers["median"]["k3-loss"][at]
    text = f"end over start {mean:.2f}, median {median:.2f}"
    return Check(f"its mean ends about where it began, or further, at β = {beta:g}", text, mean > 1 / ABOUT)


FIG5_SAMPLES = [4, 16, 64]
OTHER_BETA = 3.0


class Fig5:
    """With more samples per step the vanilla gradients end nearer to π*; k3 as a loss does not, because it has another
    target.

    Figure 5 of the paper: converged KL(π‖π*), over its initial value, against the number of samples n. β and the number
    of steps are not given: β = 1 and 3000 steps here, the mean over the last fifth; the analytic line shows how far the
    runs are from convergence. At β = 3, which is also ours, k3 as a loss does gain from more samples: there the optima
    of the two problems are near each other.
    """

    def run(self, settings: Settings) -> Numbers:
        methods = (*METHODS, *settings.arms)
        paths = {n: simulate(settings, n, BETA, settings.size(3000, 400), methods) for n in FIG5_SAMPLES}
        other = {n: simulate(settings, n, OTHER_BETA, settings.size(1000, 200), ("k3-loss",)) for n in (4, 64)}
        few, many = (other[n].ends["k3-loss"] for n in (4, 64))
        ends = {n: x.ends for n, x in paths.items()}
        first, last = ends[FIG5_SAMPLES[0]], ends[FIG5_SAMPLES[-1]]
        return {
            "samples": FIG5_SAMPLES,
            "problems": len(first["k3-loss"]),
            "converged": {name: [over_repeats(ends[n][name]) for n in FIG5_SAMPLES] for name in methods},
            "log first over last": {name: over_repeats((first[name] / last[name]).log()) for name in METHODS},
            "log first over last, k3, other β": over_repeats((few / many).log()),
            "log k3 over vanilla": over_repeats((last["k3-loss"] / last["k1-reward"]).log()),
        }

    def check(self, numbers: Numbers) -> list[Check]:
        gained = numbers["log first over last"]
        other = numbers["log first over last, k3, other β"]
        return [
            exceeds("vanilla ends nearer π* with 64 samples than with 4", gained["k1-reward"]),
            exceeds("leave-one-out does too", gained["k1-reward-leave-one-out"]),
            no_gain("k3 as loss gains nothing", gained["k3-loss"]),
            exceeds("at 64 samples k3 as loss is further from π* than vanilla", numbers["log k3 over vanilla"]),
            *ours(exceeds(f"at β = {OTHER_BETA:g} k3 as loss does gain", other)),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        axis = figure.subplots()
        for name, look in bandits.looks(numbers["converged"]).items():
            mean, error = columns(numbers["converged"][name], "mean", "error")
            axis.errorbar(numbers["samples"], mean, error, marker="o", ms=4, capsize=3, **look)
        axis.axhline(1, color="#999999", lw=0.8)
        _label_samples(axis, numbers["samples"])
        axis.set_ylabel("KL(π‖π*) / KL(ref‖π*) at the end")
        axis.set_title(f"means over {numbers['problems']} problems, ± 1 SE", fontsize=10)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))

    def compare(self, numbers: Numbers) -> Comparison:
        return _ends(numbers, "n", numbers["samples"])


FIG6_SAMPLES = [4, 16, 64, 256]
METHOD = ("k3-loss",)
OTHER_BETAS = [0.3, 3.0]


class Fig6:
    """Trained with k3 as a loss, π converges to the optimum of the forward-KL problem, π*_rev, and not to π*.

    Figure 6 of the paper: for k3 as a loss, converged KL of π to π* and to π*_rev against the number of samples, both
    over KL(ref‖π*). β and the number of steps are not given: β = 1 and 3000 steps here, the mean over the last fifth.
    Medians are drawn: a few problems are slow. β = 0.3 and 3 are ours.
    """

    def run(self, settings: Settings) -> Numbers:
        steps = settings.size(3000, 400)
        paths = {n: simulate(settings, n, BETA, steps, METHOD) for n in FIG6_SAMPLES}
        # At a small β the reward's pull is weak and the way long: too long for a quick run.
        betas = OTHER_BETAS if not settings.quick else OTHER_BETAS[-1:]
        swept = {beta: simulate(settings, 64, beta, steps, METHOD) for beta in betas}
        star = {n: x.ends["k3-loss"] for n, x in paths.items()}
        star_rev = {n: x.forward_ends["k3-loss"] for n, x in paths.items()}
        first, last = FIG6_SAMPLES[0], FIG6_SAMPLES[-1]
        quartiles = lambda x: [x[n].quantile(torch.tensor([0.25, 0.5, 0.75])).tolist() for n in FIG6_SAMPLES]
        log_ratio = lambda above, under: over_repeats((above / under).log())
        return {
            "samples": FIG6_SAMPLES,
            "problems": len(star[first]),
            "to π*": quartiles(star),
            "to π*_rev": quartiles(star_rev),
            "log π* over π*_rev, other β": {
                str(beta): log_ratio(x.ends["k3-loss"], x.forward_ends["k3-loss"]) for beta, x in swept.items()
            },
            "log π* over π*_rev, last": log_ratio(star[last], star_rev[last]),
            "log first over last, π*_rev": log_ratio(star_rev[first], star_rev[last]),
            "log first over last, π*": log_ratio(star[first], star[last]),
        }

    def check(self, numbers: Numbers) -> list[Check]:
        others = numbers["log π* over π*_rev, other β"]
        at_last = f"at n = {FIG6_SAMPLES[-1]} it is nearer π*_rev than π*"
        return [
            exceeds(at_last, numbers["log π* over π*_rev, last"]),
            exceeds("with more samples it comes nearer π*_rev", numbers["log first over last, π*_rev"]),
            no_gain("and not nearer π*", numbers["log first over last, π*"]),
            *ours(*(exceeds(f"nearer π*_rev than π* at β = {beta}", x) for beta, x in others.items())),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        axis = figure.subplots()
        for name, colour, line in (("to π*", ORANGE, "o-"), ("to π*_rev", BLACK, "o--")):
            low, middle, high = zip(*numbers[name], strict=True)
            axis.plot(numbers["samples"], middle, line, color=colour, label=f"k3 as loss, KL {name}")
            axis.fill_between(numbers["samples"], low, high, color=colour, alpha=0.15, lw=0)
        _label_samples(axis, numbers["samples"])
        axis.set_ylabel("KL / KL(ref‖π*) at the end")
        axis.set_title(f"medians of {numbers['problems']} problems; bands: quartiles", fontsize=10)
        axis.legend()
