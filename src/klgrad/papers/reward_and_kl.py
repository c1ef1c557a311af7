"""Right answers as a function of the KL: what training runs with different KL terms have in common.

With a fixed coefficient the runs end at different KLs, and most of the difference in their rewards follows from that.
So arms are also compared by their distance from the curve of all other arms.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from .recorded_runs import Row, grouped, over_seeds

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-9
"""Relative, of a root that is the largest one of the points."""
DEGREE = 3
"""Of the polynomial in the root of the KL that is fitted to the right answers of all runs."""
RISE_PARAMETERS = 2
"""Of the curve of one arm, `rise_of`."""


def runs_of(last: list[Row], name_of: Callable[[Row], str]) -> list[dict[str, Any]]:
    """One point for each run."""
    return [
        {
            "name": name_of(row),
            "kl_coef": row["kl_coef"],
            "seed": row["seed"],
            "kl": float(row["kl_per_sequence"]),
            "correct_in": float(row["correct_in"]),
        }
        for row in last
    ]


def curve_of(last: list[Row], name_of: Callable[[Row], str]) -> dict[str, Any]:
    """The curve of all runs, what it explains, and how far each arm is from the curve of the others."""
    kl = torch.tensor([float(row["kl_per_sequence"]) for row in last], dtype=torch.float64)
    right = torch.tensor([float(row["correct_in"]) for row in last], dtype=torch.float64)
    weights = _fit(kl, right)
    rest = right - _powers(kl) @ weights
    own_error = torch.tensor([float(row["correct_in_se"]) for row in last], dtype=torch.float64)
    return {
        "weights": weights.tolist(),
        "explained": float(1 - rest.square().sum() / (right - right.mean()).square().sum()),
        "spread": float((rest.square().sum() / (len(rest) - len(weights))).sqrt()),
        "evaluation error": float(own_error.square().mean().sqrt()),
        "off": _distances(kl, right, [name_of(row) for row in last]),
    }


def points_of(rows: list[Row]) -> list[tuple[float, float]]:
    """KL and right answers of evaluations."""
    return [(float(row["kl_per_sequence"]), float(row["correct_in"])) for row in rows]


def rise_of(points: list[tuple[float, float]], start: float) -> tuple[float, float]:
    """The right answers of an arm as start + a √KL + b KL, fitted to its points; returns a and b.

    Args:
        points: KL and right answers of its evaluations.
        start: right answers before training, at a KL of 0.
    """
    gain = torch.tensor([value - start for _, value in points], dtype=torch.float64)
    slope, bend = torch.linalg.lstsq(_rising([kl for kl, _ in points]), gain[:, None]).solution[:, 0].tolist()
    return slope, bend


def right_at(points: list[tuple[float, float]], start: float, kl: float) -> float:
    """The right answers of an arm at a KL, by `rise_of`."""
    slope, bend = rise_of(points, start)
    return start + slope * kl**0.5 + bend * kl


def error_at(rows: list[Row], kl: float) -> float:
    """The standard error of `right_at` that comes from the errors of an arm's evaluations.

    A fit by least squares is linear in the right answers it is fitted to, so this is exact: the root of the summed
    squares of each evaluation's error times its weight in the fit at that KL. The KLs are taken as known.
    """
    own = torch.tensor([float(row["correct_in_se"]) for row in rows], dtype=torch.float64)
    fit = torch.linalg.pinv(_rising([float(row["kl_per_sequence"]) for row in rows]))
    return float((_rising([kl]) @ fit * own).norm())


def gap_at_equal_kl(own: list[Row], other: list[Row], start: float) -> dict[str, float] | None:
    """Right answers of an arm less those of another, seed by seed, at the largest KL that both have had.

    Both curves begin at a KL of 0, so that neither is extrapolated. A run whose KL does not rise from each evaluation
    to the next is left out: its right answers are no function of its KL.

    Args:
        own: the evaluations of an arm, without those before training.
        other: those of the arm that it is compared with.
        start: right answers before training.

    Returns:
        The difference, its error, the number of seeds that both arms have, and the mean KL; None without such a seed.
    """
    runs, others = (_away_from_ref(rows) for rows in (own, other))
    seeds = [seed for seed in runs if seed in others]
    if not seeds:
        return None
    found = [_gap(runs[seed], others[seed], start) for seed in seeds]
    gap = over_seeds(found, "gap")
    kl = over_seeds(found, "kl")["mean"]
    return {"difference": gap["mean"], "error": gap["error"], "seeds": gap["seeds"], "kl": kl}


def _away_from_ref(rows: list[Row]) -> dict[str, list[Row]]:
    """The runs by seed that have enough evaluations for `rise_of`, and a higher KL at each than at the one before."""
    found = {}
    for seed, run in grouped(rows, lambda row: row["seed"]).items():
        kls = [float(row["kl_per_sequence"]) for row in sorted(run, key=lambda row: int(row["update"]))]
        if len(run) >= RISE_PARAMETERS and all(before < after for before, after in pairwise(kls)):
            found[seed] = run
    return found


def _gap(run: list[Row], other: list[Row], start: float) -> Row:
    """The gap of one seed, as a row with the error of its evaluations."""
    kl = min(max(at for at, _ in points_of(rows)) for rows in (run, other))
    gap = right_at(points_of(run), start, kl) - right_at(points_of(other), start, kl)
    error = math.hypot(error_at(run, kl), error_at(other, kl))
    return {"gap": str(gap), "gap_se": str(error), "kl": str(kl)}


def kl_at(points: list[tuple[float, float]], start: float, right: float) -> float | None:
    """The KL at which an arm reaches a share of right answers, by `rise_of`.

    Args:
        points: KL and right answers of its evaluations.
        start: right answers before training.
        right: the share to reach.

    Returns:
        None if its points are all above the share, or if the fit does not reach it within their KLs.

    Example:
        >>> points = [(0.25, 0.2), (1.0, 0.3), (4.0, 0.5)]
        >>> round(kl_at(points, start=0.1, right=0.25), 6)
        0.5625
    """
    if min(value for _, value in points) > right:
        return None
    slope, bend = rise_of(points, start)
    inside = slope**2 + 4 * bend * (right - start)
    if inside < 0:
        return None
    # The smaller positive root of b x² + a x = gain, in the form that a small b does not spoil.
    root = 2 * (right - start) / (slope + inside**0.5)
    far = max(kl for kl, _ in points) ** 0.5
    return root**2 if 0 <= root <= far * (1 + ROUNDING) else None


def error_of_kl_at(rows: list[Row], start: float, kl: float) -> float:
    """The standard error of `kl_at`, to first order in the errors of an arm's evaluations.

    It is that of the right answers at this KL, divided by how fast they rise with the KL there.

    Args:
        rows: the evaluations of the arm.
        start: right answers before training.
        kl: what `kl_at` returns for them.
    """
    slope, bend = rise_of(points_of(rows), start)
    rise = slope + 2 * bend * kl**0.5  # with √KL; with the KL it is this divided by 2 √KL
    return error_at(rows, kl) * 2 * kl**0.5 / rise if rise > 0 else math.inf


def height(weights: list[float], kl: float) -> float:
    """The curve's right answers at a KL."""
    return sum(weight * kl ** (power / 2) for power, weight in enumerate(weights))


def _distances(kl: "Tensor", right: "Tensor", names: list[str]) -> dict[str, dict[str, float]]:
    off = {}
    for name in dict.fromkeys(names):
        own = torch.tensor([each == name for each in names])
        distance = right[own] - _powers(kl[own]) @ _fit(kl[~own], right[~own])
        off[name] = {"mean": float(distance.mean()), "error": float(distance.std() / len(distance) ** 0.5)}
    return off


def _rising(kls: list[float]) -> "Tensor":
    """What `rise_of` fits with: √KL and KL, one row for each."""
    root = torch.tensor(kls, dtype=torch.float64).sqrt()
    return torch.stack([root, root**2], -1)


def _powers(kl: "Tensor") -> "Tensor":
    return torch.stack([kl.sqrt() ** i for i in range(DEGREE + 1)], -1)


def _fit(kl: "Tensor", right: "Tensor") -> "Tensor":
    return torch.linalg.lstsq(_powers(kl), right[:, None]).solution[:, 0]
