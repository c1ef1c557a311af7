"""Studies that read recorded runs: what counts as a difference, what they conclude, and how `--run` repeats them."""

import csv
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from papers.made_up_runs import copied
from some import first
from tolerances import DRAWN_AGAIN, EXACT
from typer.testing import CliRunner

from klgrad.cli import app, reproduce as experiments
from klgrad.errors import ExperimentError
from klgrad.papers import Settings, frpo, reproduce
from klgrad.papers.comedy import on_policy
from klgrad.papers.runs import (
    COMMITTED,
    at_start,
    collapse_if_run,
    counts,
    equal_over_seeds,
    error_of_kl_at,
    exceeds_over_seeds,
    gap_at_equal_kl,
    kl_at,
    mean_of,
    nearest,
    over_seeds,
    paired_difference,
    paired_if_run,
    paths,
    points_of,
    right_at,
    summaries,
)
from klgrad.papers.study import all_exceed, exceeds, no_gain, studies
from klgrad.papers.tang_munos import fig8_language_model

STUDIES = studies()
EXPERIMENTS = [name for name, study in STUDIES.items() if study.experiment]
ROUNDING = 1e-12
"""Sums of a few float64 numbers of the order of 1."""
ROUNDED = 0.005
"""Of a share that a page gives with two digits."""
DRAWN = 2000
"""Repetitions, each with other errors of the evaluations: they give a standard error to 1.6%, 1/√(2 · 2000)."""


def rows(*values, error=0.0):
    return [{"x": str(value), "x_se": str(error)} for value in values]


def test_the_error_is_the_larger_of_that_of_the_seeds_and_that_of_the_evaluations():
    assert over_seeds(rows(1, 2, 3), "x")["error"] == pytest.approx(3**-0.5, rel=ROUNDING)
    assert over_seeds(rows(1, 2, 3, error=0.1), "x")["error"] == pytest.approx(3**-0.5, rel=ROUNDING)
    assert over_seeds(rows(2, 2, 2, error=0.3), "x")["error"] == pytest.approx(0.3 / 3**0.5, rel=ROUNDING)


def test_one_seed_has_the_error_of_its_evaluation_and_does_not_count():
    one = mean_of(rows(9, error=0.1), "x")
    assert one == {"difference": 9, "error": pytest.approx(0.1, rel=ROUNDING), "seeds": 1}
    assert not counts(one)
    assert mean_of([], "x") is None


@pytest.mark.parametrize(
    ("gap", "seeds", "expected"), [(2.1, 3, True), (1.9, 3, False), (-2.1, 3, False), (9, 2, False)]
)
def test_a_difference_counts_beyond_two_errors_with_three_seeds(gap, seeds, expected):
    own = (seeds / 2) ** 0.5  # of each run, so that the mean of the gaps has an error of 1
    found = paired_difference(runs_of_pairs(*((seed, gap) for seed in range(seeds)), error=own), "x")
    assert found["error"] == pytest.approx(1, rel=ROUNDING)
    assert counts(found) is expected


@pytest.mark.parametrize(
    ("gap", "seeds", "verdict", "of_a_collapse"),
    [
        (2.1, 3, "holds", "holds"),
        (1.9, 3, "undecided", "undecided"),
        (-1.9, 3, "undecided", "undecided"),
        (-2.1, 3, "contradicted", "undecided"),
        (-9, 2, "undecided", "undecided"),
    ],
)
def test_a_sentence_is_contradicted_only_if_its_opposite_counts(gap, seeds, verdict, of_a_collapse):
    """A run that has not collapsed yet does not contradict that it would."""
    found = {"difference": gap, "error": 1.0, "seeds": seeds}
    assert exceeds_over_seeds("", found).verdict == verdict
    collapse = collapse_if_run("", found, "after 60 updates")
    assert collapse.verdict == of_a_collapse
    assert collapse.measured.endswith("; after 60 updates") == (verdict == "contradicted")


@pytest.mark.parametrize(
    ("z", "verdict"), [(4.1, "holds"), (3.9, "undecided"), (-3.9, "undecided"), (-4.1, "contradicted")]
)
def test_a_sentence_about_repeats_is_contradicted_only_if_its_opposite_is_significant(z, verdict):
    assert exceeds("", z, 1.0).verdict == all_exceed("", [(9.0, 1.0), (z, 1.0)]).verdict == verdict


