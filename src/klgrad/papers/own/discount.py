"""A discounted part of the sequence-level gradient brings a student nearer to its teacher on its own completions than
the token-level gradient does, but not on the teacher's completions.

A student with 20 of SmolLM2-135M's 30 layers is trained towards the whole model, with completions of fixed length, by
the exact KL with five discounts, with and without a leave-one-out baseline, and by k1 with three. Bias and variance of
the same gradients are measured at fixed weights, relative to the squared length of the sequence-level gradient. The
learning rate of every arm and size of a batch is the best of three with one seed, and three other seeds judge the arm.
Runs with one rate for all arms are shown and not judged. Design and limits: docs/experiments/distillation.md.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from ...drawing import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION
from .. import runs
from ..study import Axes, Check, Experiment, Figure, Numbers, Settings, exceeds

# The sweep of learning rates of `discount`, with one seed: it chooses the rate at which each arm is judged.

ARM = "{completions} {arm}"
"""Size of the batch, and arm."""
SWEEP = Experiment("discount_sweep.csv", "exp_discount.py", ("sweep",))
SHOWN = ("completions", "arm", "learning_rate", runs.OWN, f"{runs.OWN}_se", runs.TEACHERS, runs.RIGHT)
SHOWN += ("entropy_per_token", "distinct")


def best_rates(rows: Iterable[runs.Row]) -> dict[str, float]:
    """The rate at which each size of a batch and arm ends nearest, by the KL on the student's completions."""
    nearest = runs.nearest(runs.at_update(rows, runs.LAST), ARM)
    return {name: row["learning_rate"] for name, row in nearest.items()}


def at_all_rates(rows: Iterable[runs.Row]) -> list[Numbers]:
    """Every run of the sweep after its last update, and whether its rate is the best of its arm."""
    last = runs.at_update(rows, runs.LAST)
    best = best_rates(last)
    is_best = lambda row: best.get(ARM.format_map(row)) == row["learning_rate"]
    return [{name: row[name] for name in SHOWN} | {"best": is_best(row)} for row in last]


# Bias and variance of the gradients of `discount` at fixed weights, and whether they predict its training runs.

GRADIENTS = Experiment("gradient.csv", "exp_gradient.py")
BIAS, VARIANCE, NORM, COSINE = "relative_squared_bias", "relative_variance", "relative_squared_norm", "cosine"
MOMENTS = (BIAS, VARIANCE, NORM, COSINE)
STUDENTS = {"0": "at the start", "20": "after 20 updates"}
"""Updates of the student whose gradients are measured."""
BATCH = 256
"""Completions of a batch whose variance is measured; that of a smaller batch is larger in proportion."""
DISCOUNTED = {d: f"exact-{d}-leave-one-out" for d in ("0.5", "0.75", "0.9", "1")}
RISING = ("exact-0", *DISCOUNTED.values())
"""By their discounts."""
BASELINES = tuple((f"exact-{d}", arm) for d, arm in DISCOUNTED.items())
SAMPLED = (
    ("k1-0-leave-one-out", "exact-0"),
    *((f"k1-{d}-leave-one-out", DISCOUNTED[d]) for d in ("0.9", "1")),
)
PREDICTED = 0.75
"""A prediction holds if it orders at least this share of the pairs of arms that differ."""
CHANCE = 0.5
"""It is contradicted if it orders no more than this share."""
ENOUGH_PAIRS = 10

Loss = Callable[[Numbers, int], float]


def moments_of(rows: list[runs.Row]) -> Numbers:
    """Moments with their standard errors, by updates of the student and arm; None where there is no finite number."""
    known = lambda x: x if x is not None and math.isfinite(x) else None
    moments = lambda row: {m: {"mean": known(row[m]), "error": known(row[f"{m}_se"])} for m in MOMENTS}
    by_student = runs.grouped(rows, "{update}")
    return {
        update: {row["arm"]: {"batches": int(row["batches"]), **moments(row)} for row in group}
        for update, group in by_student.items()
    }


def gradient_checks(gradients: Numbers) -> Iterator[Check]:
    """What the discount and the baseline do to bias and variance, at each student."""
    falling = tuple(pairwise(RISING))
    rising = tuple((high, low) for low, high in falling)
    for update, when in STUDENTS.items():
        at = gradients.get(update, {})
        larger = lambda claim, moment, pairs, at=at, when=when: _all_larger(f"{when}, {claim}", at, moment, pairs)
        yield larger("leave-one-out lowers the variance at every discount", VARIANCE, BASELINES)
        yield larger("k1 has a larger variance than the exact KL at every discount", VARIANCE, SAMPLED)
        yield larger("the variance grows with the discount", VARIANCE, rising)
        yield larger("the squared bias falls with the discount", BIAS, falling)


