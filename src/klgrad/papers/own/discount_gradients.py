"""Bias and variance of the gradients of `discount` at fixed weights, and whether they predict its training runs."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, pairwise

from ..recorded_runs import Row, counts, difference, grouped, rows_of, undecided_without
from ..study import Check, Experiment, Numbers, Settings, all_exceed

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


def gradients_of(settings: Settings) -> tuple[Numbers, list[Row]]:
    """Moments with their standard errors, by updates of the student and arm, and their rows; empty before any run."""
    try:
        rows = rows_of(GRADIENTS, settings)
    except FileNotFoundError:
        return {}, []
    by_student = grouped(rows, lambda row: row["update"])
    return {update: {row["arm"]: _moments(row) for row in group} for update, group in by_student.items()}, rows


def _moments(row: Row) -> Numbers:
    sizes = {"batches": int(row["batches"])}
    return sizes | {m: {"mean": _number(row[m]), "error": _number(row.get(f"{m}_se"))} for m in MOMENTS}


def _number(text: str | None) -> float | None:
    """None if there is no number, or none that is finite."""
    return float(text) if text and math.isfinite(float(text)) else None


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
            return undecided_without("measurements", claim)
        # As if independent; the arms share their batches, so the error of a difference is usually smaller.
        gaps.append((sides[0]["mean"] - sides[1]["mean"], math.hypot(sides[0]["error"], sides[1]["error"])))
    return all_exceed(claim, gaps)


def prediction_checks(gradients: Numbers, ends: dict[str, dict[str, float]]) -> Iterator[Check]:
    """Whether the gradient at the start orders the KLs at the end.

    Args:
        gradients: moments by student and arm.
        ends: KL after training, by size of the batch and arm.
    """
    losses = {"the squared bias + variance": squared_error, "the angle to the true gradient": one_minus_cosine}
    for name, loss in losses.items():
        claim = f"at the start, {name} of a batch's gradient orders the KLs at the end, on the student's completions"
        yield (
            _predicted(claim, gradients["0"], ends, loss)
            if "0" in gradients
            else undecided_without("measurements", claim)
        )


def _predicted(claim: str, at: Numbers, ends: dict[str, dict[str, float]], loss: Loss) -> Check:
    right, pairs = _ordered(at, ends, loss)
    enough, measured = pairs >= ENOUGH_PAIRS, f"{right} of {pairs} pairs of arms that differ"
    holds = enough and right >= PREDICTED * pairs
    return Check(claim, measured, holds, decided=holds or (enough and right <= CHANCE * pairs))


def squared_error(moments: Numbers, size: int) -> float:
    """The expected squared distance of the gradient of one batch from the true one."""
    return moments[BIAS]["mean"] + _variance(moments, size)


def one_minus_cosine(moments: Numbers, size: int) -> float:
    """For the angle between the gradient of one batch and the true one; Adam ignores the lengths of gradients."""
    norm = max(moments[NORM]["mean"], 0.0)
    return 1 - moments[COSINE]["mean"] * (norm / (norm + _variance(moments, size))) ** 0.5


def _variance(moments: Numbers, size: int) -> float:
    return moments[VARIANCE]["mean"] * BATCH / size


def _ordered(at: Numbers, ends: dict[str, dict[str, float]], loss: Loss) -> tuple[int, int]:
    """How many pairs of arms with batches of one size differ at the end, and how many of them as the loss says."""
    right = pairs = 0
    known = {arm: moments for arm, moments in at.items() if all(moments[m]["mean"] is not None for m in MOMENTS)}
    for one, other in combinations(ends, 2):
        (size, arm), (other_size, other_arm) = one.split(), other.split()
        gap = difference(ends[one], ends[other])
        differ = counts(gap) or counts({**gap, "difference": -gap["difference"]})
        if size == other_size and differ and arm in known and other_arm in known:
            pairs += 1
            right += (loss(known[arm], int(size)) > loss(known[other_arm], int(size))) == (gap["difference"] > 0)
    return right, pairs