@pytest.mark.parametrize(
    ("gain", "verdict"), [(0.0, "holds"), (0.2, "undecided"), (0.3, "undecided"), (0.5, "contradicted")]
)
def test_that_nothing_is_gained_is_contradicted_only_by_a_gain_beyond_the_margin(gain, verdict):
    """A margin of 0.25, by two standard errors."""
    assert no_gain("", gain, 0.1).verdict == verdict


def runs_of_pairs(*gaps, error=0.0):
    """Pairs of runs that differ by these gaps, by seed; each seed has a level of its own."""
    level = lambda seed, gap: {"seed": str(seed), "x": str(5 * seed + gap), "x_se": str(error)}
    return [(level(seed, gap), level(seed, 0.0)) for seed, gap in gaps]


def test_pairs_of_one_seed_are_compared_with_each_other():
    """The seeds are far apart and their gaps are not, so that pairing leaves a small error."""
    found = paired_difference(runs_of_pairs((0, 1.0), (1, 1.1), (2, 0.9)), "x")
    assert found == pytest.approx({"difference": 1.0, "error": 0.1 / 3**0.5, "seeds": 3}, rel=ROUNDING)


@pytest.mark.parametrize(
    ("gaps", "error", "expected"),
    [
        ([(0, 0.0), (0, 2.0), (1, 0.0), (1, 2.0)], 0.0, (4 / 3 / 4) ** 0.5),  # over the four pairs; the seeds agree
        ([(0, 0.0), (0, 0.0), (1, 2.0), (1, 2.0)], 0.0, 1.0),  # over the two seeds, which are two pairs each
        ([(0, 1.0), (0, 1.0), (1, 1.0), (1, 1.0)], 0.2, 0.2 * 2**0.5 / 4**0.5),  # of the evaluations; all pairs agree
    ],
)
def test_the_error_of_pooled_pairs_is_the_largest_of_three(gaps, error, expected):
    found = paired_difference(runs_of_pairs(*gaps, error=error), "x")
    assert found == pytest.approx({"difference": 1.0, "error": expected, "seeds": 2}, rel=ROUNDING)


@pytest.mark.parametrize(("left_out", "pairs"), [((), 9), (("long",), 6), (("std", "long"), 3)])
def test_k1_in_the_reward_and_k3_as_loss_are_compared_over_all_experiments(tmp_path, left_out, pairs):
    """Runs with divided advantages, with another seed in one arm, or at another coefficient have no part in it."""
    copied(tmp_path, lambda row: row, *{"comedy", "std", "long"} - {*left_out})
    settings = copied(tmp_path, lambda row: {**row, "division": "divided"}, *left_out)
    found = on_policy.run(settings)["pooled"]["0.03"]
    assert found["pairs"] == pairs
    assert found["correct_in"]["difference"] > 2 * found["correct_in"]["error"]


def test_little_progress_of_k3_is_a_share_of_that_of_k2(tmp_path):
    """The committed students, and such that k3 as a loss comes a quarter of the way that k2 as a loss does."""
    column, file = fig8_language_model.KL, "fig8_seeds"
    with (COMMITTED / f"{file}.csv").open(newline="", encoding="utf-8") as handle:
        label = lambda row: (row["lengths"], row["arm"], row["seed"], row["update"])
        at = {label(row): float(row[column]) for row in csv.DictReader(handle)}

    def near_its_start(row):
        if (row["arm"], row["update"]) != ("k3-loss", "40"):
            return row
        start, end = (at[row["lengths"], "k2-loss", row["seed"], update] for update in ("0", "40"))
        return {**row, column: str(start - (start - end) / 4)}

    changed = copied(tmp_path, near_its_start, file)
    for settings, share, verdict in (
        (Settings(), 0.88, "contradicted"),
        (changed, 0.25, "holds"),
    ):
        numbers = fig8_language_model.run(settings)
        assert numbers["progress"]["fixed-length"]["difference"] == pytest.approx(share, abs=ROUNDED)
        little = [check for check in fig8_language_model.check(numbers) if "little progress" in check.claim]
        assert [check.verdict for check in little] == [verdict] * 2


