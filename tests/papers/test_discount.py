"""What the study of the discount concludes from made-up runs and gradients, and from too few of them."""

import re
from itertools import product

import numpy as np
import pytest
from matplotlib.figure import Figure
from papers.made_up_runs import MADE, evaluations, judged, near, write

from klgrad.papers.own import discount as study
from klgrad.papers.own.discount import MOMENTS, one_minus_cosine, squared_error

BASELINE = "-leave-one-out"
ARMS = [f"exact-{d}" for d in ("0", "0.5", "0.75", "0.9", "1")]
ARMS += [f"{arm}{BASELINE}" for arm in (*ARMS[1:], "k1-0", "k1-0.9", "k1-1")]


def parts(arm):
    """Discount, whether it has no baseline, and whether it is k1."""
    kind, discount = arm.split("-")[:2]
    return float(discount), arm.count("-") == 1, kind == "k1"


def runs(sign=1.0, rate="0.0003", **how):
    """The own KL falls up to a discount of 0.9 and has a cost of sampling; the teacher's rises with the discount."""
    how = {"first": 1, **how}
    found = []
    for arm, size in product(ARMS, (256, 64)):
        discount, plain, sampled = parts(arm)
        gain = 0.3 * min(discount, 0.9) - 0.1 * (discount == 1) - 0.1 * discount * plain - 0.2 * sampled
        gain -= 0.1 * discount * (size == 64)
        label = {"arm": arm, "completions": size, "learning_rate": rate}
        found += evaluations(label, 1 - sign * gain, 3 + sign * 2 * discount, **how)
    return found


def swept():
    """One seed of every arm at two rates, at three for the larger batch: the middle one is best by the own KL alone."""
    found = []
    rates = [(64, "1e-4", 1.0), (64, "3e-4", 0.8), (256, "1e-4", 1.0), (256, "3e-4", 0.8), (256, "6e-4", 0.9)]
    for (size, rate, own), arm in product(rates, ARMS):
        label = {"arm": arm, "completions": size, "learning_rate": rate, "distinct": 182.0}
        found += evaluations(label, own, 4 / own, seeds=1, noise=0.0)
    return found


def gradients(variance=1.0, bias=1.0, **changed):
    """Bias falls and variance grows with the discount; k1 and a missing baseline add variance."""
    found = []
    for update, arm in product((0, 20), ARMS):
        discount, plain, sampled = parts(arm)
        spread = 0.1 + variance * (0.2 * discount + 0.3 * discount * plain + 0.5 * sampled)
        squared = bias * 0.5 * (1 - discount) ** 2
        moments = dict(zip(MOMENTS, (squared, spread, 1 - squared, 1 - squared / 2), strict=True))
        errors = {f"{name}_se": 0.0001 for name in MOMENTS}
        found.append({"update": update, "arm": arm, "batches": 64, **moments, **errors, **MADE, **changed})
    return found


def written(folder, **files):
    """The settings that read these files, and those above where none are given."""
    return write(folder, **{"discount": runs(), "discount_sweep": swept(), "gradient": gradients(), **files})


def ends(folder, **files):
    """The means by which the arms are judged."""
    return study.run(written(folder, **files))["end"]


def verdicts(folder, **files):
    return judged(study, written(folder, **files))


def about_gradients(found):
    return {claim: verdict for claim, verdict in found.items() if claim.startswith(("at the start", "after 20"))}


def about_runs(found):
    return {claim: verdict for claim, verdict in found.items() if claim not in about_gradients(found)}


@pytest.mark.parametrize(
    ("sign", "variance", "bias", "of_runs", "of_gradients"),
    [
        (1.0, 1.0, 1.0, "holds", "holds"),
        (-1.0, 1.0, 1.0, "contradicted", "holds"),
        (1.0, -0.1, -1.0, "holds", "contradicted"),
    ],
    ids=["as claimed", "opposite runs", "opposite gradients"],
)
def test_the_opposite_runs_or_gradients_give_the_opposite_verdict(
    sign, variance, bias, of_runs, of_gradients, tmp_path
):
    found = verdicts(tmp_path, discount=runs(sign), gradient=gradients(variance, bias))
    assert list(about_runs(found).values()) == [of_runs] * 13
    assert len(about_gradients(found)) == 10
    assert list(about_gradients(found).values())[:8] == [of_gradients] * 8