def _all_larger(claim: str, at: Numbers, moment: str, pairs: Iterable[tuple[str, str]]) -> Check:
    """Check that the first arm of each pair has the larger moment; undecided if one has no value or no error."""
    gaps = []
    for pair in pairs:
        sides = [at[arm][moment] for arm in pair if arm in at]
        if len(sides) < 2 or any(None in side.values() for side in sides):
            return runs.undecided(claim, "measurements")
        # As if independent; the arms share their batches, so the error of a difference is usually smaller.
        error = math.hypot(sides[0]["error"], sides[1]["error"])
        gaps.append({"mean": sides[0]["mean"] - sides[1]["mean"], "error": error})
    return exceeds(claim, *gaps)


def prediction_checks(gradients: Numbers, apart: dict[str, runs.SeedMean]) -> Iterator[Check]:
    """Whether the gradient at the start orders the KLs at the end.

    Args:
        gradients: moments by student and arm.
        apart: the difference of two arms after training, by size of the batch and both arms.
    """
    losses = {"the squared bias + variance": squared_error, "the angle to the true gradient": one_minus_cosine}
    for name, loss in losses.items():
        claim = f"at the start, {name} of a batch's gradient orders the KLs at the end, on the student's completions"
        right, pairs = _ordered(gradients["0"], apart, loss)
        enough, measured = pairs >= ENOUGH_PAIRS, f"{right} of {pairs} pairs of arms that differ"
        holds = enough and right >= PREDICTED * pairs
        yield Check(claim, measured, holds, decided=holds or (enough and right <= CHANCE * pairs))


def squared_error(moments: Numbers, size: int) -> float:
    """The expected squared distance of the gradient of one batch from the true one."""
    return moments[BIAS]["mean"] + _variance(moments, size)


def one_minus_cosine(moments: Numbers, size: int) -> float:
    """For the angle between the gradient of one batch and the true one; Adam ignores the lengths of gradients."""
    norm = max(moments[NORM]["mean"], 0.0)
    return 1 - moments[COSINE]["mean"] * (norm / (norm + _variance(moments, size))) ** 0.5


def _variance(moments: Numbers, size: int) -> float:
    return moments[VARIANCE]["mean"] * BATCH / size


def _ordered(at: Numbers, apart: dict[str, runs.SeedMean], loss: Loss) -> tuple[int, int]:
    """How many pairs of arms differ at the end, and how many of them as the loss says."""
    right = pairs = 0
    known = {arm: moments for arm, moments in at.items() if all(moments[m]["mean"] is not None for m in MOMENTS)}
    for names, gap in apart.items():
        size, arm, other = names.split()
        if runs.differs(gap) and arm in known and other in known:
            pairs += 1
            right += (loss(known[arm], int(size)) > loss(known[other], int(size))) == (gap["mean"] > 0)
    return right, pairs


# The figure of `discount`: both KLs over the discount, each arm at its best rate; bias and variance of the gradient
# over the discount; and one KL over the other for every run of the sweep of rates.

DISCOUNTS = ("0", "0.5", "0.75", "0.9", "1")
X = range(len(DISCOUNTS))
KINDS = {
    "exact-{}": ("exact", BLACK, "o"),
    "exact-{}-leave-one-out": ("exact, leave-one-out", BLUE, "s"),
    "k1-{}-leave-one-out": ("k1, leave-one-out", GREEN, "^"),
}
"""Label, colour and mark of a kind of arm."""
SIZES = ("256", "64")
PANELS = {
    "kl_per_token": "KL(student‖teacher) per token,\non the student's completions",
    "forward_kl_per_token": "KL(teacher‖student) per token,\non the teacher's completions",
}
COLOURS = dict(zip(DISCOUNTS, (BLACK, GREEN, BLUE, ORANGE, VERMILION), strict=True))
"""Of a discount, in the panel of the sweep."""
MARKS = {("exact", "256"): "o", ("exact", "64"): "s", ("k1", "256"): "^", ("k1", "64"): "v"}
"""Of an estimator with a size of the batch, in that panel."""