def test_figure_8_is_judged_by_seeds_that_chose_no_rate(tmp_path):
    """Seeds 0 to 2 of arms that have others change nothing; k3 as a loss has no others."""

    def far(row):
        chose = row["arm"] not in ("k3-loss", "k2-loss") and row["seed"] in "012"
        return {**row, fig8_language_model.KL: "999"} if chose else row

    settings = Settings(), copied(tmp_path, far, "fig8_seeds")
    found, changed = map(fig8_language_model.run, settings)
    assert changed["differences"] == found["differences"]
    gaps = found["differences"]["may-end"]
    assert {gap["seeds"] for claim, gap in gaps.items() if "k3" not in claim} == {6}
    assert {gap["seeds"] for claim, gap in gaps.items() if "k3" in claim} == {3}


def test_a_collapse_is_judged_by_the_long_runs(tmp_path):
    """The committed ones end far above their start; if they ended at 0, the paper's sentences would hold."""
    fallen = lambda row: {**row, "correct_in": "0" if row["update"] == "300" else row["correct_in"]}
    changed = copied(tmp_path, fallen, "comedy", "std", "long")
    for settings, verdict in ((Settings(), "contradicted"), (changed, "holds")):
        checks = on_policy.check(on_policy.run(settings))
        assert [check.verdict for check in checks if "after 300 updates" in check.claim] == [verdict] * 3


@pytest.mark.parametrize(
    ("gap", "seeds", "holds", "decided"),
    [
        (0.5, 3, True, True),
        (-0.5, 3, True, True),
        (2.0, 3, False, False),
        (9.0, 3, False, True),
        (0.5, 2, False, False),
    ],
)
def test_two_means_are_equal_within_a_margin_or_not_or_it_is_open(gap, seeds, holds, decided):
    """A margin of 3 and an error of 1: equal below a difference of 1, unequal beyond 5."""
    found = equal_over_seeds("", {"difference": gap, "error": 1.0, "seeds": seeds}, margin=3.0)
    assert (found.holds, found.decided) == (holds, decided)


@pytest.mark.parametrize(("right", "expected"), [(0.3, 1.0), (0.6, None), (0.05, None)])
def test_the_kl_of_a_reward_is_not_extrapolated(right, expected):
    """Right answers of 0.1 + 0.2 √KL, seen from 0.2 to 0.5."""
    found = kl_at([(0.25, 0.2), (4.0, 0.5)], start=0.1, right=right)
    assert found is None if expected is None else found == pytest.approx(expected, rel=ROUNDING)


def evaluations(slope, *kls, seeds=(0, 1, 2), error=0.0):
    """Right answers of 0.1 + slope √KL."""
    return [
        {
            "seed": str(s),
            "update": str(20 + 20 * i),
            "kl_per_sequence": kl,
            "correct_in": 0.1 + slope * kl**0.5,
            "correct_in_se": error,
        }
        for s in seeds
        for i, kl in enumerate(kls)
    ]


def test_two_arms_are_compared_at_the_largest_kl_that_both_have_had():
    found = gap_at_equal_kl(evaluations(0.3, 0.5, 2, 4), evaluations(0.2, 0.3, 0.6, 1), start=0.1)
    assert found == pytest.approx({"difference": 0.1, "error": 0, "seeds": 3, "kl": 1}, rel=1e-9, abs=1e-12)


def test_the_error_of_a_comparison_at_equal_kl_has_that_of_the_evaluations():
    """At the last of three KLs; by hand: its variance is the sum over evaluations of their squared weights there."""
    kls, error = (1.0, 2.0, 4.0), 0.01
    powers = torch.tensor([[kl**0.5, kl] for kl in kls], dtype=torch.float64)
    weights = powers[-1] @ torch.linalg.inv(powers.T @ powers) @ powers.T
    expected = error * float(weights.norm()) * 2**0.5 / 3**0.5  # of two arms, and of the mean of three seeds
    found = gap_at_equal_kl(evaluations(0.3, *kls, error=error), evaluations(0.2, *kls, error=error), start=0.1)
    assert found is not None
    EXACT.check(found["error"], expected)


def noisy(slope, *kls_and_errors):
    """One run, whose evaluations differ in their error."""
    kls, errors = zip(*kls_and_errors, strict=True)
    rows = evaluations(slope, *kls, seeds=(0,))
    return [{**row, "correct_in_se": error} for row, error in zip(rows, errors, strict=True)]


def spread(value, *arms):
    """The root mean square by which a number changes if the evaluations of arms are drawn again with their errors."""
    draw, before = random.Random(0), value(*arms)
    again = lambda row: {**row, "correct_in": draw.gauss(row["correct_in"], row["correct_in_se"])}
    after = [value(*([again(row) for row in arm] for arm in arms)) for _ in range(DRAWN)]
    return (sum((x - before) ** 2 for x in after) / DRAWN) ** 0.5


