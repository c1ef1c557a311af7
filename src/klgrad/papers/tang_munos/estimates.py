"""Estimates of a KL and of its gradient on one batch, as values and as losses: figures 1 and 2, and k_λ."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ...core.estimators import k1, k2, k3, k_lambda
from ...drawing import GREY, ORANGE
from ..study import Axes, Check, Comparison, Figure, Numbers, Settings, below, exceeds, ours, over_repeats, within
from . import bandits

ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
VALUE_SAMPLES = [2**i for i in range(11)]
FEW, MANY = 4, 1024


class Fig1:
    """Averaged over few samples the squared and the variance-reduced estimate of the KL beat the plain log-ratio; over
    many, the squared one is stuck at its bias.

    Figure 1 of the paper: mean squared error of k1, k2 and k3 as values of KL(π‖ref), against the number of samples,
    over 100 problems. We add the exact error of each problem, bias² + variance / n, summed over arms, and compare by
    it, problem by problem, in logarithms: the mean over problems is dominated by the few whose ref has heavy tails.
    """

    def run(self, settings: Settings) -> Numbers:
        generator = torch.Generator().manual_seed(settings.seed)
        problems = bandits.draw(settings.size(100, 50), generator)
        logp = problems.logp
        p, values = logp.exp(), {name: k.value(logp - problems.ref_logp) for name, k in ESTIMATORS.items()}
        kl = bandits.divergence(logp, problems.ref_logp)
        exact = {name: _squared_error(value, p, kl) for name, value in values.items()}
        simulated = {name: [] for name in ESTIMATORS}
        for n in VALUE_SAMPLES:
            counts = bandits.count(p, n, generator)
            for name, value in values.items():
                simulated[name].append(((value * counts).sum(-1) / n - kl).square())
        at = VALUE_SAMPLES.index
        return {
            "samples": VALUE_SAMPLES,
            "problems": len(p),
            "kl": float(kl.mean()),
            "simulated": {name: over_repeats(torch.stack(x)) for name, x in simulated.items()},
            "exact": {name: x.mean(-1).tolist() for name, x in exact.items()},
            "paired": {
                "k1 / k2, few": over_repeats((exact["k1"][at(FEW)] / exact["k2"][at(FEW)]).log()),
                "k1 / k3, few": over_repeats((exact["k1"][at(FEW)] / exact["k3"][at(FEW)]).log()),
                "k2 / k1, many": over_repeats((exact["k2"][at(MANY)] / exact["k1"][at(MANY)]).log()),
            },
        }

    def check(self, numbers: Numbers) -> list[Check]:
        paired = numbers["paired"]
        return [
            exceeds(f"at n = {FEW} squared is more accurate than vanilla", paired["k1 / k2, few"]),
            exceeds("variance reduced is more accurate than vanilla, at every n alike", paired["k1 / k3, few"]),
            exceeds(f"at n = {MANY} squared is less accurate than vanilla", paired["k2 / k1, many"]),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        axis = _over_samples(numbers, figure, size=4)
        axis.set_ylabel("mean squared error of the KL estimate")
        number = numbers["problems"]
        axis.set_title(f"means over {number} problems; lines: exact; points: simulated, ± 1 SE", fontsize=10)
        axis.legend()


def _over_samples(numbers: Numbers, figure: Figure, size: float) -> Axes:
    """Errors against samples: lines exact, points of a size simulated."""
    axis, samples = figure.subplots(), numbers["samples"]
    for name, look in bandits.looks(numbers["simulated"]).items():
        seen = numbers["simulated"][name]
        axis.plot(samples, numbers["exact"][name], **look)
        axis.errorbar(samples, seen["mean"], seen["error"], fmt="o", ms=size, color=look["color"], capsize=2)
    axis.set(xscale="log", yscale="log", xlabel="samples n")
    return axis


def _squared_error(value: Tensor, p: Tensor, kl: Tensor) -> Tensor:
    """(len(VALUE_SAMPLES), R) bias² + variance / n."""
    mean = (p * value).sum(-1)
    variance = (p * (value - mean[:, None]).square()).sum(-1)
    return torch.stack([(mean - kl).square() + variance / n for n in VALUE_SAMPLES])


SAMPLES = [2**i for i in range(1, 13)]
FEWEST, DEFAULT, ENOUGH, MOST = 2, 4, 64, SAMPLES[-1]


class Fig2:
    """The error of the vanilla gradient falls as one over the root of n; differentiating k1 or k3 as a loss leaves an
    error that no number of samples removes.

    Figure 2 of the paper: root of the summed squared error of the estimated gradient of KL(π‖ref), against the number
    of samples, over 100 problems, for the plain vanilla one, leave-one-out and the near-optimal baseline v* = KL. We
    add the exact error of each problem, and the floors of the two incorrect methods. The exact error of leave-one-out
    is smaller than that of vanilla from n = 8 on only. At n = 2 and at n = 4, the paper's default, the one or three
    other samples add more noise than they remove. Points are the mean over problems of the root of one squared error,
    as in the paper; lines are the root of its expectation, which is larger where errors have heavy tails.
    """

    def run(self, settings: Settings) -> Numbers:
        generator = torch.Generator().manual_seed(settings.seed)
        problems = bandits.draw(settings.size(100, 50), generator)
        logp = problems.logp
        p, log_ratio = logp.exp(), logp - problems.ref_logp
        target = bandits.exact_gradient(log_ratio, p)
        methods = [*bandits.WEIGHTS, *settings.arms]
        many = lambda x: x.expand(len(methods), -1, -1)
        errors = []
        for n in SAMPLES:
            counts = bandits.count(p[None], n, generator)
            gradients = bandits.estimated_gradients(methods, many(log_ratio), many(counts[0]), many(p))
            errors.append((gradients - target).square().sum(-1).sqrt())
        error = torch.stack(errors, 1)  # (methods, samples, repeats)
        exact = _root_errors(methods, log_ratio, p, target)
        # The bias of the two incorrect methods: what remains for n to infinity.
        floor = lambda name: bandits.exact_gradient(bandits.WEIGHTS[name](log_ratio, p, p), p) - target
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
                name: {"measured": float(at[name][-1].mean()), "exact": float(floor(name).norm(dim=-1).mean())}
                for name in ("k1-loss", "k3-loss")
            },
            "saved": {name: over_repeats(x) for name, x in saved.items()},
        }

    def check(self, numbers: Numbers) -> list[Check]:
        saved, floors = numbers["saved"], {k: numbers["floor"][f"{k}-loss"] for k in ("k1", "k3")}
        at_floor = f"as loss at n = {MOST} is at its floor"
        smaller = saved[f"k1-reward-leave-one-out, n = {ENOUGH}"]
        return [
            within("vanilla falls as n^(-1/2)", numbers["slope"], -0.5, 0.1),
            *(within(f"{k} {at_floor}", floor["measured"], floor["exact"], 0.1) for k, floor in floors.items()),
            exceeds(f"leave-one-out has the smaller error at n = {ENOUGH}", smaller),
            *ours(
                _leave_one_out_is_worse(numbers, f"and the larger one at n = {FEWEST}", FEWEST),
                _leave_one_out_is_worse(numbers, f"and at n = {DEFAULT}, the paper's default", DEFAULT),
            ),
            exceeds(
                "the baseline v* has a smaller error than none", saved[f"k1-reward-optimal-baseline, n = {FEWEST}"]
            ),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        axis = _over_samples(numbers, figure, size=3.5)
        axis.set_ylabel("root squared error of the gradient")
        axis.set_title(
            f"means over {numbers['problems']} problems; lines: root of the exact expectation;\n"
            "points: root of one simulated error, as in the paper, ± 1 SE",
            fontsize=10,
        )
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))

    def compare(self, numbers: Numbers) -> Comparison:
        shown = (FEWEST, DEFAULT, ENOUGH, MOST)
        rows = {name: [error[SAMPLES.index(n)] for n in shown] for name, error in numbers["exact"].items()}
        return Comparison("root squared error of the gradient, exact", [f"n = {n}" for n in shown], rows)


def _root_errors(methods: list[str], log_ratio: Tensor, p: Tensor, target: Tensor) -> dict[str, Tensor]:
    """(len(SAMPLES), R) root of bias² + variance / n."""
    score_size = 1 - 2 * p + p.square().sum(-1, keepdim=True)  # ‖e_y - π‖²
    errors = {}
    for name in methods:
        alone = "k1-reward-optimal-baseline" if name == "k1-reward-leave-one-out" else name
        weight = bandits.weight_of(alone)(log_ratio, p, p)
        mean = bandits.exact_gradient(weight, p)
        variance = (p * weight.square() * score_size).sum(-1) - mean.square().sum(-1)
        bias = (mean - target).square().sum(-1)
        errors[name] = torch.stack([(bias + variance / n).sqrt() for n in SAMPLES])
    # Leave-one-out is v* plus the noise of estimating it by the others: uncorrelated, and of this size.
    centred = log_ratio - (p * log_ratio).sum(-1, keepdim=True)
    noise = (p * centred.square()).sum(-1) * (p * score_size).sum(-1) + target.square().sum(-1)
    extra = torch.stack([noise / (n * (n - 1)) for n in SAMPLES])
    errors["k1-reward-leave-one-out"] = (errors["k1-reward-leave-one-out"].square() + extra).sqrt()
    return errors


def _slope(error: Tensor) -> float:
    """Of log error against log n, over the last half of the range."""
    half = len(SAMPLES) // 2
    x, y = torch.tensor(SAMPLES[half:]).double().log(), error[half:].log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def _leave_one_out_is_worse(numbers: Numbers, claim: str, samples: int) -> Check:
    name, at = "k1-reward-leave-one-out", SAMPLES.index(samples)
    with_it, without = numbers["exact"][name][at], numbers["exact"]["k1-reward"][at]
    saved = numbers["saved"][f"{name}, n = {samples}"]
    judged = exceeds(claim, saved, sign=-1)
    return replace(judged, measured=f"{with_it:.3f} against {without:.3f}, {judged.measured}")


LAMBDAS = [0.0, 0.25, 0.5, 1.0, 2.0]
LAMBDA_COLOURS = [GREY, "#3b528b", "#21918c", ORANGE, "#5ec962"]
"""λ = 0 and 1 are k1 and k3 as losses, in their colours."""
STEPS = 200


class KLambda:
    """Every λ gives an unbiased value l + λ (1/r - 1), but as a loss the family descends λ times the forward KL: at λ =
    0, where it is the plain log-ratio, nothing.

    Section 3 of the paper, which states it without a figure. The expected gradient is summed over all arms, exactly,
    and descended for 200 steps from each of the problems.
    """

    def run(self, settings: Settings) -> Numbers:
        generator = torch.Generator().manual_seed(settings.seed)
        problems = bandits.draw(settings.size(100, 30), generator)
        logp, ref = problems.logp, problems.ref_logp
        p, log_ratio, kl = logp.exp(), logp - ref, bandits.divergence(logp, ref)
        forward = p - ref.exp()  # ∇KL(ref‖π) over logits
        steps = range(STEPS + 1)
        numbers: Numbers = {"steps": list(steps), "problems": len(p), "kl": {}, "value error": {}, "gradient error": {}}
        for lam in LAMBDAS:
            k, name = k_lambda(lam), str(lam)
            value = (p * k.value(log_ratio)).sum(-1)
            gradient = lambda logp, k=k: bandits.exact_gradient(k.slope(logp - ref), logp.exp())
            off = (gradient(logp) - lam * forward).norm(dim=-1) / forward.norm(dim=-1)
            numbers["value error"][name] = float(((value - kl).abs() / kl).max())
            numbers["gradient error"][name] = float(off.max())
            numbers["kl"][name] = over_repeats(bandits.descent(problems.logits, ref, STEPS, steps, gradient))
        return numbers

    def check(self, numbers: Numbers) -> list[Check]:
        ends = [numbers["kl"][str(lam)]["mean"][-1] for lam in LAMBDAS]
        start = numbers["kl"]["0.0"]["mean"][0]
        ordered = all(a > b for a, b in pairwise(ends))
        value, gradient = (max(numbers[f"{of} error"].values()) for of in ("value", "gradient"))
        return [
            below("the value is unbiased for every λ (largest relative error)", value, 1e-9),
            below("as a loss it is λ x the forward KL (same)", gradient, 1e-9),
            below("at λ = 0 nothing moves", abs(ends[0] - start) / start, 1e-9),
            Check("the larger λ, the nearer it ends", ", ".join(f"{x:.3g}" for x in ends), ordered),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        axis = figure.subplots()
        for lam, colour in zip(LAMBDAS, LAMBDA_COLOURS, strict=True):
            mean = numbers["kl"][str(lam)]["mean"]
            axis.plot(numbers["steps"], mean, color=colour, lw=2)
            axis.annotate(f" λ = {lam:g}", (numbers["steps"][-1], mean[-1]), color=colour, va="center", fontsize=9)
        axis.set(yscale="log", xlabel="steps along the expected gradient", ylabel="KL(π‖ref)", xlim=(0, STEPS * 1.14))
        axis.set_title(f"means over {numbers['problems']} problems, exact gradients", fontsize=10)
