"""k3 near ref and far from it: the bias of its gradient, the noise of its coefficient, the tail of its value."""

import math
from dataclasses import replace
from statistics import median_low

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from ...core.estimators import MAX_EXPONENT, Estimator, k1, k2, k3
from ...drawing import BLACK, GREY, style
from ...enumeration import Problem, bandit, target_gradients
from ..study import SIGNIFICANT, Check, Figure, Numbers, Settings, below, exceeds, over_repeats, within
from .placements import PLACEMENTS, expected_gradient, relative_gap

FIT_RANGE, FIT_DEGREE = 0.1, 7
"""Of (gap / (δ-1)²) in δ-1: the first term left out is about 0.1⁸/10 = 1e-9, below what the checks resolve."""
EXPANSION = (1 / 2, -1 / 3, 1 / 4)
"""Coefficients of (δ-1)², (δ-1)³ and the bounded remainder's (δ-1)⁴, those of -log δ."""
FITTED = 1e-5
BIAS_ARMS = 10
HALVINGS = 10
ORDER_TOLERANCE = 0.02
"""Of the measured power of the distance; at 2⁻¹⁰ the next order still moves it by about 1e-3."""


class Bias:
    """Near ref, k3 as loss is the reverse KL gradient to first order only: its coefficient is (δ-1)²/2 short, δ =
    ref/π.

    Lemma E.1 (first-order agreement and second-order bias) of Liu et al. (arXiv 2510.01555): the coefficient falls
    short by (δ-1)²/2 - (δ-1)³/3 + O((δ-1)⁴). The expansion is fitted to the difference of the slopes of this package's
    k2 and k3; the fit's range and degree are ours. We add a test at the level of a policy: along straight lines from
    ref through random bandits, the relative gap between the two expected gradients, summed over all outcomes, shrinks
    in proportion to the distance.
    """

    def run(self, settings: Settings) -> Numbers:
        distances = [2.0**-i for i in range(HALVINGS + 1)]
        bandits = _bandits(BIAS_ARMS, settings.size(24, 6), settings.seed)
        gradient = lambda problem: expected_gradient(problem, PLACEMENTS["k3-loss"])
        gap = lambda problem: relative_gap(gradient(problem), target_gradients(problem)["reverse-kl-sequence"])
        wide = torch.linspace(-0.9, 2.0, 117, dtype=torch.float64)
        return {
            "fit": _fit(),
            "delta_minus_1": wide.tolist(),
            "short": _short_by(wide).tolist(),
            "distance": distances,
            "gap": [[gap(_ref_at(problem, distance)) for distance in distances] for problem in bandits],
        }

    def check(self, numbers: Numbers) -> list[Check]:
        second, third, fourth = EXPANSION
        orders = [math.log2(gaps[-2] / gaps[-1]) for gaps in numbers["gap"]]  # the distances are one halving apart
        worst = max(orders, key=lambda order: abs(order - 1))
        near, far = (median_low(gaps[i] for gaps in numbers["gap"]) for i in (-1, 0))
        return [
            within("coefficient of (δ-1)² is 1/2", numbers["fit"][0], second, FITTED),
            within("coefficient of (δ-1)³ is -1/3", numbers["fit"][1], third, FITTED),
            within("the remainder is of fourth order, with 1/4", numbers["fit"][2], fourth, FITTED * 10),
            within("gap of gradients ∝ distance to the power 1 (the worst bandit)", worst, 1, ORDER_TOLERANCE),
            below("near ref the two agree (median relative gap at distance 2⁻¹⁰)", near, 1e-2),
            Check("far from ref they do not (median relative gap at distance 1)", f"{far:.3g}", far > 0.1),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        x = torch.tensor(numbers["delta_minus_1"], dtype=torch.float64)
        left.plot(x, numbers["short"], **{**style("k3-loss"), "label": "measured", "linewidth": 2.5})
        left.plot(x, x**2 / 2, color=GREY, linestyle=":", label="(δ−1)²/2")
        left.plot(x, x**2 / 2 - x**3 / 3, color=BLACK, linestyle="--", label="(δ−1)²/2 − (δ−1)³/3")
        left.set(ylim=(-0.7, 2.0), xlabel="δ − 1, with δ = ref/π")
        left.set_ylabel("shortfall of k3's coefficient, −log δ − (1 − δ)")
        left.set_title("exact", fontsize=10)
        left.legend(loc="lower left", fontsize=9)
        distance = numbers["distance"]
        for gaps in numbers["gap"]:
            right.loglog(distance, gaps, **{**style("k3-loss"), "label": None, "linewidth": 0.8, "alpha": 0.6})
        middle = median_low(gaps[-1] for gaps in numbers["gap"]) / distance[-1]
        right.loglog(distance, [middle * d for d in distance], color=BLACK, linestyle="--", label="∝ distance")
        right.set(xlabel="std of the logits' difference, π to ref", ylabel="relative gap, ∇ k3 as loss to ∇KL(π‖ref)")
        right.set_title(f"each of {len(numbers['gap'])} bandits", fontsize=10)
        right.legend(loc="upper left", fontsize=9)


def _short_by(x: Tensor) -> Tensor:
    """By how much k3's coefficient at δ = 1 + x falls short of the principled one."""
    log_ratio = -torch.log1p(x)
    return k2.slope(log_ratio) - k3.slope(log_ratio)


def _fit() -> list[float]:
    """Coefficients of (δ-1)², (δ-1)³, ... by least squares."""
    # Chebyshev nodes, an even number: none is 0, where the quotient is 0/0, and the ends do not ripple.
    x = FIT_RANGE * torch.cos(torch.pi * (torch.arange(32, dtype=torch.float64) + 0.5) / 32)
    scaled_powers = torch.stack([(x / FIT_RANGE) ** i for i in range(FIT_DEGREE + 1)], -1)
    solution = torch.linalg.lstsq(scaled_powers, (_short_by(x) / x.square())[:, None]).solution[:, 0]
    return [c / FIT_RANGE**i for i, c in enumerate(solution.tolist())]


def _bandits(arms: int, number: int, seed: int) -> list[Problem]:
    return [bandit(arms, seed=1000 * seed + i, away_from_ref=1.0) for i in range(number)]


def _ref_at(problem: Problem, distance: float) -> Problem:
    """The same policy, with ref moved along a straight line of logits to this share of its distance."""
    return replace(problem, ref_logits=torch.lerp(problem.logits, problem.ref_logits, distance)).on_policy()


VARIANCE_ARMS = 20
DISTANCES = tuple(2.0**i for i in range(-8, 3))
"""Standard deviation of π's logits from ref's."""
EXACT = 1e-9
"""Relative; float64 leaves about 1e-14 of a sum or a quadrature."""


class Variance:
    """The coefficient of k3 as loss has variance χ²(ref‖π), exactly; as π leaves ref it explodes, that of k1 does not.

    The variance analysis of k3 as loss in Liu et al. (arXiv 2510.01555): Var_π[1 - ref/π] = χ²(ref‖π). Variances are
    sums over every outcome of random bandits in float64; distances, numbers of arms and logits are ours. The distance
    grows in two ways. With ref fixed and π concentrating, as in training, outcomes appear where π ≪ ref and the
    variance explodes. With π fixed and ref concentrating, ref/π stays below 1/π and it does not: the explosion is
    one-sided. A bandit of finitely many arms has a finite χ²; where it is infinite is shown by the Gaussian example.
    """

    def run(self, settings: Settings) -> Numbers:
        bandits = _bandits(VARIANCE_ARMS, settings.size(64, 16), settings.seed)
        at = lambda of: _measure_all([[of(problem, distance) for distance in DISTANCES] for problem in bandits])
        return {"distance": list(DISTANCES), "policy_leaves": at(_policy_at), "ref_leaves": at(_ref_at)}

    def check(self, numbers: Numbers) -> list[Check]:
        apart = [numbers["policy_leaves"], numbers["ref_leaves"]]
        error = max(((_table(a, "k3") / _table(a, "chi_square")) - 1).abs().max().item() for a in apart)
        policy, ref = (_table(a, "k3") / _table(a, "k1") for a in apart)
        far, widening = policy[:, -1], policy[:, -1].log() - policy[:, -3].log()
        middle, other = (x[:, -1].median().item() for x in (policy, ref))
        return [
            below("Var of k3's coefficient is χ²(ref‖π) (largest relative error)", error, EXACT),
            within("near ref it equals that of k1 in reward (median ratio)", policy[:, 0].median().item(), 1, 0.02),
            exceeds("π far from ref: it is larger (log ratio at distance 4)", over_repeats(far.log())),
            exceeds("the more so the farther (log ratio, distance 4 against 1)", over_repeats(widening)),
            Check("by orders of magnitude (median ratio at distance 4)", f"{middle:.3g}", middle > 100),
            below("one-sided: not where ref concentrates instead (median ratio at distance 4)", other, 10),
            below("no exponent meets the estimators' cap", max(a["largest_exponent"] for a in apart), MAX_EXPONENT),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        """Median and middle 90 % over bandits of both variances against the distance, either way apart."""
        panels = figure.subplots(1, 2, sharey=True)
        titles = {"policy_leaves": "ref fixed, π concentrates", "ref_leaves": "π fixed, ref concentrates"}
        for axes, (apart, title) in zip(panels, titles.items(), strict=True):
            for name, variance in {"k1-reward": "k1", "k3-loss": "k3"}.items():
                table, look = _table(numbers[apart], variance), style(name)
                low, high = table.quantile(0.05, 0), table.quantile(0.95, 0)
                axes.fill_between(numbers["distance"], low, high, color=look["color"], alpha=0.2, linewidth=0)
                # Near ref the two coincide: the wider line below stays visible.
                width = 4.5 if variance == "k1" else 2.0
                axes.plot(numbers["distance"], table.median(0).values, linewidth=width, **look)
            chi_square = _table(numbers[apart], "chi_square")
            middle = chi_square.median(0).values
            axes.plot(numbers["distance"], middle, "o", color=BLACK, markerfacecolor="none", label="χ²(ref‖π)")
            axes.set_xscale("log", base=2)
            axes.set(yscale="log", xlabel="std of the logits' difference")
            axes.set_title(f"{title}\nmedians of {len(chi_square)} bandits; bands: middle 90%", fontsize=9.5)
        panels[0].set_ylabel("variance of the coefficient on ∇log π")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9)


def _policy_at(problem: Problem, distance: float) -> Problem:
    """The same ref, with π moved along a straight line of logits."""
    return replace(problem, logits=torch.lerp(problem.ref_logits, problem.logits, distance)).on_policy()


def _measure_all(problems: list[list[Problem]]) -> Numbers:
    measured = torch.tensor([[_measure(problem) for problem in row] for row in problems], dtype=torch.float64)
    *tables, exponent = measured.unbind(-1)
    named = zip(("k3", "k1", "chi_square"), tables, strict=True)
    return {**{name: table.tolist() for name, table in named}, "largest_exponent": exponent.max().item()}


def _measure(problem: Problem) -> list[float]:
    pi, ref = problem.probability, problem.ref_logp[:, 0].exp()
    log_ratio = (problem.logp - problem.ref_logp)[:, 0]
    chi_square = ((ref - pi).square() / pi).sum()
    variances = [_variance(k3.slope(log_ratio), pi), _variance(k1.value(log_ratio), pi)]
    return [x.item() for x in (*variances, chi_square, -log_ratio.min())]


def _variance(x: Tensor, probability: Tensor) -> Tensor:
    mean = (probability * x).sum()
    return (probability * (x - mean).square()).sum()


def _table(measured: Numbers, name: str) -> Tensor:
    return torch.tensor(measured[name], dtype=torch.float64)


MEAN, STD = 0.1, 0.2
PRINTED = {"k1": 0.6912, "k3": 8.8244}
FINITE = (0.85, 0.9, 1.0, 1.1, 1.25, 1.5)
"""σ_q at which quadrature reaches the whole second moment before the exponent meets its cap."""
EDGE = (0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
"""σ_q on both sides of √½ = 0.707, for the growth of the integrand."""
REACH = 14.0
"""Standard deviations of q that quadrature covers where the exponent allows it: φ(14) = 1e-43."""
EXPONENT_REACH = 27.0
"""z²(1 - σ_q²)/2, the main part of the exponent -l, is at most this: below the cap, with a margin for the rest."""
POINTS = 8001
MIDDLE = (0.025, 0.975)


def log_ratio(z: Tensor, std: Tensor | float) -> Tensor:
    """Log q/p at the point z standard deviations from q's mean."""
    x = MEAN + std * z
    return Normal(MEAN, std).log_prob(x) - Normal(0.0, 1.0).log_prob(x)


class Gaussian:
    """Between Gaussians k3's value has finite variance only if σ_q² > σ_p²/2; else its sample std grows with the
    sample.

    The Gaussian example of Liu et al. (arXiv 2510.01555): policy q = N(0.1, 0.2²), reference p = N(0, 1), samples from
    q; they print a sample standard deviation of 8.8244 for k3 and 0.6912 for k1 at a sample size they do not state.
    Finite quantities are computed by quadrature and compared with their closed forms; an infinite one (k3's variance
    here) is shown by the growth of its integrand and of sample standard deviations over many repeats. The other σ_q,
    the sizes and the repeats are ours. The estimators cap their exponent at 30; every range stays below it, which is
    checked. The exact standard deviation of k1 is 0.6791, so that the printed 0.6912 is itself a sampled number.
    """

    def run(self, settings: Settings) -> Numbers:
        exponents: list[float] = []
        (k1_variance,) = _by_quadrature(k1, (STD,), exponents)
        return {
            "k1_std": {"quadrature": k1_variance**0.5, "closed": _k1_variance(STD) ** 0.5},
            "finite": {
                "std": list(FINITE),
                "quadrature": _by_quadrature(k3, FINITE, exponents),
                "closed": [_k3_variance(std) for std in FINITE],
            },
            "growth": {"std": list(EDGE), "rate": _growth_rate(EDGE, exponents)},
            "samples": _simulate(settings, exponents),
            "curve": _curve(),
            "largest_exponent": max(exponents),
        }

    def check(self, numbers: Numbers) -> list[Check]:
        k1_std, finite, samples = numbers["k1_std"], numbers["finite"], numbers["samples"]
        k1_samples, k3_samples = (torch.tensor(samples[k], dtype=torch.float64) for k in ("k1", "k3"))
        variance = over_repeats(k1_samples[-1].square())
        off = abs(variance["mean"] - k1_std["closed"] ** 2) / variance["error"]
        growth, against_k1 = (over_repeats((k3_samples[-1] / x).log()) for x in (k3_samples[0], k1_samples[-1]))
        error = max(abs(a / b - 1) for a, b in zip(finite["quadrature"], finite["closed"], strict=True))
        return [
            within("k1's standard deviation, against closed form", k1_std["quadrature"], k1_std["closed"], EXACT),
            below("k3's variance for σ_q² > ½ is its closed form (largest relative error)", error, EXACT),
            *_condition(numbers["growth"]),
            below("k1's sampled variance is the exact one (|z|)", off, SIGNIFICANT),
            exceeds(f"k3's sample std grows from n = {samples['size'][0]} to {samples['size'][-1]}", growth),
            exceeds(f"and is above k1's at n = {samples['size'][-1]}", against_k1),
            _typical(samples),
            below("no exponent meets the estimators' cap", numbers["largest_exponent"], MAX_EXPONENT),
        ]

    def draw(self, numbers: Numbers, figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        samples = numbers["samples"]
        for name in ("k1", "k3"):
            table, look = torch.tensor(samples[name], dtype=torch.float64), style(name)
            low, high = (table.quantile(edge, -1) for edge in MIDDLE)
            left.fill_between(samples["size"], low, high, color=look["color"], alpha=0.2, linewidth=0)
            left.plot(samples["size"], table.median(-1).values, linewidth=2, marker=".", **look)
            left.axhline(PRINTED[name], color=BLACK, linestyle=":", linewidth=1)
            end, side = (0, "left") if name == "k3" else (-1, "right")
            at = (samples["size"][end], PRINTED[name])
            left.annotate(f"printed: {PRINTED[name]}", at, (0, 3), textcoords="offset points", ha=side)
        left.set(xscale="log", yscale="log", ylim=(0.2, 3000))
        left.set(xlabel="samples from q = N(0.1, 0.2²)", ylabel="sample standard deviation (nats)")
        left.set_title(f"{len(samples['k1'][0])} repeats", fontsize=10)
        right.set_title("exact", fontsize=10)
        left.legend(loc="upper left", fontsize=9, title="median, middle 95 %", alignment="left", title_fontsize=9)
        for name in ("k1", "k3"):
            curve = numbers["curve"][name]
            # Named by the legend on the left; one here would cover the ascent of k3.
            right.plot(curve["std"], curve["value"], linewidth=2, **{**style(name), "label": None})
        finite = numbers["finite"]
        stds = [v**0.5 for v in finite["quadrature"]]
        right.plot(finite["std"], stds, "o", color=BLACK, markerfacecolor="none", label="k3 by quadrature")
        right.axvspan(0.2, 0.5**0.5, color=GREY, alpha=0.2, linewidth=0)
        right.text(0.45, 1.35, "k3: infinite", ha="center")
        right.set(ylim=(0, 2.2), xlim=(0.2, 1.6), xlabel="σ_q (σ_p = 1)", ylabel="standard deviation (nats)")
        right.legend(loc="upper right", fontsize=9, handlelength=1)


def _grid(stds: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """z, (len(stds), POINTS), as far out as each σ_q allows; and σ_q, (len(stds), 1)."""
    std = torch.tensor(stds, dtype=torch.float64)[:, None]
    reach = (2 * EXPONENT_REACH / (1 - std.square()).clamp(min=1e-9)).sqrt().clamp(max=REACH)
    return reach * torch.linspace(-1, 1, POINTS, dtype=torch.float64), std


def _by_quadrature(estimator: Estimator, stds: tuple[float, ...], exponents: list[float]) -> list[float]:
    """Variance of an estimator's value under q, by the trapezoid rule, for each σ_q."""
    z, std = _grid(stds)
    value, density = estimator.value(_noted(log_ratio(z, std), exponents)), Normal(0.0, 1.0).log_prob(z).exp()
    mean = torch.trapezoid(density * value, z)
    return torch.trapezoid(density * (value - mean[:, None]).square(), z).tolist()


def _k1_variance(std: float) -> float:
    # l is quadratic in z: its linear term MEAN·std has variance its square, z²(std²-1)/2 twice its own.
    return (MEAN * std) ** 2 + (std**2 - 1) ** 2 / 2


def _k3_variance(std: float) -> float:
    """Closed form; finite for 2 std² > 1 only."""
    double = lambda x: torch.tensor(x, dtype=torch.float64)
    q, p = Normal(double(MEAN), double(std)), Normal(double(0.0), double(1.0))
    excess = 2 * std**2 - 1
    chi_square = std**2 / math.sqrt(excess) * math.exp(MEAN**2 / excess) - 1
    # k3 = l + (δ - 1) with E_q[δ l] = E_p[l] = -KL(p‖q): the covariance is minus the sum of both divergences.
    return (chi_square + _k1_variance(std) - 2 * (kl_divergence(p, q) + kl_divergence(q, p))).item()


def _growth_rate(stds: tuple[float, ...], exponents: list[float]) -> list[float]:
    """Rate at which the logarithm of the integrand k3² φ grows with z², at the end of the range.

    The integral over all z is finite if it is negative.
    """
    z, std = _grid(stds)
    # The mean over ±z removes what is odd in z; 0.8 and 1 times the reach are far enough out for δ to rule.
    ends = z[:, -1:] * torch.tensor([-1.0, -0.8, 0.8, 1.0], dtype=torch.float64)
    value = k3.value(_noted(log_ratio(ends, std), exponents))
    log_integrand = 2 * value.log() + Normal(0.0, 1.0).log_prob(ends)
    outer, inner = log_integrand[:, [0, 3]].mean(-1), log_integrand[:, [1, 2]].mean(-1)
    return ((outer - inner) / (ends[:, 3].square() - ends[:, 2].square())).tolist()


def _simulate(settings: Settings, exponents: list[float]) -> Numbers:
    """Sample standard deviations of k1 and k3 on the first n of each repeat's samples, for growing n."""
    sizes = [100, 1000, 10_000] + ([] if settings.quick else [100_000])
    generator = torch.Generator().manual_seed(settings.seed)
    z = torch.randn(settings.size(40, 30), sizes[-1], generator=generator, dtype=torch.float64)
    sampled = _noted(log_ratio(z, STD), exponents)
    values = {"k1": k1.value(sampled), "k3": k3.value(sampled)}
    return {"size": sizes, **{k: [v[:, :n].std(-1).tolist() for n in sizes] for k, v in values.items()}}


def _curve() -> Numbers:
    """Closed forms, for the drawing."""
    # Denser towards √½ = 0.7071, where the curve goes up without end.
    near, far = (torch.linspace(*ends, dtype=torch.float64) for ends in ((0.7085, 0.75, 25), (0.76, 1.6, 43)))
    stds = [*near.tolist(), *far.tolist()]
    everywhere = torch.linspace(0.2, 1.6, 71, dtype=torch.float64).tolist()
    return {
        "k3": {"std": stds, "value": [_k3_variance(std) ** 0.5 for std in stds]},
        "k1": {"std": everywhere, "value": [_k1_variance(std) ** 0.5 for std in everywhere]},
    }


def _noted(log_ratio: Tensor, exponents: list[float]) -> Tensor:
    """Append the largest exponent -l to `exponents`, and return the log-ratio unchanged."""
    exponents.append(-log_ratio.min().item())
    return log_ratio


def _condition(growth: Numbers) -> list[Check]:
    """The integrand of the second moment grows as exp(rate z²): rate = ½ - σ_q², in units of σ_p²."""
    expected = [0.5 - std**2 for std in growth["std"]]
    error = max(abs(a - b) for a, b in zip(growth["rate"], expected, strict=True))
    infinite = [std for std, rate in zip(growth["std"], growth["rate"], strict=True) if rate > 0]
    right_side = infinite == [std for std in growth["std"] if std**2 < 0.5]
    measured = f"grows up to σ_q = {max(infinite)}, of {growth['std']}" if infinite else "grows nowhere"
    return [
        below("k3's second moment has an integrand of rate ½ - σ_q² (largest error)", error, 1e-5),
        Check("so that its variance is infinite just where σ_q² < ½", measured, right_side),
    ]


def _typical(samples: Numbers) -> Check:
    """Whether at one sample size both printed values lie in the middle of the repeats."""
    claim = "both printed values lie in the middle 95 % of repeats, at one sample size"
    edges = torch.tensor(MIDDLE, dtype=torch.float64)
    fitting = []
    for i, n in enumerate(samples["size"]):
        bands = {k: torch.tensor(samples[k][i], dtype=torch.float64).quantile(edges).tolist() for k in PRINTED}
        if all(low <= PRINTED[k] <= high for k, (low, high) in bands.items()):
            fitting.append(f"n = {n}: " + ", ".join(f"{k} {low:.3g} to {high:.3g}" for k, (low, high) in bands.items()))
    return Check(claim, "; ".join(fitting) or "at none", bool(fitting))
