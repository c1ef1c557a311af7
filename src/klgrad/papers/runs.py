"""Recorded training runs: read from CSV files, averaged, and drawn."""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ExperimentError
from .study import Axes, Check, Experiment, Numbers, Settings

if TYPE_CHECKING:
    from torch import Tensor

# Numbers of training runs on a GPU, from the CSV file that the experiment's script wrote, compared over seeds.
#
# Such a run takes minutes on a GPU, so a study reads the committed file. `klgrad reproduce --run` measures it again.

Row = dict[str, Any]
"""One evaluation of a run: labels are text, other columns are numbers, or None where the file has none."""
SeedMean = dict[str, float]
"""A mean over seeds under "mean", with its "error" and the number of "seeds"; that number is 0 without runs."""

CHECKOUT = Path(__file__).parents[3]
"""The root of the repository, for a package that is not installed from a wheel."""
COMMITTED = Path(__file__).parent / "recorded"

LABELS = {"job", "arm", "lag", "kl_coef", "division", "seed", "lengths", "stale", "trainer", "uses", "completions"}
LABELS |= {"schedule", "set", "temperature", "problem", "sample", "torch", "klgrad", "commit", "date"}
"""Columns that are text."""
ARM, SEED = "{arm}", "{seed}"
ENOUGH_SEEDS = 3
ENOUGH_ERRORS = 2.0
"""A difference between training runs counts beyond this many standard errors, from `ENOUGH_SEEDS` seeds on."""


def rows_of(experiment: Experiment, settings: Settings) -> list[Row]:
    """The rows that were measured here with `--run`, or else the committed ones."""
    return rows_in((Path(settings.measured) if settings.measured else COMMITTED) / experiment.file)


def rows_in(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{column: _cell(column, text) for column, text in row.items()} for row in csv.DictReader(file)]


def _cell(column: str, text: str) -> Any:
    if column in LABELS:
        return text
    return int(text) if column == "update" else float(text) if text else None


def provenance(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Versions, commits and dates of the measurements."""
    return {name: sorted({row[name] for row in rows}) for name in ("torch", "klgrad", "commit", "date")}


def at_update(rows: Iterable[Row], update: int) -> list[Row]:
    """The rows of one evaluation."""
    return [row for row in rows if row["update"] == update]


def grouped(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    """Rows by a name that is made of columns, such as `{arm} {lag}`, in their order."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[name.format_map(row)].append(row)
    return dict(groups)


def by_setting(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    """The rows of one evaluation by setting.

    Raises:
        ExperimentError: a setting has two rows of one seed. Its mean would be one over runs that differ in something
            that its name does not have, such as the learning rate, and their number would be taken for one of seeds.
    """
    groups = grouped(rows, name)
    for setting, group in groups.items():
        seed, number = Counter(row["seed"] for row in group).most_common(1)[0]
        if number > 1:
            raise ExperimentError(
                "one row for each setting, seed and update",
                f"{number} rows of the setting {setting!r} with seed {seed}",
                "remove repeated runs from the file, or distinguish them in the study's name of a setting",
            )
    return groups


def over_seeds(rows: Sequence[Row], column: str) -> SeedMean:
    """Mean, standard error and number of seeds of one column; several experiments may have runs of one seed.

    The error is the largest of three: that of the mean over runs, that of the mean over seeds, which have questions of
    their own, and that of the evaluations (column `<column>_se`, if there is one). Two or three seeds may agree by
    chance, more closely than the evaluations can tell.

    Example:
        >>> rows = [{"seed": seed, "right": 0.5, "right_se": 0.2} for seed in "01"]
        >>> {name: round(x, 3) for name, x in over_seeds(rows, "right").items()}
        {'mean': 0.5, 'error': 0.141, 'seeds': 2}
    """
    if not rows:
        return {"mean": math.nan, "error": math.nan, "seeds": 0}
    values = [row[column] for row in rows]
    of_seeds = [fmean(row[column] for row in own) for own in grouped(rows, SEED).values()]
    spread = max(stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0 for each in (values, of_seeds))
    own = math.hypot(*(row.get(f"{column}_se") or 0.0 for row in rows)) / len(rows)
    return {"mean": fmean(values), "error": max(spread, own), "seeds": len(of_seeds)}


def at_start(rows: Iterable[Row], column: str) -> SeedMean:
    """One column before training, over seeds.

    All runs of a seed begin as one model on the same questions, so each seed has one value, that of its first run. Each
    seed has questions of its own.
    """
    return over_seeds([runs[0] for runs in grouped(at_update(rows, 0), SEED).values()], column)


def summaries(rows: Iterable[Row], columns: Sequence[str], name: str) -> dict[str, dict[str, SeedMean]]:
    """`over_seeds` of several columns of one evaluation, by setting."""
    return {setting: {c: over_seeds(group, c) for c in columns} for setting, group in by_setting(rows, name).items()}


def paths(rows: Sequence[Row], column: str, name: str) -> dict[str, dict[str, list[float]]]:
    """Mean and standard error of a column over updates, by setting."""
    curves: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"updates": [], "mean": [], "error": []})
    for update in sorted({row["update"] for row in rows}):
        for setting, group in by_setting(at_update(rows, update), name).items():
            here = over_seeds(group, column)
            for key, value in (("updates", update), ("mean", here["mean"]), ("error", here["error"])):
                curves[setting][key].append(value)
    return dict(curves)