def draw(numbers: Numbers, figure: Figure) -> None:
    """Means over seeds and over batches, with bars of one standard error; what has no runs is left out."""
    figure.set_size_inches(13, 8.8)
    (*axes, sweep), (*of_gradients, unused) = figure.subplots(2, len(PANELS) + 1)
    unused.remove()
    _rates(sweep, numbers["rates"], numbers["start"])
    for axis, (measure, title) in zip(axes, PANELS.items(), strict=True):
        for size in SIZES:
            end = {arm.partition(" ")[2]: x for arm, x in numbers["end"].items() if arm.startswith(f"{size} ")}
            _lines(axis, end, measure, " ", f", {size} completions", open_marks=size == "64")
        axis.set(title=f"{title}\n3 seeds, ± 1 SE", ylabel="nats, each arm at its best rate")
    for axis, (update, when) in zip(of_gradients, STUDENTS.items(), strict=True):
        moments = numbers["gradients"][update]
        _lines(axis, moments, VARIANCE, "-", "")
        _lines(axis, moments, BIAS, ":", None)
        batches = max(arm["batches"] for arm in moments.values())
        title = f"gradient {when}: variance (lines), squared\nbias (dotted); {batches} batches, ± 1 SE (jackknife)"
        axis.set(title=title, ylabel="relative to the squared true one")
    for axis in (*axes, *of_gradients):
        axis.set(xlabel="discount", xticks=X, xticklabels=DISCOUNTS)
        _logarithmic(axis)
        axis.title.set_fontsize(10)
    named = _named((*axes, *of_gradients))
    figure.legend(named.values(), named.keys(), ncols=len(KINDS), loc="outside lower center", fontsize=8.5)


def _logarithmic(axis: Axes) -> None:
    runs.logarithmic(axis)
    low, high = axis.get_ylim()
    if high > 10 * low:  # labels of all minor ticks would overlap
        axis.yaxis.get_minor_locator().set_params(subs=(2, 5))  # pyright: ignore[reportCallIssue]


def _rates(axis: Axes, rates: list[Numbers], start: Numbers) -> None:
    """Both KLs of every run of the sweep; the best rate of an arm is filled."""
    own, teachers = PANELS
    for run in rates:
        kind, discount = run["arm"].split("-")[:2]
        face = COLOURS[discount] if run["best"] else "none"
        axis.plot(run[own], run[teachers], MARKS[kind, run["completions"]], color=COLOURS[discount], mfc=face, ms=6)
    _logarithmic(axis)
    axis.axhline(start[teachers]["mean"], color=GREY, lw=1, ls=":")
    axis.text(1, start[teachers]["mean"], "before training", transform=axis.get_yaxis_transform(), fontsize=8,
              ha="right", va="bottom", color=GREY)  # fmt: skip
    discounts = {run["arm"].split("-")[1] for run in rates}
    shown = {f"discount {d}": ("o", COLOURS[d]) for d in DISCOUNTS if d in discounts}
    shown |= {f"{kind}, {size}": (mark, GREY) for (kind, size), mark in MARKS.items()}
    for label, (mark, colour) in shown.items():
        axis.plot([], [], mark, ms=5, label=label, color=colour)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside the points, which may be anywhere
    axis.set_title("one seed, three rates (filled: the best);\nboth KLs per token", fontsize=10)
    axis.set(xlabel="on the student's, nats", ylabel="on the teacher's, nats")


def _named(axes: Iterable[Axes]) -> Numbers:
    """The legend: the runs, and the kinds of arms of which gradients alone were measured."""
    handles: Numbers = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            if not any(f"{label}, {size} completions" in handles for size in SIZES):
                handles[label] = handle
    return handles


def _lines(axis: Axes, arms: Numbers, measure: str, line: str, suffix: str | None, *, open_marks: bool = False) -> None:
    """Marks and a line for each kind of arm, over the discounts; without a suffix it is not in the legend."""
    for pattern, (label, colour, mark) in KINDS.items():
        # Without a future the exact arm has no baseline: it begins both lines of the exact arms.
        names = ["exact-0" if d == "0" and pattern.startswith("exact") else pattern.format(d) for d in DISCOUNTS]
        run = {x: name for x, name in zip(X, names, strict=True) if name in arms}
        points = [arms[name][measure] for name in run.values()]
        # A logarithmic axis has no place for an estimated square that noise made negative.
        mean = [each["mean"] if (each.get("mean") or 0) > 0 else math.nan for each in points]
        own = [m for m, name in zip(mean, run.values(), strict=True) if name != "exact-0" or pattern == "exact-{}"]
        if not all(math.isnan(m) for m in own):
            # The earlier kind in front: the arm without a future is of the first.
            order = 3 - list(KINDS).index(pattern) / len(KINDS)
            look: Numbers = {"color": colour, "ms": 5, "lw": 1.4, "zorder": order}
            look |= {"mfc": "white"} if open_marks else {}
            look |= {} if suffix is None else {"label": label + suffix}
            at, error = [x + 0.1 * open_marks for x in run], [each.get("error") or 0 for each in points]
            axis.errorbar(at, mean, yerr=error, fmt=f"{mark}{line}", **look)


