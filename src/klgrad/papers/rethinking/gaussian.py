"""Between Gaussians k3's value has finite variance only if σ_q² > σ_p²/2; else its sample std grows with the sample.

The Gaussian example of Liu et al. (arXiv 2510.01555): policy q = N(0.1, 0.2²), reference p = N(0, 1), samples from q;
they print a sample standard deviation of 8.8244 for k3 and 0.6912 for k1 at a sample size they do not state. Finite
quantities are computed by quadrature and compared with their closed forms; an infinite one (k3's variance here) is
shown by the growth of its integrand and of sample standard deviations over many repeats. The other σ_q, the sizes and
the repeats are ours. The estimators cap their exponent at 30; every range stays below it, which is checked. The exact
standard deviation of k1 is 0.6791, so that the printed 0.6912 is itself a sampled number.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from ...core.estimators import MAX_EXPONENT, Estimator, k1, k3
from ...drawing import BLACK, GREY, style
from ..study import SIGNIFICANT, Check, Numbers, Settings, below, exceeds_zero, over_repeats, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
EXACT = 1e-9
MIDDLE = (0.025, 0.975)


def log_ratio(z: Tensor, std: Tensor | float) -> Tensor:
    """Log q/p at the point z standard deviations from q's mean."""
    x = MEAN + std * z
    return Normal(MEAN, std).log_prob(x) - Normal(0.0, 1.0).log_prob(x)


def run(settings: Settings) -> Numbers:
    """Exact variances, growth of the integrand of the second moment, and sample standard deviations."""
    exponents: list[float] = []
    return {
        "k1_std": {"quadrature": _by_quadrature(k1, (STD,), exponents)[0] ** 0.5, "closed": _k1_variance(STD) ** 0.5},
        "finite": {
            "std": list(FINITE),
            "quadrature": _by_quadrature(k3, FINITE, exponents),
            "closed": [_k3_variance(std) for std in FINITE],
        },
        "growth": {"std": list(EDGE), "rate": _growth(EDGE, exponents)},
        "samples": _simulate(settings, exponents),
        "curve": _curve(),
        "largest_exponent": max(exponents),
    }


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
    q, p = _normal(MEAN, std), _normal(0.0, 1.0)
    excess = 2 * std**2 - 1
    chi_square = std**2 / math.sqrt(excess) * math.exp(MEAN**2 / excess) - 1
    # k3 = l + (δ - 1) with E_q[δ l] = E_p[l] = -KL(p‖q): the covariance is minus the sum of both divergences.
    return (chi_square + _k1_variance(std) - 2 * (kl_divergence(p, q) + kl_divergence(q, p))).item()


def _normal(mean: float, std: float) -> Normal:
    return Normal(torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64))


def _growth(stds: tuple[float, ...], exponents: list[float]) -> list[float]:
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


def check(numbers: Numbers) -> list[Check]:
    """Exact values, the condition for a finite variance, the growth, and whether the printed values are typical."""
    k1_std, finite, samples = numbers["k1_std"], numbers["finite"], numbers["samples"]
    k1_samples, k3_samples = (torch.tensor(samples[k], dtype=torch.float64) for k in ("k1", "k3"))
    variance = over_repeats(k1_samples[-1].square())
    off = abs(variance["mean"] - k1_std["closed"] ** 2) / variance["error"]
    growth = (k3_samples[-1] / k3_samples[0]).log()
    against_k1 = (k3_samples[-1] / k1_samples[-1]).log()
    error = max(abs(a / b - 1) for a, b in zip(finite["quadrature"], finite["closed"], strict=True))
    return [
        within("k1's standard deviation, against closed form", k1_std["quadrature"], k1_std["closed"], EXACT),
        below("k3's variance for σ_q² > ½ is its closed form (largest relative error)", error, EXACT),
        *_condition(numbers["growth"]),
        below("k1's sampled variance is the exact one (|z|)", off, SIGNIFICANT),
        exceeds_zero(f"k3's sample std grows from n = {samples['size'][0]} to {samples['size'][-1]}", growth),
        exceeds_zero(f"and is above k1's at n = {samples['size'][-1]}", against_k1),
        _typical(samples),
        below("no exponent meets the estimators' cap", numbers["largest_exponent"], MAX_EXPONENT),
    ]


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


def draw(numbers: Numbers, figure: "Figure") -> None:
    """Left sample standard deviations against sample size, right exact ones against σ_q."""
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
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_ylim(0.2, 3000)
    left.set_title(f"{len(samples['k1'][0])} repeats", fontsize=10)
    right.set_title("exact", fontsize=10)
    left.set_xlabel("samples from q = N(0.1, 0.2²)")
    left.set_ylabel("sample standard deviation (nats)")
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
    right.set_ylim(0, 2.2)
    right.set_xlim(0.2, 1.6)
    right.set_xlabel("σ_q (σ_p = 1)")
    right.set_ylabel("standard deviation (nats)")
    right.legend(loc="upper right", fontsize=9, handlelength=1)