def gaps(ones: Iterable[Row], others: Iterable[Row], column: str, *, share: bool = False) -> list[Row]:
    """The first run of each seed less the second, or by which `share` it is higher: rows with `gap` and its error.

    Each setting has one row for a seed.

    Example:
        >>> run = lambda seed, kl: {"seed": seed, "kl": kl}
        >>> gaps([run("0", 1.5), run("1", 3.0)], [run("0", 1.0)], "kl")
        [{'seed': '0', 'gap': 0.5, 'gap_se': 0.0}]
    """
    rows, by_seed, error = [], {row["seed"]: row for row in others}, f"{column}_se"
    for one in (row for row in ones if row["seed"] in by_seed):
        sides = (one, by_seed[one["seed"]])
        (own, other), errors = (side[column] for side in sides), [side.get(error) or 0.0 for side in sides]
        gap, gap_se = own - other, math.hypot(*errors)
        if share:
            gap, gap_se = own / other - 1, own / other * math.hypot(errors[0] / own, errors[1] / other)
        rows.append({"seed": one["seed"], "gap": gap, "gap_se": gap_se})
    return rows


def difference(ones: Iterable[Row], others: Iterable[Row], column: str) -> SeedMean:
    """One setting less another, seed by seed."""
    return over_seeds(gaps(ones, others, column), "gap")


def excess(ones: Iterable[Row], others: Iterable[Row], column: str) -> SeedMean:
    """The share by which one setting is higher than another, seed by seed."""
    return over_seeds(gaps(ones, others, column, share=True), "gap")


def differences(
    claims: Mapping[str, tuple[str, str, str]], ends: Mapping[str, list[Row]], starts: Mapping[str, list[Row]]
) -> dict[str, SeedMean]:
    """`difference` by claim, which has a column, what should be higher and what should be lower.

    Either may be `start`: the runs of the other before training.
    """
    side = lambda own, other: starts.get(other, []) if own == "start" else ends.get(own, [])
    return {
        claim: difference(side(high, low), side(low, high), column) for claim, (column, high, low) in claims.items()
    }


# Sentences about differences.


def counts(gap: SeedMean, sign: int = 1) -> bool:
    """Whether a difference is positive, or negative with a sign of -1, by the rule of these experiments."""
    return gap["seeds"] >= ENOUGH_SEEDS and sign * gap["mean"] > ENOUGH_ERRORS * gap["error"]


def differs(gap: SeedMean) -> bool:
    """Whether a difference of either sign counts."""
    return counts(gap) or counts(gap, -1)