def test_the_error_of_a_comparison_at_equal_kl_is_the_spread_over_evaluations_that_are_drawn_again():
    arms = noisy(0.3, (1.0, 0.03), (2.0, 0.01), (5.0, 0.02)), noisy(0.2, (0.5, 0.01), (1.5, 0.04), (4.0, 0.03))
    gap = lambda *arms: right_at(points_of(arms[0]), 0.1, 4.0) - right_at(points_of(arms[1]), 0.1, 4.0)
    found = gap_at_equal_kl(*arms, start=0.1)
    assert found is not None
    DRAWN_AGAIN.check(spread(gap, *arms), found["error"])


def test_the_error_of_the_kl_of_a_reward_is_the_spread_over_evaluations_that_are_drawn_again():
    run = noisy(0.2, (0.25, 0.003), (1.0, 0.001), (4.0, 0.002))
    run[-1]["correct_in"] += 0.1  # so that the curve bends
    kl = lambda run: kl_at(points_of(run), 0.1, right=0.35)
    DRAWN_AGAIN.check(spread(kl, run), error_of_kl_at(run, 0.1, kl(run)))


def test_the_kl_of_a_reward_that_a_curve_only_touches_is_not_known():
    """Right answers of 0.1 + 0.25 √KL - 0.125 KL, whose top is at a KL of 1."""
    run = noisy(0.0, (0.25, 0.01), (1.0, 0.01))
    run[0]["correct_in"], run[1]["correct_in"] = 0.1 + 0.25 / 2 - 0.125 / 4, 0.1 + 0.25 - 0.125
    assert error_of_kl_at(run, 0.1, 1.0) > 1e6


def test_a_comparison_at_equal_kl_leaves_out_seeds_that_one_arm_does_not_have():
    stopped = [*evaluations(0.2, 1, 2, seeds=(1, 2)), *evaluations(0.2, 1, seeds=(0,))]
    found = gap_at_equal_kl(evaluations(0.3, 1, 2), stopped, start=0.1)
    assert found is not None
    assert found["seeds"] == 2
    assert gap_at_equal_kl(evaluations(0.3, 1, 2, seeds=(3,)), stopped, start=0.1) is None


@pytest.mark.parametrize("kls", [(1, 4, 2), (4, 1, 0.5), (1, 2, 2)])
def test_a_run_whose_kl_does_not_rise_has_no_value_at_equal_kl(kls):
    """Its right answers are no function of its KL."""
    rising, other = evaluations(0.3, 1, 2, 4), evaluations(0.2, 1, 2, 4, seeds=(1, 2))
    mixed = [*evaluations(0.3, *kls, seeds=(0, 1)), *evaluations(0.3, 1, 2, 4, seeds=(2,))]
    for one, another in ((mixed, other), (other, mixed)):
        found = gap_at_equal_kl(one[::-1], another, start=0.1)  # whatever the order of the rows
        assert found is not None
        assert found["seeds"] == 1
    assert gap_at_equal_kl(evaluations(0.3, *kls), rising, start=0.1) is None


def test_more_runs_do_not_make_the_error_before_training_smaller():
    """All runs of a seed begin with one model on the same questions, and each seed has questions of its own."""
    first = [{"update": "0", "seed": str(seed), "x": str(seed), "x_se": "0.3"} for seed in (1, 3, 3, 3)]
    found = at_start([*first, {"update": "20", "seed": "1", "x": "9"}], "x")
    assert found == {"mean": 2, "error": pytest.approx(1, rel=ROUNDING), "seeds": 2}
    alike = [{**row, "x": "2"} for row in first]
    assert at_start(alike, "x") == {"mean": 2, "error": pytest.approx(0.3 / 2**0.5, rel=ROUNDING), "seeds": 2}


@pytest.mark.parametrize("mean", [lambda rows, of: summaries(rows, ["x"], of), lambda rows, of: paths(rows, "x", of)])
def test_runs_that_differ_in_something_else_than_their_seed_are_not_pooled(mean):
    same = {"arm": "a", "update": "60", "x": "1"}
    rates = [{**same, "seed": seed, "rate": rate} for seed in ("0", "1") for rate in ("1e-4", "3e-4")]
    assert len(mean(rates, lambda row: f"{row['arm']} {row['rate']}")) == 2
    message = (
        "expected one row for each setting, seed and update; received 2 rows of the setting 'a' with seed 0; remedy"
    )
    with pytest.raises(ExperimentError, match=message):
        mean(rates, lambda row: row["arm"])


