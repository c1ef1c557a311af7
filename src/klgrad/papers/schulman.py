"""Between N(0, 1) and N(μ, 1), k1 is unbiased but noisy, k2 slightly biased but quiet, and k3 both unbiased and quiet.

The two tables of Schulman's "Approximating KL Divergence" (2020): bias and standard deviation of one sample, over the
true KL = μ²/2, for μ = 0.1 and 1. Samples come from q and the divergence is KL(q‖p) (the post's code has p = N(0, 1),
q = N(μ, 1) and ten million samples of q, its prose names the two means the other way round; with equal variances one is
the mirror image of the other and every number is the same). The numbers are quadratures through this package's
estimators, compared with closed forms, with the printed ones (to the printed digits, and the error of ten million
samples), and with a simulation of our own.
"""

import torch
from torch import Tensor
from torch.distributions import Normal

from ..core.estimators import k1, k2, k3
from ..drawing import BLACK, style
from .study import SIGNIFICANT, Check, Figure, Numbers, Settings, below

SOURCE = """Schulman, "Approximating KL Divergence", 2020."""
ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
MEANS = (0.1, 1.0)

PRINTED: dict[str, list[tuple[str, str]]] = {
    "k1": [("0", "20"), ("0", "2")],
    "k2": [("0.002", "1.42"), ("0.25", "1.73")],
    "k3": [("0", "1.42"), ("0", "1.7")],
}
"""Bias and standard deviation over the true KL at each of `MEANS`, as printed; the digits give the precision."""

PRINTED_SAMPLES = 10_000_000
REACH, POINTS = 12.0, 2401
"""Standard deviations of q that quadrature spans, and its nodes: the trapezoid rule is exact to rounding there."""

EXACT = 1e-9


def run(settings: Settings) -> Numbers:
    curve, samples = torch.linspace(0.05, 1.5, 59, dtype=torch.float64), settings.size(500_000, 100_000)
    return {
        "mean": list(MEANS),
        "quadrature": _relative(torch.tensor(MEANS, dtype=torch.float64)),
        "closed": _closed_forms(),
        "z": _simulate(samples, settings.seed),
        "samples": samples,
        "curve": {"mean": curve.tolist(), **_relative(curve)},
    }


def _log_ratio(z: Tensor, mean: Tensor) -> Tensor:
    """Log q/p at the point z from the mean of q = N(mean, 1)."""
    x = mean + z
    return Normal(mean, 1.0).log_prob(x) - Normal(0.0, 1.0).log_prob(x)


def _moments(mean: Tensor) -> dict[str, Tensor]:
    """By estimator: E_q[k] - KL(q‖p), Var_q[k] and the fourth central moment, (3, len(mean))."""
    z = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    density = Normal(0.0, 1.0).log_prob(z).exp()
    moments = {}
    for name, k in ESTIMATORS.items():
        value = k.value(_log_ratio(z, mean[:, None]))
        average = torch.trapezoid(density * value, z)
        central = (torch.trapezoid(density * (value - average[:, None]) ** power, z) for power in (2, 4))
        moments[name] = torch.stack([average - _true_kl(mean), *central])
    return moments


def _true_kl(mean: Tensor) -> Tensor:
    return mean.square() / 2


def _relative(mean: Tensor) -> Numbers:
    """Bias and standard deviation of each estimator in units of the true KL."""
    true = _true_kl(mean)
    return {
        name: {"bias": (bias / true).tolist(), "std": (second.sqrt() / true).tolist()}
        for name, (bias, second, _) in _moments(mean).items()
    }


def _closed_forms() -> Numbers:
    m = torch.tensor(MEANS, dtype=torch.float64)
    true = _true_kl(m)
    bias = {"k1": torch.zeros_like(m), "k2": m**4 / 8, "k3": torch.zeros_like(m)}
    variance = {"k1": m**2, "k2": m**4 / 2 + m**6 / 4, "k3": torch.expm1(m**2) - m**2}
    return {k: {"bias": (bias[k] / true).tolist(), "std": (variance[k].sqrt() / true).tolist()} for k in ESTIMATORS}


def _simulate(n: int, seed: int) -> Numbers:
    """z-scores of means and variances of n samples, with standard errors by quadrature."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.tensor(MEANS, dtype=torch.float64)
    log_ratio = _log_ratio(torch.randn(n, generator=generator, dtype=torch.float64), mean[:, None])
    moments = _moments(mean)
    scores = {}
    for name, k in ESTIMATORS.items():
        value, (bias, second, fourth) = k.value(log_ratio), moments[name]
        variance_error = ((fourth - second.square()) / n).sqrt()
        scores[name] = {
            "bias": ((value.mean(-1) - _true_kl(mean) - bias) / (second / n).sqrt()).tolist(),
            "variance": ((value.var(-1) - second) / variance_error).tolist(),
        }
    return scores


def check(numbers: Numbers) -> list[Check]:
    exact, closed, z = numbers["quadrature"], numbers["closed"], numbers["z"]
    entries = [(k, what, i) for k in ESTIMATORS for what in ("bias", "std") for i in range(len(MEANS))]
    error = max(abs(exact[k][what][i] - closed[k][what][i]) for k, what, i in entries)
    scores = [abs(score) for k in ESTIMATORS for by_mean in z[k].values() for score in by_mean]
    return [
        below("quadrature agrees with the closed forms (largest error, of the true KL)", error, EXACT),
        below(f"and with {numbers['samples']} samples (largest |z| of means and variances)", max(scores), SIGNIFICANT),
        *(_as_printed(exact[k], k, what, i) for k, what, i in entries),
    ]


def _as_printed(exact: Numbers, name: str, what: str, i: int) -> Check:
    """Whether a number is the printed one, up to its last digit and the error of the samples behind it."""
    printed = PRINTED[name][i][what == "std"]
    value = exact[what][i]
    # A printed 0 claims that there is no bias: it is compared with 0, not with a rounding to integers.
    rounding = 0.5 * 10 ** -len(printed.partition(".")[2]) if printed != "0" else EXACT
    # The post's biases are sample means, of error std/√n; a sampled std is far more exact than two digits.
    sampled = what == "bias" and printed != "0"
    sampling = SIGNIFICANT * exact["std"][i] / PRINTED_SAMPLES**0.5 if sampled else 0.0
    holds = abs(value - float(printed)) <= rounding + sampling
    return Check(f"{what}/true of {name} at μ = {MEANS[i]:g}", f"{value:.4g}, printed {printed}", holds)


def draw(numbers: Numbers, figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    curve = numbers["curve"]
    for axes, what in ((left, "std"), (right, "bias")):
        for name in ESTIMATORS:
            # k1 and k3 share a bias of 0: the wider line below stays visible.
            width = 4.5 if name == "k1" and what == "bias" else 2.0
            axes.plot(curve["mean"], curve[name][what], linewidth=width, **style(name))
            printed = [float(PRINTED[name][i][what == "std"]) for i in range(len(MEANS))]
            label = "printed" if name == "k3" else None
            axes.plot(numbers["mean"], printed, "o", color=BLACK, markerfacecolor="none", label=label)
        axes.set_xlabel("μ, KL = μ²/2 (nats)")
    left.set_yscale("log")
    left.set_yticks([1, 2, 5, 10, 20, 40], [str(tick) for tick in (1, 2, 5, 10, 20, 40)])
    left.minorticks_off()
    left.set_ylabel("standard deviation of one sample / true KL")
    right.set_ylabel("bias / true KL")
    left.legend(loc="upper right")