def exceeds_over_seeds(claim: str, gap: SeedMean) -> Check:
    """Check that a difference is positive; undecided if neither it nor its opposite counts, or if runs are missing.

    Example:
        >>> exceeds_over_seeds("it learns more", {"mean": 0.3, "error": 0.1, "seeds": 3}).measured
        'by 0.3 ± 0.1, 3.0 standard errors, 3 seeds'
    """
    if not gap["seeds"]:
        return undecided(claim)
    errors = gap["mean"] / gap["error"] if gap["error"] else math.inf * gap["mean"]
    measured = f"by {gap['mean']:.2g} ± {gap['error']:.2g}, {errors:.1f} standard errors, {_seeds(gap)}"
    return Check(claim, measured, counts(gap), decided=differs(gap), chance=chance_of(errors, gap["seeds"]))


def _seeds(gap: SeedMean) -> str:
    return f"{gap['seeds']:g} seed{'s' * (gap['seeds'] != 1)}"


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


def undecided(claim: str, what: str = "runs") -> Check:
    """The sentence of a claim for which runs or measurements have not been made, or have not reached their end."""
    return Check(claim, f"no value: {what} are missing", holds=False, decided=False, waits=True)


def collapses(claim: str, gap: SeedMean, horizon: str) -> Check:
    """Check by how much runs end below their start; those that have not yet done so do not contradict it."""
    judged = exceeds_over_seeds(claim, gap)
    later = replace(judged, measured=f"{judged.measured}; {horizon}", decided=False)
    return later if judged.verdict == "contradicted" else judged


def equal_over_seeds(claim: str, gap: SeedMean, margin: float) -> Check:
    """Check that a difference is within a margin, by two standard errors; else, or without runs, it is undecided.

    Example:
        >>> equal_over_seeds("they agree", {"mean": 0.1, "error": 0.1, "seeds": 3}, margin=0.4).measured
        '0.1 ± 0.1, margin 0.4, 3 seeds'
    """
    return _below(claim, gap, "margin", margin, abs)


def below_over_seeds(claim: str, gap: SeedMean, limit: float) -> Check:
    """Check that a difference is below a limit, by two standard errors; else, or without runs, it is undecided.

    Example:
        >>> below_over_seeds("it costs little", {"mean": 0.1, "error": 0.1, "seeds": 3}, limit=0.4).measured
        '0.1 ± 0.1, limit 0.4, 3 seeds'
    """
    return _below(claim, gap, "limit", limit)


def _below(claim: str, gap: SeedMean, word: str, limit: float, of: Callable[[float], float] = float) -> Check:
    if not gap["seeds"]:
        return undecided(claim)
    less = {**gap, "mean": limit - of(gap["mean"])}
    measured = f"{gap['mean']:.2g} ± {gap['error']:.2g}, {word} {limit:.2g}, {_seeds(gap)}"
    errors = less["mean"] / gap["error"] if gap["error"] else math.inf
    return Check(claim, measured, counts(less), decided=differs(less), chance=chance_of(errors, gap["seeds"]))


# Right answers as a function of the KL: what training runs with different KL terms have in common.
#
# With a fixed coefficient the runs end at different KLs, and most of the difference in their rewards follows from that.
# So arms are also compared by their distance from the curve of all other arms.

FAR, RIGHT_IN = "kl_per_sequence", "correct_in"
ROUNDING = 1e-9
"""Relative, of a root that is the largest one of the points."""
DEGREE = 3
"""Of the polynomial in the root of the KL that is fitted to the right answers of all runs."""
RISE_PARAMETERS = 2
"""Of the curve of one arm, `Rise`."""