def test_settings_without_a_seed_in_common_have_no_difference():
    one, other = ([{"seed": seed, "x": "1"}] for seed in "01")
    assert paired_if_run(one, other, "x") is None
    assert paired_if_run([*one, *other], other, "x") == {"difference": 0, "error": 0, "seeds": 1}


def last_of(*runs):
    """Last evaluations, each of an arm with a seed, a KL and a rate, which is its place."""
    return [
        {"arm": arm, "seed": seed, "kl_per_token": kl, "learning_rate": str(i)}
        for i, (arm, seed, kl) in enumerate(runs)
    ]


def chosen(*runs):
    return {arm: row["learning_rate"] for arm, row in nearest(last_of(*runs), lambda row: row["arm"]).items()}


def test_the_nearest_run_of_each_arm():
    assert chosen(("a", "0", "0.9"), ("b", "0", "10.0"), ("a", "0", "0.8"), ("b", "0", "9.0")) == {"a": "2", "b": "3"}
    assert chosen(("a", "0", "0.8"), ("a", "0", "0.9")) == {"a": "0"}


@pytest.mark.parametrize("kl", ["nan", "inf", "-inf"])
def test_a_student_that_diverged_is_not_the_nearest(kl):
    assert chosen(("a", "0", kl), ("a", "0", "0.9"), ("a", "0", kl), ("b", "0", kl)) == {"a": "1"}


def test_runs_of_other_seeds_do_not_choose():
    assert chosen(("a", "1", "0.1"), ("a", "0", "0.9"), ("a", "2", "0.2"), ("b", "1", "0.1")) == {"a": "1"}


def test_a_study_of_several_files_runs_all_their_scripts(tmp_path):
    found = experiments.commands([STUDIES["tang-munos/fig7"]], Path("benchmarks"), "MODEL", tmp_path)
    assert [Path(command[1]).name for command in found] == ["exp_comedy.py", "exp_std.py", "exp_frontier.py"]


def test_no_claim_holds_without_a_third_seed(tmp_path):
    settings = copied(tmp_path, lambda row: row if row["seed"] != "2" else None, "std")
    assert not any(check.holds for check in frpo.check(frpo.run(settings)))


def test_the_opposite_numbers_give_the_opposite_verdict(tmp_path):
    other = {"divided": "undivided", "undivided": "divided"}
    settings = copied(tmp_path, lambda row: {**row, "division": other[row["division"]]}, "std")
    holds = [check.holds for check in frpo.check(frpo.run(settings))]
    assert holds == [False, False, False, False, False]


def test_a_group_without_a_spread_of_rewards_loses_the_coefficient():
    """Divided by its standard deviation, 0 - β KL is the same whatever β is."""
    kl = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    divided = [(-beta * (kl - kl.mean())) / (beta * kl).std() for beta in (0.03, 0.3)]
    torch.testing.assert_close(*divided, rtol=ROUNDING, atol=ROUNDING)


def test_the_effective_coefficient_without_division_is_known():
    """β in the reward, and n/(n - 1) β outside it: tests/facts sums the factor over all outcomes."""
    end = frpo.run(Settings())["end"]
    assert end["k1-reward undivided 0.1"]["effective"]["mean"] == pytest.approx(0.1, rel=ROUNDING)
    assert end["k2-loss undivided 0.1"]["effective"]["mean"] == pytest.approx(0.1 * 8 / 7, rel=ROUNDING)


def test_the_curve_finds_an_arm_that_is_off(tmp_path):
    def raised(row):
        higher = row["arm"] == "k3-loss" and row["division"] == "divided"
        return {**row, "correct_in": str(float(row["correct_in"]) + 0.1 * higher)}

    before, after = (frpo.run(s)["curve"]["off"] for s in (Settings(), copied(tmp_path, raised, "std")))
    moved = {name: after[name]["mean"] - before[name]["mean"] for name in before}
    assert moved.pop("k3-loss divided") == pytest.approx(0.1, rel=1e-9)  # the others' curve does not contain it
    assert max(moved.values()) < 0.01