SEEDS = Experiment("discount.csv", SWEEP.script, ("seeds",))
EXPERIMENT = replace(SWEEP, also=(SEEDS, GRADIENTS))
"""The sweep first: the seeds have the rates that it finds."""
ONE_RATE = 0.0001
"""Of the runs with one rate for all arms, which are shown beside those at the best rates."""
LARGE, SMALL = "256", "64"
"""Completions of a batch. The first is where most sentences are judged."""
TOKEN, HALF, MOST, WHOLE = "exact-0", *(f"exact-{d}-leave-one-out" for d in ("0.5", "0.9", "1"))
OF_STUDENT, OF_TEACHER = "on the student's completions", "on the teacher's completions"
DISCOUNTED_IS_NEARER = f"a future discounted by 0.9 ends nearer than none, {OF_STUDENT}"
NEARER = {
    f"a future discounted by 0.5 ends nearer than none, {OF_STUDENT}": (runs.OWN, TOKEN, HALF),
    DISCOUNTED_IS_NEARER: (runs.OWN, TOKEN, MOST),
    f"the whole future ends nearer than none, {OF_STUDENT}": (runs.OWN, TOKEN, WHOLE),
    f"a future discounted by 0.9 ends nearer than the whole, {OF_STUDENT}": (runs.OWN, WHOLE, MOST),
    f"no future ends nearer than one discounted by 0.5, {OF_TEACHER}": (runs.TEACHERS, HALF, TOKEN),
    f"no future ends nearer than one discounted by 0.9, {OF_TEACHER}": (runs.TEACHERS, MOST, TOKEN),
    f"with discount 0.9, leave-one-out ends nearer than no baseline, {OF_STUDENT}": (runs.OWN, "exact-0.9", MOST),
    f"with the whole future, leave-one-out ends nearer than no baseline, {OF_STUDENT}": (runs.OWN, "exact-1", WHOLE),
    f"without a future, the exact KL ends nearer than k1, {OF_STUDENT}": (runs.OWN, "k1-0-leave-one-out", TOKEN),
    f"with the whole future, the exact KL ends nearer than k1, {OF_STUDENT}": (runs.OWN, "k1-1-leave-one-out", WHOLE),
}
"""A measure, the arm that should end farther from the teacher, and the one that should end nearer."""
AT_BOTH_SIZES = (DISCOUNTED_IS_NEARER, f"no future ends nearer than one discounted by 0.9, {OF_TEACHER}")
GAINS_LESS = f"a batch of 64 gains less than one of 256 by a future discounted by 0.9, {OF_STUDENT}"


def run(settings: Settings) -> Numbers:
    swept, rows = (runs.finite_rows(experiment, settings) for experiment in (SWEEP, SEEDS))
    measured = runs.rows_of(GRADIENTS, settings)
    best, last = best_rates(swept), runs.at_update(rows, runs.LAST)
    is_best = lambda row: row["seed"] != runs.FIRST_SEED and row["learning_rate"] == best.get(ARM.format_map(row))
    judged = [row for row in last if is_best(row)]
    by_name = runs.by_setting(judged, ARM)
    of = lambda size, arm: by_name.get(f"{size} {arm}", [])
    ahead = lambda size, column, farther, nearer: runs.gaps(of(size, farther), of(size, nearer), column)
    at_large, at_small = (ahead(size, *NEARER[DISCOUNTED_IS_NEARER]) for size in (LARGE, SMALL))
    return {
        "made": runs.provenance([*rows, *measured, *swept]),
        "start": {column: runs.at_start(rows, column) for column in runs.COLUMNS},
        "end": runs.summaries(judged, runs.COLUMNS, ARM),
        "one_rate": runs.summaries((row for row in last if row["learning_rate"] == ONE_RATE), runs.COLUMNS, ARM),
        "comparisons": {
            claim: {size: runs.over_seeds(ahead(size, *by), "gap") for size in (LARGE, SMALL)}
            for claim, by in NEARER.items()
        },
        "gains less": runs.difference(at_large, at_small, "gap"),
        # On the student's completions, of any two arms with batches of one size.
        "apart": {
            f"{one} {other.split()[1]}": runs.difference(by_name[one], by_name[other], runs.OWN)
            for one, other in combinations(by_name, 2)
            if one.split()[0] == other.split()[0]
        },
        "gradients": moments_of(measured),
        "rates": at_all_rates(swept),
    }


def check(numbers: Numbers) -> list[Check]:
    compared = numbers["comparisons"]
    gaps = {claim: at[LARGE] for claim, at in compared.items()}
    gaps |= {f"with batches of 64, {claim}": compared[claim][SMALL] for claim in AT_BOTH_SIZES}
    checks = [runs.exceeds_over_seeds(*each) for each in (gaps | {GAINS_LESS: numbers["gains less"]}).items()]
    return [*checks, *gradient_checks(numbers["gradients"]), *prediction_checks(numbers["gradients"], numbers["apart"])]