def failures(rows: Iterable[Row], last: int, name: str) -> dict[str, dict[str, int]]:
    """By setting its runs, those that collapsed, and those that stopped before the last update.

    A run has collapsed if it ends with fewer right answers than it began with. The weights of one that stopped were not
    finite; it has no part in any mean.
    """
    tallies = {}
    for setting, group in grouped(rows, name).items():
        right = [{row["update"]: row[RIGHT_IN] for row in run} for run in grouped(group, SEED).values()]
        ended = [run for run in right if last in run]
        collapsed = sum(run[last] < run[0] for run in ended)
        tallies[setting] = {"runs": len(right), "collapsed": collapsed, "stopped": len(right) - len(ended)}
    return tallies


def points_of(rows: Iterable[Row], name: str) -> list[Numbers]:
    """One point for each evaluation, with its setting."""
    columns = {"kl_coef": "kl_coef", "seed": "seed", "kl": FAR, RIGHT_IN: RIGHT_IN}
    return [{"name": name.format_map(row)} | {key: row[c] for key, c in columns.items()} for row in rows]


def curve_of(last: list[Row], name: str) -> Numbers:
    """The curve of all runs, what it explains, and how far each arm is from the curve of the others."""
    kl, right, own_error = (_column(last, column) for column in (FAR, RIGHT_IN, f"{RIGHT_IN}_se"))
    weights = _fit(kl, right)
    rest = right - _powers(kl) @ weights
    names = [name.format_map(row) for row in last]
    off = {}
    for arm in dict.fromkeys(names):
        own = torch.tensor([each == arm for each in names])
        distance = right[own] - _powers(kl[own]) @ _fit(kl[~own], right[~own])
        off[arm] = {"mean": float(distance.mean()), "error": float(distance.std() / len(distance) ** 0.5)}
    return {
        "weights": weights.tolist(),
        "explained": float(1 - rest.square().sum() / (right - right.mean()).square().sum()),
        "spread": float((rest.square().sum() / (len(rest) - len(weights))).sqrt()),
        "evaluation error": float(own_error.square().mean().sqrt()),
        "off": off,
    }


def _column(rows: Iterable[Row], column: str) -> "Tensor":
    return torch.tensor([row[column] for row in rows], dtype=torch.float64)


def _powers(kl: "Tensor") -> "Tensor":
    return torch.stack([kl.sqrt() ** i for i in range(DEGREE + 1)], -1)


def _fit(kl: "Tensor", right: "Tensor") -> "Tensor":
    return torch.linalg.lstsq(_powers(kl), right[:, None]).solution[:, 0]


class Rise:
    """The right answers of an arm as start + a √KL + b KL, fitted to its evaluations by least squares.

    A fit by least squares is linear in the right answers it is fitted to, so the errors of the evaluations give that of
    the curve exactly. The KLs are taken as known.

    Args:
        rows: evaluations, without those before training.
        start: right answers before training, at a KL of 0.
    """

    def __init__(self, rows: Sequence[Row], start: float) -> None:
        self.start = start
        self.kl, self.reached, self.own = (_column(rows, column) for column in (FAR, RIGHT_IN, f"{RIGHT_IN}_se"))
        self.fit = torch.linalg.pinv(torch.stack([self.kl.sqrt(), self.kl], -1))
        self.slope, self.bend = (self.fit @ (self.reached - start)).tolist()

    def right(self, kl: float) -> float:
        """The right answers at a KL."""
        return self.start + self.slope * kl**0.5 + self.bend * kl

    def error(self, kl: float) -> float:
        """The standard error of `right`."""
        return float((torch.tensor([kl**0.5, kl], dtype=torch.float64) @ self.fit * self.own).norm())

    def kl_of(self, right: float) -> float | None:
        """The KL at which a share of right answers is reached.

        None if all evaluations are above the share, or if the fit does not reach it within their KLs.
        """
        inside = self.slope**2 + 4 * self.bend * (right - self.start)
        if inside < 0 or self.reached.min() > right:
            return None
        # The smaller positive root of b x² + a x = gain, in the form that a small b does not spoil.
        root = 2 * (right - self.start) / (self.slope + inside**0.5)
        return root**2 if 0 <= root <= float(self.kl.max()) ** 0.5 * (1 + ROUNDING) else None

    def error_of_kl(self, kl: float) -> float:
        """The standard error of `kl_of`, to first order: that of `right` over how fast the curve rises there."""
        rise = self.slope + 2 * self.bend * kl**0.5  # with √KL; with the KL it is this divided by 2 √KL
        return self.error(kl) * 2 * kl**0.5 / rise if rise > 0 else math.inf


