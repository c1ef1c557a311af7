"""Recorded training runs: read from CSV files, averaged, and drawn."""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import ExperimentError
from .study import Axes, Check, Experiment, Numbers, Settings

if TYPE_CHECKING:
    from torch import Tensor


# Numbers of training runs on a GPU, from the CSV file that the experiment's script wrote, compared over seeds.
#
# Such a run takes minutes on a GPU, so a study reads the committed file. `klgrad reproduce --run` measures it again.

Row = dict[str, str]
SeedMean = dict[str, float]
"""A mean or a difference over seeds, with its error and the number of seeds."""

CHECKOUT = Path(__file__).parents[3]
"""The root of the repository, for a package that is not installed from a wheel."""
COMMITTED = Path(__file__).parent / "recorded"

arm_of, seed_of = itemgetter("arm"), itemgetter("seed")
"""Of a row."""
ENOUGH_SEEDS = 3
ENOUGH_ERRORS = 2.0
"""A difference between training runs counts beyond this many standard errors, from `ENOUGH_SEEDS` seeds on."""


def rows_of(experiment: Experiment, settings: Settings) -> list[Row]:
    """The rows that were measured here with `--run`, or else the committed ones."""
    folder = Path(settings.measured) if settings.measured else COMMITTED
    with (folder / experiment.file).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def provenance(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Versions, commits and dates of the measurements."""
    return {name: sorted({row[name] for row in rows}) for name in ("torch", "klgrad", "commit", "date")}


def over_seeds(rows: Sequence[Row], column: str) -> SeedMean:
    """Mean, standard error and number of seeds of one column.

    The error is the larger of two: that of the mean over seeds, and that of the evaluations (column `<column>_se`, if
    there is one). Two or three seeds may agree by chance, more closely than the evaluations can tell.

    Example:
        >>> rows = [{"right": "0.5", "right_se": "0.2"}, {"right": "0.5", "right_se": "0.2"}]
        >>> {name: round(x, 3) for name, x in over_seeds(rows, "right").items()}
        {'mean': 0.5, 'error': 0.141, 'seeds': 2}
    """
    values, n = [float(row[column]) for row in rows], len(rows)
    spread = stdev(values) / n**0.5 if n > 1 else 0.0  # one seed never counts
    own = sum(float(row.get(f"{column}_se") or 0) ** 2 for row in rows) ** 0.5 / n
    return {"mean": fmean(values), "error": max(spread, own), "seeds": n}


def at_start(rows: Iterable[Row], column: str) -> SeedMean:
    """One column before training, over seeds.

    All runs of a seed begin as one model on the same questions, so each seed has one value, that of its first run. Each
    seed has questions of its own.
    """
    by_seed = grouped(at_update(rows, 0), seed_of)
    return over_seeds([runs[0] for runs in by_seed.values()], column)


def pairs_by_seed(ones: Iterable[Row], others: Iterable[Row]) -> list[tuple[Row, Row]]:
    """The runs of two settings that have one seed; each setting has one row for a seed."""
    by_seed = {row["seed"]: row for row in others}
    return [(row, by_seed[row["seed"]]) for row in ones if row["seed"] in by_seed]


def gaps(pairs: Iterable[tuple[Row, Row]], column: str) -> list[Row]:
    """The first run of each pair less the second: a row with the seed, `gap`, and its error."""
    rows = []
    for one, other in pairs:
        error = math.hypot(*(float(row.get(f"{column}_se") or 0) for row in (one, other)))
        gap = float(one[column]) - float(other[column])
        rows.append({"seed": one["seed"], "gap": str(gap), "gap_se": str(error)})
    return rows


def gaps_by_seed(ones: Iterable[Row], others: Iterable[Row], column: str) -> list[Row]:
    """`gaps` of two settings, where both have a seed."""
    return gaps(pairs_by_seed(ones, others), column)


def paired_difference(pairs: Sequence[tuple[Row, Row]], column: str) -> SeedMean:
    """The first run of each pair less the second, where both have one seed; several experiments may have that seed.

    The error is the largest of three: that of the mean over pairs, that of the mean over seeds, which have questions of
    their own, and that of the evaluations.

    Example:
        >>> run = lambda seed, right: {"seed": seed, "right": right}
        >>> pairs = [(run("0", "0.5"), run("0", "0.3")), (run("1", "0.9"), run("1", "0.5"))]
        >>> {name: round(x, 3) for name, x in paired_difference(pairs, "right").items()}
        {'difference': 0.3, 'error': 0.1, 'seeds': 2}
    """
    rows = gaps(pairs, column)
    over_pairs = over_seeds(rows, "gap")
    seeds = grouped(rows, lambda gap: gap["seed"]).values()
    between = over_seeds([{"gap": str(over_seeds(group, "gap")["mean"])} for group in seeds], "gap")
    error = max(over_pairs["error"], between["error"])
    return {"difference": over_pairs["mean"], "error": error, "seeds": between["seeds"]}


def paired_if_run(ones: Iterable[Row], others: Iterable[Row], column: str) -> SeedMean | None:
    """`paired_difference` of two settings by seed; None if no seed has both."""
    pairs = pairs_by_seed(ones, others)
    return paired_difference(pairs, column) if pairs else None


def differences(
    claims: Mapping[str, tuple[str, str, str]],
    ends: Mapping[str, list[Row]],
    starts: Mapping[str, list[Row]] = MappingProxyType({}),
) -> dict[str, SeedMean | None]:
    """`paired_if_run` by claim.

    Args:
        claims: by claim a column, what should be higher and what should be lower: two settings, or a setting and
            `start`, which is the same runs before training.
        ends: the runs by setting after training.
        starts: the same before training.
    """
    side = lambda own, other: starts.get(other, []) if own == "start" else ends.get(own, [])
    return {
        claim: paired_if_run(side(high, low), side(low, high), column) for claim, (column, high, low) in claims.items()
    }


def excess_by_seed(ones: Iterable[Row], others: Iterable[Row], column: str) -> list[Row]:
    """By which share the first run of each seed is higher than the second: a row with `excess` and its error.

    Example:
        >>> run = lambda seed, kl: {"seed": seed, "kl": kl}
        >>> excess_by_seed([run("0", "1.5"), run("1", "3")], [run("0", "1.0")], "kl")
        [{'seed': '0', 'excess': '0.5', 'excess_se': '0.0'}]
    """
    rows = []
    for one, other in pairs_by_seed(ones, others):
        ratio = float(one[column]) / float(other[column])
        relative = (float(row.get(f"{column}_se") or 0) / float(row[column]) for row in (one, other))
        rows.append({"seed": one["seed"], "excess": str(ratio - 1), "excess_se": str(ratio * math.hypot(*relative))})
    return rows


def mean_of(rows: Sequence[Row], column: str) -> SeedMean | None:
    """The mean over seeds of a column that is a difference; None without a seed."""
    if not rows:
        return None
    summary = over_seeds(rows, column)
    return {"difference": summary["mean"], "error": summary["error"], "seeds": summary["seeds"]}


def counts(gap: SeedMean) -> bool:
    """Whether a difference is positive by the rule of these experiments."""
    return gap["seeds"] >= ENOUGH_SEEDS and gap["difference"] > ENOUGH_ERRORS * gap["error"]


def exceeds_over_seeds(claim: str, gap: SeedMean | None) -> Check:
    """Check that a difference is positive; undecided if neither it nor its opposite counts, or if runs are missing.

    Example:
        >>> exceeds_over_seeds("it learns more", {"difference": 0.3, "error": 0.1, "seeds": 3}).measured
        'by 0.3 ± 0.1, 3.0 standard errors, 3 seeds'
    """
    if gap is None:
        return undecided_without_runs(claim)
    errors = gap["difference"] / gap["error"] if gap["error"] else float("inf") * gap["difference"]
    by = f"by {gap['difference']:.2g} ± {gap['error']:.2g}"
    measured = f"{by}, {errors:.1f} standard errors, {gap['seeds']:g} seed{'s' * (gap['seeds'] != 1)}"
    differs = counts({**gap, "difference": abs(gap["difference"])})
    return Check(claim, measured, counts(gap), decided=differs, chance=chance_of(errors, gap["seeds"]))


exceeds_if_run = exceeds_over_seeds


def chance_of(errors: float, seeds: float) -> float | None:
    """How often chance alone takes a difference so many standard errors from its limit, to either side.

    By Student's t with a degree of freedom less than there are seeds. That is an upper bound: the error is at least
    that over seeds. None with one seed.

    Example:
        >>> round(chance_of(4.302653, 3), 6), round(chance_of(2.570582, 6), 6)
        (0.05, 0.05)
    """
    if seeds < 2 or math.isnan(errors):
        return None
    freedom = int(seeds) - 1  # the tail in closed form: Abramowitz and Stegun, 26.7.3 and 26.7.4
    angle = math.atan(abs(errors) / freedom**0.5)
    odd, cos = freedom % 2, math.cos(angle)
    term, total = (cos if odd else 1.0), 0.0
    for j in range(1 + odd, freedom, 2):
        total, term = total + term, term * cos**2 * j / (j + 1)
    inside = math.sin(angle) * total
    return 1 - ((angle + inside) * 2 / math.pi if odd else inside)


def undecided_without_runs(claim: str) -> Check:
    """The sentence of a claim whose runs have not been made, or have not reached their last update."""
    return undecided_without("runs", claim)


def undecided_without(what: str, claim: str) -> Check:
    """The sentence of a claim for which runs or measurements are missing."""
    return Check(claim, f"no value: {what} are missing", holds=False, decided=False, waits=True)


def collapse_if_run(claim: str, gap: SeedMean | None, horizon: str) -> Check:
    """Check that a run ends below its start; a run that has not done so yet does not contradict it.

    Args:
        claim: the sentence.
        gap: by how much the end is below the start.
        horizon: how long the runs are, and those of the paper.
    """
    judged = exceeds_over_seeds(claim, gap)
    if judged.verdict != "contradicted":
        return judged
    return replace(judged, measured=f"{judged.measured}; {horizon}", decided=False)


def equal_over_seeds(claim: str, gap: SeedMean | None, margin: float) -> Check:
    """Check that a difference is within a margin, by two standard errors; else, or without runs, it is undecided.

    Example:
        >>> equal_over_seeds("they agree", {"difference": 0.1, "error": 0.1, "seeds": 3}, margin=0.4).measured
        '0.1 ± 0.1, margin 0.4, 3 seeds'
    """
    return _below(claim, gap, "margin", margin, abs)


def below_if_run(claim: str, gap: SeedMean | None, limit: float) -> Check:
    """Check that a difference is below a limit, by two standard errors; else, or without runs, it is undecided.

    Example:
        >>> below_if_run("it costs little", {"difference": 0.1, "error": 0.1, "seeds": 3}, limit=0.4).measured
        '0.1 ± 0.1, limit 0.4, 3 seeds'
    """
    return _below(claim, gap, "limit", limit)


def _below(
    claim: str, gap: SeedMean | None, word: str, limit: float, of: Callable[[float], float] = lambda x: x
) -> Check:
    if gap is None:
        return undecided_without_runs(claim)
    value = of(gap["difference"])
    error, enough = ENOUGH_ERRORS * gap["error"], gap["seeds"] >= ENOUGH_SEEDS
    below, above = enough and value + error < limit, enough and value - error > limit
    seeds = f"{gap['seeds']:g} seed{'s' * (gap['seeds'] != 1)}"
    measured = f"{gap['difference']:.2g} ± {gap['error']:.2g}, {word} {limit:.2g}, {seeds}"
    errors = (limit - value) / gap["error"] if gap["error"] else math.inf
    return Check(claim, measured, below, decided=below or above, chance=chance_of(errors, gap["seeds"]))


def at_update(rows: Iterable[Row], update: int) -> list[Row]:
    """The rows of one evaluation."""
    return [row for row in rows if int(row["update"]) == update]


def grouped(rows: Iterable[Row], name_of: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Rows by name, in their order."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[name_of(row)].append(row)
    return dict(groups)


def by_setting(rows: Iterable[Row], name_of: Callable[[Row], str]) -> dict[str, list[Row]]:
    """The rows of one evaluation by setting.

    Raises:
        ExperimentError: a setting has two rows of one seed. Its mean would be one over runs that differ in something
            that its name does not have, such as the learning rate, and their number would be taken for one of seeds.
    """
    groups = grouped(rows, name_of)
    for name, group in groups.items():
        seed, number = Counter(row["seed"] for row in group).most_common(1)[0]
        if number > 1:
            raise ExperimentError(
                "one row for each setting, seed and update",
                f"{number} rows of the setting {name!r} with seed {seed}",
                "remove repeated runs from the file, or distinguish them in the study's name of a setting",
            )
    return groups


def summaries(
    rows: Iterable[Row], columns: Sequence[str], name_of: Callable[[Row], str]
) -> dict[str, dict[str, SeedMean]]:
    """`over_seeds` of several columns of one evaluation, by setting."""
    return {name: {c: over_seeds(group, c) for c in columns} for name, group in by_setting(rows, name_of).items()}


def paths(rows: Sequence[Row], column: str, name_of: Callable[[Row], str]) -> dict[str, dict[str, list[float]]]:
    """Mean and standard error of a column over updates, by setting."""
    curves: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"updates": [], "mean": [], "error": []})
    for update in sorted({int(row["update"]) for row in rows}):
        for name, group in by_setting(at_update(rows, update), name_of).items():
            here = over_seeds(group, column)
            curves[name]["updates"].append(update)
            curves[name]["mean"].append(here["mean"])
            curves[name]["error"].append(here["error"])
    return dict(curves)


# Right answers as a function of the KL: what training runs with different KL terms have in common.
#
# With a fixed coefficient the runs end at different KLs, and most of the difference in their rewards follows from that.
# So arms are also compared by their distance from the curve of all other arms.

ROUNDING = 1e-9
"""Relative, of a root that is the largest one of the points."""
DEGREE = 3
"""Of the polynomial in the root of the KL that is fitted to the right answers of all runs."""
RISE_PARAMETERS = 2
"""Of the curve of one arm, `rise_of`."""


def failures(rows: Iterable[Row], last: int, name_of: Callable[[Row], str]) -> dict[str, dict[str, int]]:
    """By setting its runs, those that collapsed, and those that stopped before the last update.

    A run has collapsed if it ends with fewer right answers than it began with. The weights of one that stopped were not
    finite; it has no part in any mean.
    """
    tallies = {}
    for name, group in grouped(rows, name_of).items():
        each = list(grouped(group, seed_of).values())
        ended = [run for run in each if at_update(run, last)]
        right = lambda run, update: float(at_update(run, update)[0]["correct_in"])
        collapsed = sum(right(run, last) < right(run, 0) for run in ended)
        tallies[name] = {"runs": len(each), "collapsed": collapsed, "stopped": len(each) - len(ended)}
    return tallies


def runs_of(last: list[Row], name_of: Callable[[Row], str]) -> list[Numbers]:
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


def curve_of(last: list[Row], name_of: Callable[[Row], str]) -> Numbers:
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
    gained = [_gap(runs[seed], others[seed], start) for seed in seeds]
    return (mean_of(gained, "gap") or {}) | {"kl": over_seeds(gained, "kl")["mean"]}


def _away_from_ref(rows: list[Row]) -> dict[str, list[Row]]:
    """The runs by seed that have enough evaluations for `rise_of`, and a higher KL at each than at the one before."""
    by_seed = {}
    for seed, run in grouped(rows, seed_of).items():
        kls = [float(row["kl_per_sequence"]) for row in sorted(run, key=lambda row: int(row["update"]))]
        if len(run) >= RISE_PARAMETERS and all(before < after for before, after in pairwise(kls)):
            by_seed[seed] = run
    return by_seed


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


# Recorded runs that distil a student by a KL alone: their measures.
#
# Each seed has questions of its own. The error of right answers is that of so many questions, if the seeds agree more
# closely. The KL on the teacher's completions has the error over seeds alone.

LAST = 40
OWN, TEACHERS, RIGHT = "kl_per_token", "forward_kl_per_token", "correct"
"""KL(student‖teacher) on the student's own completions, KL(teacher‖student) on the teacher's, and right answers."""
COLUMNS = (OWN, TEACHERS, RIGHT, "entropy_per_token", "length")
QUESTIONS = 182
"""Held-out questions of one evaluation."""
FIRST_SEED = "0"
"""The seed by whose runs the settings of an arm are chosen; the arm is judged by others."""

Name = TypeVar("Name")


def finite_rows(experiment: Experiment, settings: Settings) -> list[Row]:
    """The evaluations, without those of students that have diverged, and with the errors of right answers."""
    finite = (row for row in rows_of(experiment, settings) if all(math.isfinite(float(row[c])) for c in COLUMNS))
    return [{**row, f"{RIGHT}_se": _binomial_error(float(row[RIGHT]))} for row in finite]


def _binomial_error(share: float) -> str:
    return str((share * (1 - share) / QUESTIONS) ** 0.5)


def nearest(ends: Iterable[Row], name_of: Callable[[Row], Name]) -> dict[Name, Row]:
    """Of each name, the run of the first seed that ends nearest to the teacher on its own completions.

    Args:
        ends: the last evaluations of runs; those of other seeds and of students that diverged are passed over.
        name_of: what the runs are grouped by.
    """
    by_name: dict[Name, Row] = {}
    for row in ends:
        if row["seed"] == FIRST_SEED and math.isfinite(float(row[OWN])):
            best = by_name.setdefault(name_of(row), row)
            by_name[name_of(row)] = min(best, row, key=lambda each: float(each[OWN]))
    return by_name


# What the figures of several results draw.


def band(axis: Axes, at: Sequence[float], path: dict[str, list[float]], colour: str, alpha: float = 0.13) -> None:
    """A band of one standard error around a mean.

    Args:
        axis: where to draw it.
        at: the places of the means.
        path: lists under "mean" and "error".
        colour: of the band.
        alpha: its opacity.
    """
    pairs = list(zip(path["mean"], path["error"], strict=True))
    low, high = ([mean + sign * error for mean, error in pairs] for sign in (-1, 1))
    axis.fill_between(at, low, high, color=colour, alpha=alpha, lw=0)


def curve(axis: Axes, path: Numbers | None, colour: str, line: str = "-", alpha: float = 0.13, **look: Any) -> None:
    """Draw what `paths` has of a setting, with its `band`; nothing without it."""
    if path is not None:
        axis.plot(path["updates"], path["mean"], line, color=colour, **look)
        band(axis, path["updates"], path, colour, alpha)


def logarithmic(axis: Axes) -> None:
    """Make the y axis logarithmic, with small plain numbers at all its ticks."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.tick_params(which="both", axis="y", labelsize=8)