@pytest.mark.parametrize(("sign", "expected"), [(1, "holds"), (-1, "contradicted")])
def test_a_gradient_predicts_the_runs_if_its_error_orders_them(tmp_path, sign, expected):
    """Here the KL at the end is a function of the squared error, or of its negative."""
    moments = {row["arm"]: {m: {"mean": row[m]} for m in MOMENTS} for row in gradients()}
    made = []
    for arm, size in product(ARMS, (256, 64)):
        own = 1 + 0.2 * sign * squared_error(moments[arm], size)
        label = {"arm": arm, "completions": size, "learning_rate": "0.0003"}
        made += evaluations(label, own, 3.0, noise=0.0001, first=1)
    for row in made:
        row["kl_per_token_se"] = 0.0
    found = verdicts(tmp_path, discount=made)
    assert next(verdict for claim, verdict in found.items() if "squared bias + variance" in claim) == expected


def test_a_smaller_batch_has_a_larger_variance_and_the_same_bias():
    values = dict(zip(MOMENTS, (0.5, 0.25, 1.0, 0.8), strict=True))
    moments = {name: {"mean": value} for name, value in values.items()}
    assert (squared_error(moments, 256), squared_error(moments, 64)) == (0.75, 1.5)
    assert one_minus_cosine(moments, 64) == pytest.approx(1 - 0.8 / 2**0.5, rel=1e-12)


@pytest.mark.parametrize("change", [{"relative_variance_se": ""}, {"relative_variance_se": "nan"}])
def test_a_moment_without_an_error_decides_nothing(tmp_path, change):
    found = about_gradients(verdicts(tmp_path, gradient=gradients(**change)))
    undecided = {claim for claim, verdict in list(found.items())[:8] if verdict == "undecided"}
    assert undecided == {claim for claim in found if re.search("variance (at|grows)|larger variance", claim)}


def test_runs_of_the_seed_that_chose_the_rate_do_not_count(tmp_path):
    more = runs(sign=-1.0, seeds=1, first=0)
    assert ends(tmp_path, discount=[*more, *runs()]) == ends(tmp_path)
    assert set(about_runs(verdicts(tmp_path, discount=[*more, *runs(seeds=2)])).values()) == {"undecided"}


def test_runs_at_another_rate_than_the_best_do_not_count(tmp_path):
    others = [row for rate in ("0.0001", "6e-4") for row in runs(sign=-1.0, rate=rate)]
    assert ends(tmp_path, discount=[*others, *runs()]) == ends(tmp_path)
    assert ends(tmp_path, discount=others) == {}
    assert set(about_runs(verdicts(tmp_path, discount=others)).values()) == {"undecided"}


def test_each_arm_and_size_has_a_best_rate_of_its_own(tmp_path):
    """Here the rate that is best for the others is far off for one arm with batches of 64."""
    one, made = ("64", "exact-0.9-leave-one-out"), swept()
    for row in made:
        if (str(row["completions"]), row["arm"]) == one and row["learning_rate"] == "3e-4" and row["update"]:
            row["kl_per_token"] = 9.0
    found = ends(tmp_path, discount_sweep=made, discount=[*runs(), *runs(sign=-1.0, rate="1e-4")])
    at_others, at_its_own = (ends(tmp_path, discount=runs(sign)) for sign in (1.0, -1.0))
    assert found == {**at_others, " ".join(one): at_its_own[" ".join(one)]} != at_others


def test_all_seeds_at_one_rate_are_shown_and_change_no_verdict(tmp_path):
    at_one = [*runs(sign=-1.0, rate="1e-4", first=0, seeds=2), *runs(sign=-1.0, rate="0.0001", first=2, seeds=2)]
    numbers = study.run(written(tmp_path, discount=[*at_one, *runs()]))
    assert set(numbers["one_rate"]) == set(numbers["end"])
    assert {found["kl_per_token"]["seeds"] for found in numbers["one_rate"].values()} == {4}
    assert numbers["one_rate"]["256 exact-0.5"]["kl_per_token"]["mean"] == near(1.1 * (1 - 0.005))
    assert study.check(numbers) == study.check({**numbers, "one_rate": {}})


def test_the_sweep_marks_the_best_rate_of_each_arm_and_is_not_judged(tmp_path):
    numbers = study.run(written(tmp_path))
    best = [(run["completions"], run["arm"], run["learning_rate"]) for run in numbers["rates"] if run["best"]]
    assert best == [(size, arm, 3e-4) for size in ("64", "256") for arm in ARMS]
    assert len(numbers["rates"]) == 5 * len(ARMS)
    assert study.check(numbers) == study.check({**numbers, "rates": []})


@pytest.mark.slow
def test_a_line_has_no_mark_at_a_discount_without_runs(tmp_path):
    kept = [row for row in runs() if row["completions"] == 256 and row["arm"] in ("exact-0", "exact-0.5", "exact-1")]
    study.draw(study.run(written(tmp_path, discount=kept)), figure := Figure())
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [0, 1, 4]
    assert np.isfinite(np.asarray(line.get_ydata(), dtype=float)).all()