def gap_at_equal_kl(own: list[Row], other: list[Row], start: float) -> SeedMean:
    """Right answers of an arm less those of another, seed by seed, at the largest KL that both have had.

    Both curves begin at a KL of 0 with the right answers of the start, so that neither is extrapolated. A run whose KL
    does not rise from each evaluation to the next is left out: its right answers are no function of its KL. The mean KL
    of the seeds that both arms have is under "kl".
    """
    runs, others = (
        {seed: Rise(run, start) for seed, run in grouped(rows, SEED).items() if _rises(run)} for rows in (own, other)
    )
    rows = []
    for seed, run, another in ((seed, run, others[seed]) for seed, run in runs.items() if seed in others):
        kl = float(min(run.kl.max(), another.kl.max()))
        error = math.hypot(run.error(kl), another.error(kl))
        rows.append({"seed": seed, "gap": run.right(kl) - another.right(kl), "gap_se": error, "kl": kl})
    return over_seeds(rows, "gap") | {"kl": over_seeds(rows, "kl")["mean"]}


def _rises(run: list[Row]) -> bool:
    """Whether a run has enough evaluations for `Rise`, and a higher KL at each than at the one before."""
    kls = [row[FAR] for row in sorted(run, key=lambda row: row["update"])]
    return len(run) >= RISE_PARAMETERS and all(before < after for before, after in pairwise(kls))


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


def finite_rows(experiment: Experiment, settings: Settings) -> list[Row]:
    """The evaluations, without those of students that have diverged, and with the errors of right answers."""
    error = lambda share: (share * (1 - share) / QUESTIONS) ** 0.5
    rows = rows_of(experiment, settings)
    return [{**row, f"{RIGHT}_se": error(row[RIGHT])} for row in rows if all(math.isfinite(row[c]) for c in COLUMNS)]


def nearest(ends: Iterable[Row], name: str) -> dict[str, Row]:
    """Of each name, the run of the first seed that ends nearest to the teacher on its own completions.

    Students that diverged are passed over.
    """
    ended = (row for row in ends if row["seed"] == FIRST_SEED and math.isfinite(row[OWN]))
    return {each: min(rows, key=lambda row: row[OWN]) for each, rows in grouped(ended, name).items()}


# What the figures of several results draw.


def curve(axis: Axes, path: Numbers | None, colour: str, line: str = "-", alpha: float = 0.13, **look: Any) -> None:
    """Draw what `paths` has of a setting, with a band of one standard error; nothing without it."""
    if path is not None:
        axis.plot(path["updates"], path["mean"], line, color=colour, **look)
        pairs = list(zip(path["mean"], path["error"], strict=True))
        low, high = ([mean + sign * error for mean, error in pairs] for sign in (-1, 1))
        axis.fill_between(path["updates"], low, high, color=colour, alpha=alpha, lw=0)


def over_kl(axis: Axes, curve: Numbers, points: list[Numbers]) -> None:
    """Draw what `curve_of` has found, up to the farthest of some points, and label the axis."""
    far = max(point["kl"] for point in points)
    at = [far * i / 100 for i in range(1, 101)]
    axis.plot(at, [sum(w * x ** (i / 2) for i, w in enumerate(curve["weights"])) for x in at], color="black", lw=1)
    axis.set(xlabel="KL(π‖ref) per completion, nats")


def logarithmic(axis: Axes) -> None:
    """Make the y axis logarithmic, with small plain numbers at all its ticks."""
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.tick_params(which="both", axis="y", labelsize=8)