@pytest.mark.parametrize(("arm", "change", "fails"), [("k1-loss", 0.3, "k1 as loss"), ("none", 0.2, "no KL")])
def test_other_right_answers_at_equal_kl_give_another_verdict(arm, change, fails, tmp_path):
    def moved(row):
        off = change * (row["arm"] == arm and row["update"] != "0")
        return {**row, "correct_in": str(float(row["correct_in"]) + off)}

    changed = copied(tmp_path, moved, "comedy", "std", "frontier")
    study = STUDIES["tang-munos/fig7"].computation
    before, after = (study.check(study.run(s))[:4] for s in (Settings(), changed))
    assert all(check.holds for check in before)
    assert [check.holds for check in after] == [fails not in check.claim for check in after]


@pytest.mark.parametrize("arm", ["none", "k1-reward"])
def test_the_evaluations_of_both_arms_are_in_the_error_of_their_gap_at_equal_kl(arm, tmp_path):
    """Of evaluations that are eight times as noisy the errors exceed the spread between seeds."""
    noisier = lambda row: {**row, "correct_in_se": str((8 if row["arm"] == arm else 1) * float(row["correct_in_se"]))}
    changed = copied(tmp_path, noisier, "comedy", "std", "frontier")
    claim = "k1 in the reward at β = 0.03 answers more right than no KL"
    before, after = (STUDIES["tang-munos/fig7"].computation.run(s)["gaps"][claim] for s in (Settings(), changed))
    assert after["difference"] == pytest.approx(before["difference"], rel=1e-9)  # fits differ in their last digits
    assert after["error"] > 2 * before["error"]


@pytest.mark.parametrize("name", first(EXPERIMENTS, ["frpo/kl-in-reward"]))
def test_recorded_runs_are_read_again_and_dated(name, tmp_path):
    first, again = (reproduce(STUDIES[name], Settings(), tmp_path) for _ in range(2))
    assert again.seconds is not None
    assert re.fullmatch(r"20\d\d-\d\d-\d\d.*, commit [0-9a-f]{7}.*", first.measured)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_that_the_numbers_are_recorded(tmp_path):
    done = CliRunner().invoke(app, ["reproduce", "frpo/kl-in-reward", "--jobs", "1", "--out", str(tmp_path)])
    assert "committed numbers of runs of language models" in " ".join(done.output.split())


def test_the_commands_of_run(tmp_path):
    chosen = [STUDIES[name] for name in ("tang-munos/fig8", "frpo/kl-in-reward")]
    found = list(experiments.commands(chosen, Path("benchmarks"), "MODEL", tmp_path))
    assert [command[:2] for command in found] == [
        [sys.executable, str(Path("benchmarks") / script)] for script in (*["exp_fig8.py"] * 3, "exp_std.py")
    ]
    assert [command[2:-4] for command in found] == [
        ["sweep", "MODEL"],
        ["seeds", "MODEL"],
        ["fresh", "MODEL"],
        ["MODEL"],
    ]
    assert all(command[-4:-2] == ["--out", str(tmp_path)] for command in found)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_script_of_an_experiment_exists(name):
    experiment = STUDIES[name].experiment
    assert experiment is not None
    script = Path(__file__).parents[2] / "benchmarks" / experiment.script
    assert experiment.file.removesuffix(".csv").split("_")[0] in script.read_text(encoding="utf-8")
    assert (COMMITTED / experiment.file).is_file()


@pytest.mark.parametrize("names", [[], ["schulman/table"], ["tang-munos/fig8", "schulman/table"]])
def test_run_needs_the_names_of_experiments(names, tmp_path):
    with pytest.raises(ExperimentError, match=f"choose from {', '.join(EXPERIMENTS)}"):
        experiments.measure([STUDIES[name] for name in names], tmp_path)


def test_run_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ExperimentError, match="expected a CUDA GPU"):
        experiments.measure([STUDIES["tang-munos/fig8"]], tmp_path)


@pytest.mark.parametrize("status", [0, 1])
def test_run_calls_the_scripts_and_reports_a_failure(status, tmp_path, monkeypatch):
    calls = []

    def called(command, **_):
        calls.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("klgrad.models.resolve", lambda _: "MODEL")
    monkeypatch.setattr(experiments.subprocess, "run", called)
    chosen = [STUDIES["tang-munos/fig8"]]
    if status:
        with pytest.raises(ExperimentError, match=r"a failure of .*exp_fig8\.py"):
            experiments.measure(chosen, tmp_path)
        assert len(calls) == 1
    else:
        assert experiments.measure(chosen, tmp_path) == str(tmp_path / "runs")
        assert len(calls) == 3
